"""``saf doctor``, ``saf destination`` and ``saf lake``: problems, their cures, and care for tables.

`doctor` examines all configured databases. `check` shows the guarantees and problems of one
destination in saf.toml; `pause` and `resume` decide whether sources send to it. `optimize`
maintains the table of a lakehouse: of kind delta only.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saf.cli.alive import waiting
from saf.cli.brokers import AsJson, Brokers, Commands, Config, Why, named
from saf.cli.console import echo, plain_console
from saf.cli.service import told_paused, told_resumed
from saf.config import load
from saf.destinations.delta import Delta
from saf.destinations.settings import client_needed
from saf.errors import Unavailable, UsageError
from saf.operating.doctor import REACHABLE, examine
from saf.operating.wording import counted
from saf.setaside import backoff

if TYPE_CHECKING:
    from saf.destinations.delta.table import Optimized

FOUND = 1
COLOURS = {"error": "red", "warning": "yellow"}


def doctor(
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON, with the checks that are ok.")
    ] = False,
) -> None:
    """Check brokers and destinations; print each problem with its fix.

    It also checks this machine. Reads only.

    Exit code 0: no errors, at most warnings; 1: errors; 75: the only error is that a database does
    not answer.
    """
    from saf.spark.java import examine_machine

    settings, place = load(config), ["this machine"]
    with waiting(lambda: f"examining {place[-1]}"):
        found = [*examine(settings, watch=place.append), *examine_machine()]
    if as_json:
        echo(json.dumps({"findings": [asdict(finding) for finding in found]}))
    else:
        console = plain_console()
        bad = [finding for finding in found if finding.severity != "ok"]
        for problem in bad:
            console.paragraph(
                f"{problem.severity}: {problem.where}: {problem.what} [{problem.check}]",
                style=COLOURS[problem.severity],
                others="    ",
            )
            console.paragraph(f"  fix: {problem.cure}", others="    ")
        errors = sum(finding.severity == "error" for finding in bad)
        counts = counted(errors, "error"), counted(len(bad) - errors, "warning")
        console.print(f"{counted(len(found), 'check')}: {', '.join(counts)}")
    failed = {finding.check for finding in found if finding.severity == "error"}
    if failed:
        raise typer.Exit(Unavailable.exit_code if failed == {REACHABLE} else FOUND)


destinations = Commands(help="Destinations: where messages are delivered.")
lakes = Commands(help="Lakes: the tables of destinations of kind delta.")

Name = Annotated[str, typer.Argument(help="Name of the destination in saf.toml.")]


@destinations.command()
def check(name: Name, config: Config = None, as_json: AsJson = False) -> None:
    """Check a destination: connect to it, and show its guarantees.

    It reads the server's version and settings, and names settings that would give more safety. In
    an object store, it writes a probe and deletes it, because nothing else shows what the store
    keeps; elsewhere, it writes nothing.

    Exit code 0: messages can be stored there; 1: it has a problem; 2: it refuses the login or the
    forwarder; 75: it does not answer.
    """
    destination = named(load(config), name)
    with waiting(f"examining destination {name!r}"):
        problems = [*destination.problems(name), *destination.probe(name)]
        given = destination.guarantee(name)
    if as_json:
        echo(
            json.dumps(
                {"destination": name, **_said(given, problems), "quality": destination.quality}
            )
        )
    else:
        console = plain_console()
        console.paragraph(f"destination {name!r}: {given.server}", others="    ")
        console.paragraph(f"  promise: {given.promise}", others="    ")
        for what, cure in problems:
            console.paragraph(f"error: {what}", style="red", others="    ")
            console.paragraph(f"  fix: {cure}", others="    ")
        for what, cure in given.more:
            console.paragraph(f"not guaranteed: {what}", style="yellow", others="    ")
            console.paragraph(f"  fix: {cure}", others="    ")
    if problems:
        raise typer.Exit(FOUND)


@destinations.command()
def pause(name: Name, *, why: Why = "", round_: Brokers) -> None:
    """Pause a destination: sources send nothing there.

    It stays paused until it is resumed. Its messages wait, in order, as for a destination that is
    down, but no attempt is made. Other destinations continue.
    """
    named(round_.settings, name)
    round_.tell(
        "destination",
        lambda connection: backoff.pause(connection, name, why),
        partial(told_paused, "destination", name),
    )


@destinations.command()
def resume(name: Name, *, why: Why = "", round_: Brokers) -> None:
    """Resume a destination that is paused; its messages are due now."""
    round_.tell(
        "destination",
        lambda connection: backoff.resume(connection, name, why),
        partial(told_resumed, "destination", name),
    )


def _said(given: Any, problems: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "server": given.server,
        "promise": given.promise,
        "problems": [{"what": what, "cure": cure} for what, cure in problems],
        "more": [{"what": what, "cure": cure} for what, cure in given.more],
    }


@lakes.command()
def optimize(
    name: Name,
    keep_hours: Annotated[
        int,
        typer.Option(min=1, help="Hours for which files of older versions of the table are kept."),
    ] = 168,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed; change nothing.")
    ] = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Merge small files into large ones; remove unneeded files.

    A forwarder writes a file for each chunk and partition, and may continue during the run. Files
    that were replaced, or were left by a killed process, are removed after --keep-hours; until
    then, readers of older versions of the table find them.

    Exit code 0: done; 2: the table does not exist; 75: it does not answer.
    """
    destination = named(load(config), name)
    if not isinstance(destination, Delta):
        raise UsageError(
            f"destination {name!r} is of kind {destination.kind!r}: only delta has tables"
        )
    with client_needed(f"destination {name!r}", "delta"):
        from saf.destinations.delta.table import optimize as care_for
    with waiting(f"optimizing the table of destination {name!r}"):
        done = care_for(name, destination, keep_hours=keep_hours, dry_run=dry_run)
    if as_json:
        echo(json.dumps({"destination": name, "dry_run": dry_run, **asdict(done)}))
    else:
        echo(_lines(done, keep_hours, dry_run=dry_run))


def _lines(done: Optimized, keep_hours: int, *, dry_run: bool) -> str:
    unneeded = f"{counted(done.removed, 'file')} not needed for {keep_hours} hours"
    if dry_run:
        return (
            f"{done.table}: {counted(done.files_before, 'file')}, {_size(done.bytes_before)}; "
            f"{unneeded} would be removed"
        )
    return (
        f"{done.table}: {counted(done.files_before, 'file')}, {_size(done.bytes_before)} -> "
        f"{counted(done.files_after, 'file')}, {_size(done.bytes_after)}; removed {unneeded}"
    )


def _size(count: int) -> str:
    """Return a number of bytes in MiB.

    >>> _size(123_456_789)
    '117.7 MiB'
    """
    return f"{count / (1 << 20):,.1f} MiB"
