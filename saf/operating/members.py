"""Members: who has which shards of each subscription, and how much each has left.

Forwarders, processors and dispatchers are members: they own shards for the term of a lease. Workers
are not. They lock the shards that a delivery is about, and own nothing between two deliveries.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row

from saf.broker.health import refuse
from saf.database import fetch
from saf.errors import ranges
from saf.log.backlog import LOOK, Backlog, backlogs

MEMBERS = """
SELECT subscription_id, name, joined_at, stopping,
       extract(epoch FROM lease_until - now())::float AS lease_seconds
FROM saf.member ORDER BY name, member_id
"""
NOW = "SELECT clock_timestamp()"


@dataclass(frozen=True, kw_only=True)
class MemberRow:
    """A live process of a subscription."""

    subscription_id: int
    name: str
    """host:pid."""
    joined_at: datetime
    stopping: bool
    """Whether it was asked to end."""
    lease_seconds: float
    """Seconds until others may take its shards over; below 0 if they may already."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The members of one subscription, and what it has left."""

    backlog: Backlog
    members: tuple[MemberRow, ...]
    now: datetime

    @property
    def held(self) -> dict[str | None, list[int]]:
        """The shards of each member by its name; those of nobody by None."""
        held: dict[str | None, list[int]] = defaultdict(list)
        for row in self.backlog.shards:
            held[row.owner].append(row.shard)
        return held

    def lag_seconds(self, oldest: datetime | None) -> float | None:
        """The age of a message, by the broker's clock."""
        return None if oldest is None else max(0.0, (self.now - oldest).total_seconds())

    def as_dict(self, *, shards: bool = False) -> dict[str, Any]:
        """Return it as a dict for JSON; with ``shards``, with each of them by itself."""
        held, backlog = self.held, self.backlog
        said: dict[str, Any] = {
            "subscription": backlog.subscription,
            "log": backlog.log,
            "service": backlog.service,
            "left": backlog.messages,
            "exact": backlog.exact,
            "lag_seconds": self.lag_seconds(backlog.oldest),
            "members": [
                {
                    **asdict(one),
                    "joined_at": one.joined_at.isoformat(),
                    "shards": ranges(held.get(one.name, [])),
                }
                for one in self.members
            ],
            "unowned_shards": ranges(held.get(None, [])),
        }
        if shards:
            said["shards"] = [
                {
                    "shard": row.shard,
                    "owner": row.owner,
                    "epoch": row.epoch,
                    "batch": row.batch,
                    "open": row.open is not None,
                    "left": round(part.messages),
                    "lag_seconds": self.lag_seconds(part.oldest),
                }
                for row in backlog.shards
                for part in [backlog.by_shard[row.shard]]
            ]
        for member in said["members"]:
            del member["subscription_id"]
        return said


def memberships(connection: psycopg.Connection[Any], *, look: int = LOOK) -> list[Membership]:
    """Return the members of each subscription of a broker, those of the outbox first. Only reads.

    Of what a shard has left, ``look`` messages are read at most, and the rest is estimated.

    Raises:
        Restored: its cursors do not say what is left.
    """
    refuse(connection)
    found = backlogs(connection, look=look)
    with psycopg.Cursor(connection, row_factory=class_row(MemberRow)) as cursor:
        members = cursor.execute(MEMBERS).fetchall()
    ((now,),) = fetch(connection, NOW)
    return [
        Membership(
            backlog=one,
            members=tuple(m for m in members if m.subscription_id == one.shards[0].subscription_id),
            now=now,
        )
        for one in found
    ]
