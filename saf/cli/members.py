"""``saf members``: the owners of each subscription's shards, and its lag."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import typer

from saf.cli.brokers import AsJson, Everywhere
from saf.cli.console import Listing, echo
from saf.cli.options import grouped
from saf.errors import UsageError, ranges
from saf.operating.members import Membership, memberships
from saf.operating.wording import age, at


@grouped
def command(
    subscription: Annotated[
        str | None, typer.Option(help="Only this one, of either log. Default: all.")
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
    if as_json:
        rows = [
            {"broker": name, **item.as_dict(shards=shards)}
            for name, group in known.items()
            for item in group
        ]
        echo(json.dumps({"subscriptions": rows, "errors": round_.errors()}))
    else:
        _overview(known).show()
        if shards:
            _by_shard(known).show()
    round_.finish(say=not as_json)


def _overview(known: Mapping[str, Sequence[Membership]]) -> Listing:
    listing = Listing(
        *("broker", "log", "subscription", "left", "lag"), below="members and their shards"
    )
    for name, group in known.items():
        for membership in group:
            backlog = membership.backlog
            listing.add(
                name, backlog.log, backlog.subscription,
                f"{'' if backlog.exact else 'about '}{backlog.messages:,}",
                age(membership.lag_seconds(backlog.oldest)), below="; ".join(_map(membership)),
            )  # fmt: skip
    return listing


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


def _by_shard(known: Mapping[str, Sequence[Membership]]) -> Listing:
    listing = Listing("broker", "subscription", "shard", "owner", "epoch", "batch", "left", "lag")
    for name, group in known.items():
        for membership in group:
            for row in membership.backlog.shards:
                part = membership.backlog.by_shard[row.shard]
                listing.add(
                    name, row.subscription, str(row.shard), row.owner or "-", str(row.epoch),
                    f"{row.batch}{' open' if row.open is not None else ''}",
                    f"{round(part.messages):,}", age(membership.lag_seconds(part.oldest)),
                )  # fmt: skip
    return listing
