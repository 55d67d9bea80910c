"""``saf status`` and ``saf members``: pending messages, their age, and the owners of shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from saf.cli import set_aside, source
from saf.cli.brokers import AsJson, Brokers, Everywhere
from saf.cli.console import Table, complain, echo
from saf.errors import UsageError, in_words, ranges
from saf.log.backlog import Shard
from saf.operating.held import HeldCounts
from saf.operating.status import (
    BrokerStatus,
    Membership,
    ShardStatus,
    StreamStatus,
    broker_status,
    memberships,
)
from saf.operating.wording import age, at, named
from saf.setaside.backoff import SHOWN
from saf.setaside.dropped import Dropped


def status(
    *,
    round_: Brokers,
    shards: Annotated[bool, typer.Option("--shards", help="Also list each shard.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the pending, held, parked and dead messages of each source.

    It also shows what parked messages wait for, and which forwarder owns which shards. A forwarder
    owns shards only while it runs. `saf inbox status` shows the stores.
    """
    known = round_.visit("status", lambda connection: broker_status(connection, SHOWN))
    sources, failed = source.statuses(round_.settings)
    codes = [error.exit_code for error in failed.values()]

    def show() -> None:
        OVERVIEW.show({name: [status] for name, status in known.items()})
        HELD.show_any({name: [*_held(status)] for name, status in known.items()})
        lanes = {name: status.waiting for name, status in known.items()}
        set_aside.BY_LANE.show_any(lanes)
        set_aside.show_how_many_more(lanes)
        DROPPED.show_any({name: status.dropped for name, status in known.items()})
        STREAMS.show_any({name: status.streams for name, status in known.items()})
        if shards:
            BY_SHARD.show({name: status.shards for name, status in known.items()})
        source.show(sources)
        for error in failed.values():
            complain(str(error))
        if known and round_.others:
            echo(f"Not shown: {named(round_.others)}. `saf inbox status` shows the stores.")

    brokers = [{"broker": name, **status.as_dict(shards=shards)} for name, status in known.items()]
    answer = {"brokers": brokers, "sources": [found.as_dict() for found in sources]}
    round_.report(answer, show, as_json=as_json, found=max(codes, default=0))


OVERVIEW = Table[BrokerStatus](
    *("pending", "oldest", "parked", "dead letters"),
    things="sources",
    below="shards and their owners",
    cells=lambda status: (
        f"{status.pending:,}", age(status.oldest_pending_seconds), f"{status.parked:,}",
        f"{status.dead_letters:,}", "; ".join(_map(status)),
    ),
)  # fmt: skip
HELD = Table[HeldCounts](
    *("held", "next due", "overdue", "refused"),
    things="held messages",
    cells=lambda row: (
        f"{row.messages:,}", at(row.next_due) if row.next_due else "-",
        f"{row.overdue:,}" + (f" for {age(row.overdue_seconds)}" if row.overdue else ""),
        f"{row.refused:,}",
    ),
)  # fmt: skip
DROPPED = Table[Dropped](
    *("dropped", "by", "reason", "the last at", "the last one"),
    things="dropped messages",
    cells=lambda row: (
        f"{row.messages:,}", row.subscription, row.reason, at(row.last_at),
        str(row.last_message_id),
    ),
)  # fmt: skip
STREAMS = Table[StreamStatus](
    *("stream", "log", "not committed", "oldest", "last read"),
    things="streams",
    cells=lambda stream: (
        stream.stream, stream.log,
        "no access" if stream.pending is None else f"{stream.pending:,}",
        age(stream.lag_seconds), at(stream.opened_at) if stream.opened_at else "never",
    ),
)  # fmt: skip
BY_SHARD = Table[ShardStatus](
    *("shard", "owner", "epoch", "batch", "pending", "lag"),
    things="shards",
    cells=lambda shard: (
        str(shard.shard), shard.owner or "-", str(shard.epoch),
        f"{shard.batch}{' open' if shard.open else ''}", f"{shard.pending:,}",
        age(shard.lag_seconds),
    ),
)  # fmt: skip


