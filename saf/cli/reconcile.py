"""``saf reconcile``: prove that the destinations hold what the sources have completed."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from saf.config import Settings, load
from saf.errors import ConfigurationError, SafError
from saf.reconcile import Outcome, Range, reconcile

DIFFERENT = 1


def _moment(text: str) -> datetime:
    """A point in time; without an offset, by this machine's time zone.

    >>> _moment("2026-01-31T12:00:00+00:00").isoformat()
    '2026-01-31T12:00:00+00:00'
    """
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time such as 2026-01-31T12:00:00Z") from None


def command(
    *,
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration file. Default: $SAF_CONFIG, or saf.toml in this folder."),
    ] = None,
    broker: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this one. Default: all brokers.")
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            parser=_moment,
            metavar="TIME",
            help="Messages created from then on. Default: all, or those that no purge has taken.",
        ),
    ] = None,
    until: Annotated[
        datetime | None,
        typer.Option(parser=_moment, metavar="TIME", help="Messages created before. Default: all."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Name so many messages at most; all are counted.")
    ] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Compare what each source has completed with what its destinations hold. Reads only.

    Safe while everything runs. Exit code 0: the same; 1: messages are lost, duplicated or
    unexpected, and named.
    """
    settings = load(config)
    known: list[Outcome] = []
    failed: list[tuple[str, SafError]] = []
    for name in _chosen(settings, broker):
        try:
            known.append(
                reconcile(
                    name,
                    settings.brokers[name].dsn,
                    {one: there.dsn for one, there in settings.destinations.items()},
                    since=since,
                    until=until,
                    retention_seconds=settings.purge.retention_seconds,
                    limit=limit,
                )
            )
        except SafError as error:
            failed.append((name, error))
    if as_json:
        errors = [{"broker": name, "error": str(problem)} for name, problem in failed]
        brokers = [_as_dict(outcome) for outcome in known]
        typer.echo(json.dumps({"brokers": brokers, "errors": errors}))
    else:
        _show(known)
        for name, problem in failed:
            typer.echo(f"saf: broker {name!r}: {problem}", err=True)
    # a proven loss is not to be taken for something that passes by itself
    if not all(outcome.same for outcome in known):
        raise typer.Exit(DIFFERENT)
    if failed:
        raise typer.Exit(max(problem.exit_code for _, problem in failed))


def _chosen(settings: Settings, name: str | None) -> list[str]:
    if name is None:
        return list(settings.brokers)
    if name not in settings.brokers:
        there = ", ".join(settings.brokers)
        raise ConfigurationError(f"--broker {name}: there is no [brokers.{name}], only {there}")
    return [name]


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    shards = [
        {name: value for name, value in asdict(shard).items() if name != "hashes"}
        | {"same": shard.same}
        for shard in outcome.shards
    ]
    return {
        "broker": outcome.broker,
        "same": outcome.same,
        "since": outcome.range.since and outcome.range.since.isoformat(),
        "until": outcome.range.until and outcome.range.until.isoformat(),
        "purged": list(outcome.range.purged),
        **{kind: outcome.counts.get(kind, 0) for kind in KINDS},
        "shards": shards,
        "differences": [difference.as_dict() for difference in outcome.named],
    }


KINDS = ("lost", "duplicate", "unexpected", "in_flight")


def _show(known: list[Outcome]) -> None:
    console = Console(markup=False, emoji=False, soft_wrap=True)
    table = Table("broker", "complete", "set aside", "pending", "stored", "in flight", *KINDS[:3])
    for outcome in known:
        table.add_row(
            outcome.broker,
            *(
                f"{sum(getattr(shard, figure) for shard in outcome.shards):,}"
                for figure in ("complete", "aside", "pending", "stored")
            ),
            *(
                f"{outcome.counts.get(kind, 0):,}"
                for kind in ("in_flight", "lost", "duplicate", "unexpected")
            ),
        )
    if known:
        console.print(table)
    for outcome in known:
        console.print(f"{outcome.broker}: compared {_range(outcome.range)}")
        for one in outcome.named:
            where = f", stored at {', '.join(one.stored)}" if one.stored else ""
            console.print(
                f"{one.kind}: {one.message_id} for {one.service!r}, key {one.key!r}, "
                f"shard {one.shard}, created {one.created_at.isoformat()}{where}"
            )


def _range(compared: Range) -> str:
    since = f"messages created since {compared.since.isoformat()}" if compared.since else ""
    until = f"before {compared.until.isoformat()}" if compared.until else ""
    text = " and ".join(filter(None, [since, until])) or "all messages"
    if compared.purged:
        text += (
            f" (now less purge.retention_seconds, because the {' and the '.join(compared.purged)} "
            "may have been purged; if ever with a shorter retention, say --since)"
        )
    return text
