"""Ownership: which process reads which partitions of a source, and from where.

The rows are in the database of the inbox. Processes share partitions as forwarders share the shards
of an outbox (`saf.log.shards`): each is a member with a lease, gets its fair share, and releases or
acquires the difference. A member is a session; once the session ends, its partitions are free. Each
change of owner raises the partition's epoch, and the transaction that stores messages checks owner
and epoch. So a member whose lease is over, or whom an operator has removed, stores nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid4

import psycopg

from saf.database import DURABLY, fetch
from saf.destinations.marks import Mark
from saf.errors import Fenced, SourceChanged
from saf.log.shards import BE_PRESENT, IS_PRESENT, fair_share
from saf.sources import BEGINNING, Extent, Position, Progress
from saf.sources.settings import SourceSettings, Start

FIND = "SELECT source, kind, topic FROM saf.source WHERE name = %(name)s"
REGISTER = """
INSERT INTO saf.source (name, kind, topic) VALUES (%(name)s, %(kind)s, %(topic)s)
ON CONFLICT DO NOTHING
"""
NAME_TOPIC = """
UPDATE saf.source SET topic_id = coalesce(topic_id, %(topic_id)s) WHERE source = %(source)s
RETURNING topic_id
"""
# Partitions that were added later begin at their beginning, even if the others began at their end
KNOW_SHARDS = """
INSERT INTO saf.source_shard (source, shard, start_batch, start_position, added)
SELECT %(source)s, shard, later, later, later
FROM generate_series(0, %(shards)s - 1) AS shard,
     (SELECT CASE WHEN count(*) > 0 THEN 0 END AS later FROM saf.source_shard
      WHERE source = %(source)s) AS known
ON CONFLICT DO NOTHING
"""
READER = """
SELECT s.subscription_id FROM saf.subscription s
WHERE s.log = 'inbox' AND NOT s.stream AND s.service = %(service)s
ORDER BY s.name = s.service DESC, s.subscription_id LIMIT 1
"""

COUNT = "SELECT count(*) FROM saf.source_shard WHERE source = %(source)s"

JOIN = """
INSERT INTO saf.source_member (member_id, source, name, lease_until)
SELECT %(member_id)s, source, %(member)s,
       clock_timestamp() + make_interval(secs => %(lease_seconds)s)
FROM saf.source WHERE source = %(source)s
RETURNING member_id
"""
RENEW = """
UPDATE saf.source_member
SET lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
WHERE member_id = %(member_id)s
RETURNING member_id
"""
# One member at a time, because each decision depends on what all members own
TAKE_TURN = "SELECT source FROM saf.source WHERE source = %(source)s FOR NO KEY UPDATE"
FORGET_DEAD = f"""
DELETE FROM saf.source_member m
WHERE source = %(source)s AND member_id <> %(member_id)s
  AND (lease_until < clock_timestamp() OR NOT {IS_PRESENT})
"""
HOLDINGS = """
SELECT m.member_id::text, count(s.shard)
FROM saf.source_member m LEFT JOIN saf.source_shard s ON s.owner = m.member_id
WHERE m.source = %(source)s GROUP BY m.member_id
"""
RELEASE = """
UPDATE saf.source_shard SET owner = NULL
WHERE source = %(source)s AND shard IN (
    SELECT shard FROM saf.source_shard WHERE source = %(source)s AND owner = %(member_id)s
    ORDER BY shard DESC LIMIT %(shards)s)
"""
ACQUIRE = """
UPDATE saf.source_shard SET owner = %(member_id)s, epoch = epoch + 1
WHERE source = %(source)s AND shard IN (
    SELECT shard FROM saf.source_shard WHERE source = %(source)s AND owner IS NULL
    ORDER BY shard LIMIT %(shards)s)
