"""``saf members``: the owners of each subscription's shards, and its lag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from saf.cli.brokers import AsJson, Everywhere
from saf.cli.options import grouped
from saf.cli.tables import Table
from saf.errors import UsageError, ranges
from saf.log.backlog import Shard
from saf.operating.members import Membership, memberships
from saf.operating.wording import age, at


@grouped
def command(
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

    It covers both logs of all brokers and destinations. Forwarders, processors and dispatchers own
    shards. Workers own none: they lock the shards of a delivery. The number of pending messages is
    an estimate where a shard has more than 1,000; the lag is exact.
    """
    asked = round_.visit("members", lambda connection, _: memberships(connection))
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
        OVERVIEW.show(known)
        if shards:
            BY_SHARD.show(by_shard)

    rows = [
        {"broker": name, **item.as_dict(shards=shards)}
        for name, group in known.items()
        for item in group
    ]
    round_.report({"subscriptions": rows}, show, as_json=as_json)


def _map(membership: Membership) -> Iterator[str]:
    held = membership.held
    for member in membership.members:
        own = held.get(member.name, [])
        shards = f" ({ranges(own)})" if own else ""
        lease = f"{member.lease_seconds:.0f} s" if member.lease_seconds > 0 else "over"
        stopping = ", stopping" if member.stopping else ""
        since = f"since {at(member.joined_at)}"
        yield f"{member.name}: {len(own)}{shards}, lease {lease}, {since}{stopping}"
    if free := held.get(None):
        yield f"nobody: {len(free)} ({ranges(free)})"


def _overview(row: Membership) -> Sequence[str]:
    backlog = row.backlog
    return (
        backlog.log, backlog.subscription,
        f"{'' if backlog.exact else 'about '}{backlog.messages:,}",
        age(row.lag_seconds(backlog.oldest)), "; ".join(_map(row)),
    )  # fmt: skip


def _of_shard(found: tuple[Membership, Shard]) -> Sequence[str]:
    membership, row = found
    part = membership.backlog.by_shard[row.shard]
    return (
        row.subscription, str(row.shard), row.owner or "-", str(row.epoch),
        f"{row.batch}{' open' if row.open is not None else ''}",
        f"{round(part.messages):,}", age(membership.lag_seconds(part.oldest)),
    )  # fmt: skip


OVERVIEW = Table[Membership](
    *("log", "subscription", "left", "lag"), below="members and their shards", cells=_overview
)
BY_SHARD = Table[tuple[Membership, Shard]](
    *("subscription", "shard", "owner", "epoch", "batch", "left", "lag"), cells=_of_shard
)
