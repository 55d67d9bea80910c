"""``saf source``: topics of other brokers that are read into an inbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from saf.cli.brokers import AsJson, Commands, Config, Why
from saf.cli.console import complain, echo, plain_console
from saf.config import Settings, load
from saf.errors import SafError, in_words, placed
from saf.operating.sources import SourceStatus, examine, forget, named, resume, status
from saf.operating.wording import age, counted
from saf.sources.settings import Start

app = Commands(help="Sources: topics of other brokers that are read into an inbox.")

FOUND = 1

Name = Annotated[str, typer.Argument(help="Name of the source in saf.toml.")]


@app.command("list")
def list_(config: Config = None, as_json: AsJson = False) -> None:
    """List the sources, with how far each was read."""
    settings = load(config)
    known, failed = statuses(settings)
    if as_json:
        errors = [{"source": name, "error": str(error)} for name, error in failed.items()]
        rows = [found.as_dict() for found in known]
        echo(json.dumps({"sources": rows, "errors": errors}))
    else:
        show(known)
        for error in failed.values():
            complain(str(error))
        if not settings.sources:
            echo("no sources: saf.toml has no [sources.NAME]")
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed.values()))


def statuses(settings: Settings) -> tuple[list[SourceStatus], dict[str, SafError]]:
    """Return the status of each source, and the errors of those that could not be asked."""
    known, failed = [], {}
    for name in settings.sources:
        try:
            known.append(status(settings, name))
        except SafError as error:
            failed[name] = error
    return known, failed


def show(known: list[SourceStatus]) -> None:
    """Print the status of sources, in lines."""
    console = plain_console()
    for source in known:
        for line in _lines(source):
            console.paragraph(line, others="    ")


def _lines(source: SourceStatus) -> Iterator[str]:
    yield (
        f"source {source.name!r}: {source.kind} topic {source.topic!r} -> service "
        f"{source.service!r} of {source.into}"
    )
    if not source.partitions:
        yield "  not read yet"
        return
    pending = "unknown" if source.pending is None else f"{source.pending:,}"
    when = ""
    if source.looked_at is not None:
        when = f", {age((datetime.now(UTC) - source.looked_at).total_seconds())} ago"
    yield f"  pending: {pending}{when}; {counted(len(source.partitions), 'partition')}"
    owners: dict[str | None, list[int]] = {}
    for partition in source.partitions:
        owners.setdefault(partition.owner, []).append(partition.shard)
        yield f"  shard {partition.shard}: read up to {placed(partition.position)}"
    for owner, shards in owners.items():
        yield f"  {in_words(shards)}: " + (owner or "no running forwarder reads it")


@app.command()
def check(name: Name, config: Config = None, as_json: AsJson = False) -> None:
    """Check a source: compare its topic with what was read.

    It writes nothing.

    Exit code 0: it can be read; 1: an operator must decide; 2: it refuses the login; 75: it does
    not answer.
    """
    settings = load(config)
    source = named(settings, name)
    problems = [*examine(settings, name)]
    if as_json:
        found = [{"what": what, "cure": cure} for what, cure in problems]
        echo(json.dumps({"source": name, "problems": found}))
    else:
        console = plain_console()
        for what, cure in problems:
            console.paragraph(f"error: {what}", style="red", others="    ")
            console.paragraph(f"  fix: {cure}", others="    ")
        if not problems:
            echo(f"source {name!r}: topic {source.topic!r} can be read")
    if problems:
        raise typer.Exit(FOUND)


@app.command("continue")
def continue_(
    name: Name,
    *,
    start: Annotated[
        Start,
        typer.Option(
            "--from",
            help="earliest: all messages that the topic has now, even those read before; latest: "
            "only messages that are added from now on.",
        ),
    ],
    why: Why = "",
    config: Config = None,
) -> None:
    """Continue a refused source: its topic was set back or made again.

    The topic may also have deleted messages before they were read. With earliest, messages that
    were stored before may be stored again, with the same message ids.
    The decision is recorded in the audit of the inbox.
    """
    found = resume(load(config), name, start, why)
    echo(f"source {name!r} continues with the {start} message of topic {found.topic!r}")


@app.command("forget")
def forget_(
    name: Name,
    broker: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Destination whose inbox stored it. Default: the one."),
    ] = None,
    *,
    why: Why = "",
    config: Config = None,
) -> None:
    """Forget how far a source was read.

    If saf.toml still has it, reading begins anew.
    """
    forget(load(config), name, broker, why)
    echo(f"source {name!r} is forgotten; its messages stay in the inbox")