"""
# Old versions of a mark may still exist; see saf.log.shards.newest
MARK = """(
    SELECT batch, position, opened_at, acknowledged, set_aside_at FROM saf.watermark w
    WHERE w.source = s.source AND w.shard = s.shard AND w.lane = ''
    ORDER BY batch DESC LIMIT 1)"""
"""SQL: the mark of a row ``s`` of saf.source_shard."""
OWNED = f"""
SELECT s.shard, s.epoch, s.start_batch, s.start_position, s.added, topic_id, mark.*
FROM saf.source_shard s JOIN saf.source USING (source) LEFT JOIN LATERAL {MARK} AS mark ON true
WHERE s.source = %(source)s AND s.owner = %(member_id)s ORDER BY s.shard
"""
BEGIN = """
UPDATE saf.source_shard
SET start_batch = %(batch)s, start_position = %(position)s, added = %(added)s
WHERE source = %(source)s AND shard = %(shard)s AND owner = %(member_id)s AND epoch = %(epoch)s
RETURNING shard
"""
LOOKED = """
UPDATE saf.source_shard SET pending = %(pending)s, looked_at = now()
WHERE source = %(source)s AND shard = %(shard)s AND owner = %(member_id)s AND epoch = %(epoch)s
  AND (pending IS DISTINCT FROM %(pending)s OR looked_at < now() - make_interval(secs => 10))
"""
WINDOW = """
SELECT ids FROM saf.source_window WHERE source = %(source)s AND shard = %(shard)s ORDER BY number
"""
LEAVE = "DELETE FROM saf.source_member WHERE member_id = %(member_id)s"


@dataclass(frozen=True, kw_only=True)
class Share:
    """A partition that this member owns, and how far it was read."""

    shard: int
    epoch: int
    start: Position | None
    """Position after which to read, if the mark is not higher; None: reading has not begun."""
    added: int | None
    """Number of messages up to the mark, as the topic's broker counts them."""
    topic_id: str | None = None
    """Id of the topic that was read; None: unknown."""
    mark: Mark = field(default_factory=Mark)

    @property
    def position(self) -> Position:
        """Position after which to read."""
        return max(self.mark.number, self.start or BEGINNING)

    @property
    def progress(self) -> Progress:
        """How far the partition was read."""
        return Progress(
            shard=self.shard, position=self.position, added=self.added, topic_id=self.topic_id
        )

    def begun(self, start: Start, extent: Extent) -> Share:
        """Return a share that begins in a partition not read before.

        >>> share = Share(shard=0, epoch=1, start=None, added=None)
        >>> extent = Extent(last=(0, 9), first=(0, 4), added=9, removed=3)
        >>> begun = [share.begun(start, extent) for start in ("earliest", "latest")]
        >>> [(one.start, one.added) for one in begun]
        [((0, 0), 3), ((0, 9), 9)]
        """
        if start == "latest":
            return replace(self, start=extent.last, added=extent.added)
        return replace(self, start=BEGINNING, added=extent.removed)


