"""``saf status``: what is pending in each broker, how old it is, and who is at it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from saf.config import load
from saf.database import check_schema, unavailable_if_lost
from saf.errors import SafError
from saf.status import BrokerStatus, broker_status


def command(
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration file. Default: $SAF_CONFIG, or saf.toml in this folder."),
    ] = None,
    shards: Annotated[bool, typer.Option("--shards", help="Also a line per shard.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Show pending messages, their age, parked ones and dead letters of each source broker."""
    known: list[BrokerStatus] = []
    failed: list[tuple[str, SafError]] = []
    for name, broker in load(config).brokers.items():
        try:
            with (
                unavailable_if_lost(f"broker {name!r}"),
                broker.dsn.connect(role="status", autocommit=True) as connection,
            ):
                check_schema(connection)
                known.append(broker_status(connection, name))
        except SafError as error:
            failed.append((name, error))
    if as_json:
        errors = [{"broker": name, "error": str(problem)} for name, problem in failed]
        typer.echo(json.dumps({"brokers": [s.as_dict() for s in known], "errors": errors}))
    else:
        console = Console(markup=False, emoji=False)  # a broker may be called [/] or :smile:
        console.print(_overview(known))
        if shards:
            for status in known:
                console.print(_by_shard(status))
        for name, problem in failed:
            typer.echo(f"saf: broker {name!r}: {problem}", err=True)
    if failed:
        raise typer.Exit(max(problem.exit_code for _, problem in failed))


def _overview(known: list[BrokerStatus]) -> Table:
    table = Table("broker", "pending", "oldest", "parked", "dead letters", "shards owned by")
    for status in known:
        owners = Counter(shard.owner or "nobody" for shard in status.shards)
        table.add_row(
            status.broker,
            f"{status.pending:,}",
            _age(status.oldest_pending_seconds),
            f"{status.parked:,}",
            f"{status.dead_letters:,}",
            ", ".join(f"{owner}: {count}" for owner, count in sorted(owners.items())),
        )
    return table


def _by_shard(status: BrokerStatus) -> Table:
    table = Table("shard", "owner", "epoch", "batch", "pending", "lag", title=status.broker)
    for shard in status.shards:
        table.add_row(
            str(shard.shard),
            shard.owner or "-",
            str(shard.epoch),
            f"{shard.batch}{' open' if shard.open else ''}",
            f"{shard.pending:,}",
            _age(shard.lag_seconds),
        )
    return table


def _age(seconds: float | None) -> str:
    """Two leading units: people compare ages, they do not add them.

    >>> _age(None), _age(7.2), _age(3671), _age(200000)
    ('-', '7 s', '1 h 1 min', '2 d 7 h')
    """
    if seconds is None:
        return "-"
    left = round(seconds)
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"
