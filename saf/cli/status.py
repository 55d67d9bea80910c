"""``saf status``: pending messages of each broker, their age, and the forwarders at work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from saf.cli import parked
from saf.cli.brokers import AsJson, Config, Name, Round, chosen
from saf.cli.tables import Table
from saf.config import load
from saf.errors import ranges
from saf.operating.status import BrokerStatus, ShardStatus, StreamStatus, broker_status
from saf.operating.wording import age, at
from saf.setaside.backoff import SHOWN
from saf.setaside.dropped import Dropped


def command(
    config: Config = None,
    broker: Name = None,
    shards: Annotated[bool, typer.Option("--shards", help="Also list each shard.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show pending, parked and dead messages of each source.

    It also shows why messages wait.
    """
    round_ = Round(chosen(load(config), broker))
    known = round_.visit("status", lambda connection, _: broker_status(connection, SHOWN))

    def show() -> None:
        OVERVIEW.show({name: [status] for name, status in known.items()})
        lanes = {name: status.waiting for name, status in known.items()}
        parked.BY_LANE.show_any(lanes)
        parked.show_how_many_more(lanes)
        DROPPED.show_any({name: status.dropped for name, status in known.items()})
        STREAMS.show_any({name: status.streams for name, status in known.items()})
        if shards:
            BY_SHARD.show({name: status.shards for name, status in known.items()})

    brokers = [{"broker": name, **status.as_dict(shards=shards)} for name, status in known.items()]
    round_.report({"brokers": brokers}, show, as_json=as_json)


OVERVIEW = Table[BrokerStatus](
    *("pending", "oldest", "parked", "dead letters"),
    below="shards and their owners",
    cells=lambda status: (
        f"{status.pending:,}", age(status.oldest_pending_seconds), f"{status.parked:,}",
        f"{status.dead_letters:,}", "; ".join(_map(status)),
    ),
)  # fmt: skip
DROPPED = Table[Dropped](
    *("dropped", "by", "reason", "the last at", "the last one"),
    cells=lambda row: (
        f"{row.messages:,}", row.subscription, row.reason, at(row.last_at),
        str(row.last_message_id),
    ),
)  # fmt: skip
STREAMS = Table[StreamStatus](
    *("stream", "log", "not committed", "oldest", "last took some"),
    cells=lambda stream: (
        stream.stream, stream.log,
        "may not be read" if stream.pending is None else f"{stream.pending:,}",
        age(stream.lag_seconds), at(stream.opened_at) if stream.opened_at else "never",
    ),
)  # fmt: skip
BY_SHARD = Table[ShardStatus](
    *("shard", "owner", "epoch", "batch", "pending", "lag"),
    cells=lambda shard: (
        str(shard.shard), shard.owner or "-", str(shard.epoch),
        f"{shard.batch}{' open' if shard.open else ''}", f"{shard.pending:,}",
        age(shard.lag_seconds),
    ),
)  # fmt: skip


def _map(status: BrokerStatus) -> Iterator[str]:
    """Yield the owners of shards, with their shards and the remaining time of their leases."""
    for member in status.members:
        shards = f" ({ranges(member.shards)})" if member.shards else ""
        lease = f"{member.lease_seconds:.0f} s" if member.lease_seconds > 0 else "over"
        yield f"{member.name}: {len(member.shards)}{shards}, lease {lease}"
    free = [shard.shard for shard in status.shards if shard.owner is None]
    if free:
        yield f"nobody: {len(free)} ({ranges(free)})"