def _held(status: BrokerStatus) -> Iterator[HeldCounts]:
    """Yield the numbers of held messages, if there are any."""
    if status.held is not None and (status.held.messages or status.held.refused):
        yield status.held


def _map(status: BrokerStatus) -> Iterator[str]:
    """Yield the owners of shards, with their shards and the remaining time of their leases."""
    for member in status.members:
        shards = f" ({ranges(member.shards)})" if member.shards else ""
        lease = f"{member.lease_seconds:.0f} s" if member.lease_seconds > 0 else "over"
        yield f"{member.name}: {len(member.shards)}{shards}, lease {lease}"
    free = [shard.shard for shard in status.shards if shard.owner is None]
    if free:
        yield f"no running forwarder owns {in_words(free)}"


def members(
    subscription: Annotated[
        str | None,
        typer.Option(help="Only subscriptions of this name, of either log. Default: all."),
    ] = None,
    *,
    round_: Everywhere,
    shards: Annotated[bool, typer.Option("--shards", help="Also list each shard.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the owners of each subscription's shards, and its lag.

    It covers both logs of all sources and stores. Forwarders, processors and dispatchers own
    shards. Workers own none: they lock the shards of a delivery, and are listed as receivers, known
    by their application_name, "saf receive" and the subscription. The number of pending messages
    is an estimate where a shard has more than 1,000; the lag is exact.
    """
    asked = round_.visit("members", memberships)
    known = {
        name: [item for item in group if subscription in (None, item.backlog.subscription)]
        for name, group in asked.items()
    }
    if subscription is not None and asked and not any(known.values()):
        names = sorted({item.backlog.subscription for group in asked.values() for item in group})
        raise UsageError(f"--subscription {subscription} does not exist, only {', '.join(names)}")
    by_shard = {
        name: [(membership, row) for membership in group for row in membership.backlog.shards]
        for name, group in known.items()
    }

    def show() -> None:
        SUBSCRIPTIONS.show(known)
        if shards:
            SUBSCRIPTION_SHARDS.show(by_shard)

    rows = [
        {"broker": name, **item.as_dict(shards=shards)}
        for name, group in known.items()
        for item in group
    ]
    round_.report({"subscriptions": rows}, show, as_json=as_json)


def _owners(membership: Membership) -> Iterator[str]:
    held = membership.held
    if membership.paused:
        yield membership.paused
    for member in membership.members:
        own = held.get(member.name, [])
        shards = f" ({ranges(own)})" if own else ""
        lease = f"{member.lease_seconds:.0f} s" if member.lease_seconds > 0 else "over"
        stopping = ", stopping" if member.stopping else ""
        since = f"since {at(member.joined_at)}"
        yield f"{member.name}: {len(own)}{shards}, lease {lease}, {since}{stopping}"
    if membership.receivers:
        yield f"receivers, which own no shards: pid {', '.join(map(str, membership.receivers))}"
    elif membership.backlog.log == "inbox" and not membership.members:
        yield "no members, and no receiver is connected"
    elif free := held.get(None):
        yield f"no running process owns {in_words(free)}"


def _overview(row: Membership) -> Sequence[str]:
    backlog = row.backlog
    return (
        backlog.log, backlog.subscription,
        f"{'' if backlog.exact else 'about '}{backlog.messages:,}",
        age(row.lag_seconds(backlog.oldest)), "; ".join(_owners(row)),
    )  # fmt: skip


def _of_shard(found: tuple[Membership, Shard]) -> Sequence[str]:
    membership, row = found
    part = membership.backlog.by_shard[row.shard]
    return (
        row.subscription, str(row.shard), row.owner or "-", str(row.epoch),
        f"{row.batch}{' open' if row.open is not None else ''}",
        f"{round(part.messages):,}", age(membership.lag_seconds(part.oldest)),
    )  # fmt: skip


SUBSCRIPTIONS = Table[Membership](
    *("log", "subscription", "left", "lag"),
    things="subscriptions",
    below="members and their shards",
    cells=_overview,
)
SUBSCRIPTION_SHARDS = Table[tuple[Membership, Shard]](
    *("subscription", "shard", "owner", "epoch", "batch", "left", "lag"),
    things="shards",
    cells=_of_shard,
)
