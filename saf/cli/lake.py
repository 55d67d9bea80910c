"""``saf lake``: maintain destinations of a lakehouse."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from saf.cli.brokers import AsJson, Config
from saf.cli.console import echo
from saf.cli.destination import Name, named
from saf.destinations.delta import Delta
from saf.destinations.queues import client_needed
from saf.errors import UsageError
from saf.operating.wording import counted

if TYPE_CHECKING:
    from saf.destinations.delta.optimizing import Optimized

app = typer.Typer(no_args_is_help=True, help="Destinations of kind delta: their tables.")


@app.command()
def optimize(
    name: Name,
    keep_hours: Annotated[
        int, typer.Option(min=1, help="How long files stay that readers of older versions need.")
    ] = 168,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed; change nothing.")
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
    destination = named(name, config)
    if not isinstance(destination, Delta):
        raise UsageError(
            f"destination {name!r} is of kind {destination.kind!r}: only delta has tables"
        )
    with client_needed(name, "delta"):
        from saf.destinations.delta.optimizing import optimize as care_for
    done = care_for(name, destination, keep_hours=keep_hours, dry_run=dry_run)
    if as_json:
        echo(json.dumps({"destination": name, "dry_run": dry_run, **asdict(done)}))
    else:
        echo(_said(done, keep_hours, dry_run=dry_run))


def _said(done: Optimized, keep_hours: int, *, dry_run: bool) -> str:
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
