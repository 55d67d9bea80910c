"""``saf doctor``: problems of the configured databases, and their cures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from saf.cli.console import echo, plain_console
from saf.config import load
from saf.errors import Unavailable
from saf.operating.doctor import REACHABLE, examine
from saf.operating.wording import counted

FOUND = 1
COLOURS = {"error": "red", "warning": "yellow"}


def command(
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration file. Default: $SAF_CONFIG, or saf.toml in this folder."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON, with the checks that are ok.")
    ] = False,
) -> None:
    """Report present and coming problems, with cause and cure.

    It checks brokers, destinations and this machine. Reads only.

    Exit code 0: no errors, at most warnings; 1: errors; 75: the only error is that a database does
    not answer.
    """
    from saf.spark.java import examine_machine

    found = [*examine(load(config)), *examine_machine()]
    if as_json:
        echo(json.dumps({"findings": [asdict(finding) for finding in found]}))
    else:
        console = plain_console()
        bad = [finding for finding in found if finding.severity != "ok"]
        for problem in bad:
            console.paragraph(
                f"{problem.severity}: {problem.where}: {problem.check}: {problem.what}",
                style=COLOURS[problem.severity],
                others="    ",
            )
            console.paragraph(f"  cure: {problem.cure}", others="    ")
        errors = sum(finding.severity == "error" for finding in bad)
        counts = counted(errors, "error"), counted(len(bad) - errors, "warning")
        console.print(f"{counted(len(found), 'check')}: {', '.join(counts)}")
    failed = {finding.check for finding in found if finding.severity == "error"}
    if failed:
        raise typer.Exit(Unavailable.exit_code if failed == {REACHABLE} else FOUND)
