"""The status of a broker: its identity, its pending messages and their age, and owners of shards.

`identity` returns the broker_id, which routes may name, and where the broker is: its database, and
the versions of its schema and server. `broker_status` returns the state of its outbox in one
snapshot: each shard with its pending messages, the forwarders that work on them, the lanes that
wait, held messages, dead letters, dropped messages, and the streams of its logs. `memberships`
returns the members of each subscription, the shards that they own, and its backlog. Forwarders,
processors and dispatchers are members: they own shards for the term of a lease. Workers are not.
They lock the shards of a delivery, and own nothing between two deliveries.

All only read. If the cursors do not show which messages are pending, `broker_status` raises an
error instead of returning wrong numbers. A role may lack the right to read a log: a forwarder, for
example, only stores in the inbox. Then it is unknown how many messages of this log its streams have
not committed, and the rest of the status is complete. Single messages are not listed here, but in
`saf.operating.outbox`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from saf.broker.health import refuse
from saf.database import fetch
from saf.errors import RowsGone, ranges
from saf.log.backlog import LOOK, Backlog, backlogs
from saf.log.read import left
from saf.log.ring import AGE_COLUMN
from saf.operating.held import HeldCounts, counts
from saf.operating.wording import paused
from saf.receiving.inbox import Receivers
from saf.setaside.dropped import Dropped, dropped
from saf.setaside.waiting import Parked, Waiting, parked

IDENTITY = """
SELECT broker_id, name, shards, incarnation, created_at::date::text AS since,
       current_database() AS database, (SELECT version_num FROM saf.alembic_version) AS schema,
       current_setting('server_version') AS postgresql
FROM saf.broker
"""

# Each shard's incomplete rows: not visible in done, and not within the open batch at or below its
# position. Two ranges of the index per shard, whatever the age of the table.
SHARDS = f"""
SELECT c.shard, m.name AS owner, c.epoch, c.batch, c.open IS NOT NULL AS open,
       left_over.pending, left_over.oldest,
       extract(epoch FROM now() - left_over.oldest)::float AS lag_seconds
FROM saf.subscription s
JOIN saf.cursor c USING (subscription_id)
LEFT JOIN saf.member m ON m.member_id = c.owner
CROSS JOIN LATERAL (
    SELECT count(*) AS pending, min(created_at) AS oldest
    FROM ({left("saf.outbox", "id, txid, created_at")}) AS not_done
) AS left_over
WHERE s.log = 'outbox' AND s.name = 'forwarder'
ORDER BY c.shard
"""

MEMBERS = """
SELECT m.name, extract(epoch FROM m.lease_until - now())::float AS lease_seconds,
       array(SELECT shard FROM saf.cursor c WHERE c.owner = m.member_id ORDER BY shard) AS shards
FROM saf.member m JOIN saf.subscription s USING (subscription_id)
WHERE s.log = 'outbox' AND s.name = 'forwarder'
ORDER BY m.name, m.member_id
"""

# A role may lack the right to read a log: a forwarder only stores in the inbox
STREAMED = """
SELECT DISTINCT log, has_table_privilege('saf.' || log, 'SELECT') FROM saf.subscription
WHERE stream ORDER BY log DESC
"""
# As for the forwarder's shards, for all streams of one log
STREAMS = f"""
SELECT s.name AS stream, s.log, count(not_done.id) AS pending,
       extract(epoch FROM now() - min(not_done.written))::float AS lag_seconds,
       max(c.batch) AS batch, max(c.opened_at) AS opened_at
FROM saf.subscription s JOIN saf.cursor c USING (subscription_id)
LEFT JOIN LATERAL ({left("{log}", "id, txid, {written} AS written")}) AS not_done ON true
WHERE s.stream AND s.log = {{name}}
GROUP BY s.name, s.log ORDER BY s.name
"""
# Only the cursors' data, if the log may not be read
UNREAD_STREAMS = """
SELECT s.name AS stream, s.log, NULL::bigint AS pending, NULL::float AS lag_seconds,
       max(c.batch) AS batch, max(c.opened_at) AS opened_at
FROM saf.subscription s JOIN saf.cursor c USING (subscription_id)
WHERE s.stream AND s.log = {name}
GROUP BY s.name, s.log ORDER BY s.name
"""

DEAD = "SELECT count(*) FROM saf.dead_letter"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A broker's identity."""

    broker_id: UUID
    name: str
    """The broker's name at its creation; saf.toml may use another name."""
    shards: int
    incarnation: int
    """Raised by each repair after a set-back; 1 before the first repair."""
    since: str
    """The day of its creation."""
    database: str
    schema: str
    """The revision of its schema."""
    postgresql: str
    """The server's version."""

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self) | {"broker_id": str(self.broker_id)}


@dataclass(frozen=True, kw_only=True)
class ShardStatus:
    """One shard of the forwarder's subscription."""

    shard: int
    owner: str | None
    """The member's name, host:pid; None if the shard is free."""
    epoch: int
    batch: int
    open: bool
    """True if a batch is open."""
    pending: int
    oldest: datetime | None
    """When the oldest pending message was written."""
    lag_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class MemberStatus:
    """One forwarder, wherever it runs."""

    name: str
    """The member's name, host:pid."""
    lease_seconds: float
    """Seconds until others may take its shards; below 0 if they may take them now."""
    shards: list[int]


@dataclass(frozen=True, kw_only=True)
class StreamStatus:
    """One stream of the broker."""

    stream: str
    """The subscription's name."""
    log: str
    pending: int | None
    """Messages that the stream has not committed; None if this role may not read the log."""
    lag_seconds: float | None
    """The age of the oldest of these messages; None if none is pending, or if unknown."""
    batch: int
    opened_at: datetime | None
    """When the stream last took messages; None if it never did."""