@dataclass(kw_only=True)
class Membership:
    """A process that reads a source. Methods use an autocommit connection to the inbox."""

    name: str
    settings: SourceSettings
    lease_seconds: float
    member: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    member_id: UUID = field(default_factory=uuid4)
    source: UUID | None = None

    def join(self, connection: psycopg.Connection[Any]) -> None:
        """Register the source, if it is new, and become a member of it.

        Raises:
            SourceChanged: another topic was read under this name.
            Fenced: an operator has just removed the source; join again.
        """
        with connection.transaction():
            connection.execute(DURABLY)
            params = self._params | {"kind": self.settings.kind, "topic": self.settings.topic}
            found = fetch(connection, FIND, params)
            if not found:
                connection.execute(REGISTER, params)
                found = fetch(connection, FIND, params)
            ((self.source, kind, topic),) = found
            if (kind, topic) != (self.settings.kind, self.settings.topic):
                before, now = f"topic {topic!r} of {kind}", f"{self.settings.topic!r} of "
                raise SourceChanged(self.name, before, now + self.settings.kind)
        connection.execute(BE_PRESENT, self._params)
        if not fetch(connection, JOIN, self._params):
            raise self._fenced()

    def know(self, connection: psycopg.Connection[Any], partitions: int) -> None:
        """Register the partitions that are not known yet.

        Raises:
            Fenced: an operator has removed the source.
        """
        params = self._params | {"shards": partitions}
        ((known,),) = fetch(connection, COUNT, params)
        if known < partitions:
            with connection.transaction():
                if not fetch(connection, TAKE_TURN, params):
                    raise self._fenced()
                connection.execute(KNOW_SHARDS, params)

    def reader(self, connection: psycopg.Connection[Any]) -> int | None:
        """Return the subscription that reads the source's service; None without one."""
        found = fetch(connection, READER, {"service": self.settings.service})
        return int(found[0][0]) if found else None

    def renew(self, connection: psycopg.Connection[Any]) -> None:
        """Extend the lease to its full term.

        Raises:
            Fenced: others have removed this member.
        """
        if not fetch(connection, RENEW, self._params):
            raise self._fenced()

    def balance(self, connection: psycopg.Connection[Any]) -> list[Share]:
        """Release or acquire partitions up to the fair share; return those owned now.

        Raises:
            Fenced: others have removed this member, or an operator the source.
        """
        with connection.transaction():
            connection.execute(TAKE_TURN, self._params)
            connection.execute(FORGET_DEAD, self._params)
            held = {name: int(count) for name, count in fetch(connection, HOLDINGS, self._params)}
            own = str(self.member_id)
            if own not in held:
                raise self._fenced()
            ((shards,),) = fetch(connection, COUNT, self._params)
            change = fair_share(held, int(shards))[own] - held[own]
            if change:
                connection.execute(
                    ACQUIRE if change > 0 else RELEASE, self._params | {"shards": abs(change)}
                )
        return [_share(row) for row in fetch(connection, OWNED, self._params)]

    def begin(self, connection: psycopg.Connection[Any], share: Share) -> None:
        """Store where reading of a partition begins.

        Raises:
            Fenced: the partition has another owner.
        """
        batch, position = share.start or BEGINNING
        values = {"batch": batch, "position": position, "added": share.added}
        if not fetch(connection, BEGIN, self._of(share) | values):
            raise self._fenced([share.shard])

    def identify(self, connection: psycopg.Connection[Any], share: Share, topic_id: str) -> Share:
        """Store the topic's id, unless one is stored; return a share that knows the stored one.

        Raises:
            Fenced: an operator has removed the source.
        """
        found = fetch(connection, NAME_TOPIC, self._params | {"topic_id": topic_id})
        if not found:
            raise self._fenced([share.shard])
        return replace(share, topic_id=found[0][0])

    def ids(self, connection: psycopg.Connection[Any], shard: int) -> Iterator[bytes]:
        """Yield the ids of a partition's window, oldest first."""
        for (ids,) in fetch(connection, WINDOW, self._params | {"shard": shard}):
            yield from (id_.bytes for id_ in ids)

    def looked(self, connection: psycopg.Connection[Any], share: Share, pending: int) -> None:
        """Store how many messages of a partition were not read yet."""
        connection.execute(LOOKED, self._of(share) | {"pending": pending})

    def leave(self, connection: psycopg.Connection[Any]) -> None:
        """Free the partitions immediately instead of at the end of the lease."""
        connection.execute(LEAVE, self._params)

    def _of(self, share: Share) -> dict[str, Any]:
        return self._params | {"shard": share.shard, "epoch": share.epoch}

    def _fenced(self, shards: Sequence[int] = ()) -> Fenced:
        return Fenced(f"source {self.name!r}", [*shards])

    @property
    def _params(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "source": self.source,
            "member_id": self.member_id,
            "member": self.member,
            "lease_seconds": self.lease_seconds,
        }


def _share(row: Sequence[Any]) -> Share:
    shard, epoch, batch, position, added, topic_id, *mark = row
    return Share(
        shard=shard,
        epoch=epoch,
        start=None if batch is None else (batch, position),
        added=None if added is None else int(added),
        topic_id=topic_id,
        mark=Mark() if mark[0] is None else Mark.of(*mark),
    )
