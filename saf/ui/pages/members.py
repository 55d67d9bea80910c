"""Subscriptions of a broker: members, leases and shards, with their remaining messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from starlette.responses import Response

from saf.log.backlog import Shard
from saf.operating.members import Membership, memberships
from saf.ui.site import LIVE, Visit

LOOK = 200
"""Messages of a shard to read; `saf members` reads more before it estimates."""
COLOURS = 8
"""Number of colours for members; the members are also named."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A shard in the drawing."""

    shard: Shard
    colour: int | None
    """Number of the owner's colour; None without an owner."""
    left: int


def members(visit: Visit) -> Response:
    """Show the subscriptions of one broker."""
    names = visit.site.brokers.names()
    broker = visit.given("broker") or (names or [""])[0]
    answers = visit.site.brokers.ask(partial(memberships, look=LOOK), [broker])
    found = sorted(
        answers.found.get(broker, []), key=lambda row: not (row.members or row.backlog.messages)
    )
    return visit.page(
        "members.html",
        title="Members and shards",
        live=LIVE,
        broker=broker,
        found=[(row, colours(row), cells(row)) for row in found],
        errors=answers.errors,
        lease=visit.site.settings.forwarder.lease_seconds,
    )


def colours(one: Membership) -> Mapping[str, int]:
    """Return the number of a colour for each owner of a shard."""
    owners = sorted({shard.owner for shard in one.backlog.shards if shard.owner is not None})
    return {owner: number % COLOURS for number, owner in enumerate(owners)}


def cells(one: Membership) -> list[Cell]:
    """Return the shards for the drawing."""
    colour_of = colours(one)
    return [
        Cell(
            shard=shard,
            colour=None if shard.owner is None else colour_of[shard.owner],
            left=round(one.backlog.by_shard[shard.shard].messages),
        )
        for shard in one.backlog.shards
    ]