@dataclass(frozen=True, kw_only=True)
class BrokerStatus:
    """One broker's outbox, and the streams of its logs."""

    shards: tuple[ShardStatus, ...]
    members: tuple[MemberStatus, ...]
    waiting: Waiting
    """The lanes that wait, with reasons and next attempts."""
    dead_letters: int
    dropped: tuple[Dropped, ...] = ()
    """Numbers of dropped messages, by subscription and reason."""
    streams: tuple[StreamStatus, ...] = ()
    held: HeldCounts | None = None
    """Numbers of held messages."""

    @property
    def pending(self) -> int:
        """Number of committed messages that are not forwarded yet."""
        return sum(shard.pending for shard in self.shards)

    @property
    def parked(self) -> int:
        """Number of parked messages."""
        return self.waiting.messages

    @property
    def lanes(self) -> Sequence[Parked]:
        """The lanes that wait; if there are many, those that block the most messages."""
        return self.waiting.shown

    @property
    def oldest_pending_seconds(self) -> float | None:
        """The age of the oldest pending message, in seconds; None if nothing is pending."""
        return max((s.lag_seconds for s in self.shards if s.lag_seconds is not None), default=None)

    def as_dict(self, *, shards: bool = False) -> dict[str, Any]:
        """Return the status as a dict for JSON; with ``shards``, list each shard, too."""
        free = [shard.shard for shard in self.shards if shard.owner is None]
        return {
            "pending": self.pending,
            "oldest_pending_seconds": self.oldest_pending_seconds,
            "held": self.held and self.held.as_dict(),
            "parked": self.parked,
            "lanes": [lane.as_dict() for lane in self.lanes],
            "lanes_waiting": self.waiting.lanes,
            "dead_letters": self.dead_letters,
            "dropped": [item.as_dict() for item in self.dropped],
            "streams": [
                {**asdict(item), "opened_at": item.opened_at and item.opened_at.isoformat()}
                for item in self.streams
            ],
            "members": [
                {**asdict(member), "shards": ranges(member.shards)} for member in self.members
            ],
            "unowned_shards": ranges(free),
            **({"shards": [_row(shard) for shard in self.shards]} if shards else {}),
        }


def _row(shard: ShardStatus) -> dict[str, Any]:
    return {**asdict(shard), "oldest": shard.oldest and shard.oldest.isoformat()}


def identity(connection: psycopg.Connection[Any]) -> Identity:
    """Return a broker's identity. Reads only."""
    with psycopg.Cursor(connection, row_factory=class_row(Identity)) as cursor:
        found = cursor.execute(IDENTITY).fetchone()
    if found is None:
        raise RowsGone(connection.info.dbname, ["saf.broker has no row"])
    return found


def broker_status(connection: psycopg.Connection[Any], limit: int | None = None) -> BrokerStatus:
    """Return the state of one broker's outbox in one snapshot, with up to ``limit`` lanes.

    Reads only.

    Raises:
        Restored: the broker's cursors do not show which messages are pending.
    """
    refuse(connection)
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        with psycopg.Cursor(connection, row_factory=class_row(ShardStatus)) as cursor:
            shards = cursor.execute(SHARDS).fetchall()
        with psycopg.Cursor(connection, row_factory=class_row(MemberStatus)) as cursor:
            members = cursor.execute(MEMBERS).fetchall()
        streams = [*_streams(connection)]
        waiting = parked(connection, limit)
        ((dead_letters,),) = fetch(connection, DEAD)
        counted = dropped(connection)
        held = counts(connection)
    return BrokerStatus(
        shards=tuple(shards),
        members=tuple(members),
        waiting=waiting,
        dead_letters=dead_letters,
        dropped=tuple(counted),
        streams=tuple(streams),
        held=held,
    )


def _streams(connection: psycopg.Connection[Any]) -> Iterator[StreamStatus]:
    """Yield the progress of each stream. A log without streams is not read."""
    for log, readable in fetch(connection, STREAMED):
        query = sql.SQL(STREAMS if readable else UNREAD_STREAMS).format(
            log=sql.Identifier("saf", log),
            name=sql.Literal(log),
            written=sql.Identifier(AGE_COLUMN[log]),
        )
        with psycopg.Cursor(connection, row_factory=class_row(StreamStatus)) as cursor:
            yield from cursor.execute(query).fetchall()


MEMBERS_OF_ALL = """
SELECT subscription_id, name, joined_at, stopping,
       extract(epoch FROM lease_until - now())::float AS lease_seconds
FROM saf.member ORDER BY name, member_id
"""
PAUSES = """
SELECT subscription_id, paused_at, paused_by, paused_why
FROM saf.subscription WHERE paused_at IS NOT NULL
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
    paused: str = ""
    """When an operator paused the subscription, who and why; empty if it is not paused."""
    receivers: tuple[int, ...] = ()
    """Pids of connected receivers, which are not members: see `saf.receiving.inbox.Receivers`."""

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
            "receivers": list(self.receivers),
            "paused": self.paused or None,
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
        members = cursor.execute(MEMBERS_OF_ALL).fetchall()
    receivers = Receivers(connection)
    pauses = {number: paused(*pause) for number, *pause in fetch(connection, PAUSES)}
    ((now,),) = fetch(connection, NOW)
    return [
        Membership(
            backlog=backlog,
            members=tuple(
                m for m in members if m.subscription_id == backlog.shards[0].subscription_id
            ),
            now=now,
            paused=pauses.get(backlog.shards[0].subscription_id, ""),
            receivers=tuple(receivers.of(backlog.subscription) if backlog.log == "inbox" else ()),
        )
        for backlog in found
    ]
