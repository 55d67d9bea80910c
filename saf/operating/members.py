"""Members: the owners of each subscription's shards, and the backlog of each.

Forwarders, processors and dispatchers are members: they own shards for the term of a lease. Workers
are not. They lock the shards of a delivery, and own nothing between two deliveries.
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
    """True if the member was asked to stop."""
    lease_seconds: float
    """Seconds until others may take its shards; below 0 if they may take them now."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The members and the backlog of one subscription."""

    backlog: Backlog
    members: tuple[MemberRow, ...]
    now: datetime

    @property
    def held(self) -> dict[str | None, list[int]]:
        """The shards of each member by its name; unowned shards under None."""
        held: dict[str | None, list[int]] = defaultdict(list)
        for row in self.backlog.shards:
            held[row.owner].append(row.shard)
        return held

    def lag_seconds(self, oldest: datetime | None) -> float | None:
        """Return the age of a message, by the broker's clock."""
        return None if oldest is None else max(0.0, (self.now - oldest).total_seconds())

    def as_dict(self, *, shards: bool = False) -> dict[str, Any]:
        """Return a dict for JSON; with ``shards``, list each shard, too."""
        held, backlog = self.held, self.backlog
        result: dict[str, Any] = {
            "subscription": backlog.subscription,
            "log": backlog.log,
            "service": backlog.service,
            "left": backlog.messages,
            "exact": backlog.exact,
            "lag_seconds": self.lag_seconds(backlog.oldest),
            "members": [
                {
                    **asdict(item),
                    "joined_at": item.joined_at.isoformat(),
                    "shards": ranges(held.get(item.name, [])),
                }
                for item in self.members
            ],
            "unowned_shards": ranges(held.get(None, [])),
        }
        if shards:
            result["shards"] = [
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
        for member in result["members"]:
            del member["subscription_id"]
        return result


def memberships(connection: psycopg.Connection[Any], *, look: int = LOOK) -> list[Membership]:
    """Return the members of each subscription of a broker, the outbox's first. Reads only.

    At most ``look`` messages of a shard's backlog are read; the rest is estimated.

    Raises:
        Restored: the broker's cursors do not show what is left.
    """
    refuse(connection)
    found = backlogs(connection, look=look)
    with psycopg.Cursor(connection, row_factory=class_row(MemberRow)) as cursor:
        members = cursor.execute(MEMBERS).fetchall()
    ((now,),) = fetch(connection, NOW)
    return [
        Membership(
            backlog=backlog,
            members=tuple(
                m for m in members if m.subscription_id == backlog.shards[0].subscription_id
            ),
            now=now,
        )
        for backlog in found
    ]
