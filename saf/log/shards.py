"""Shards: buckets of keys, and the members that own them.

M shards, N members, M much greater than N (microsharding, from Dempsy). Members coordinate through
the rows of `saf.member` and `saf.cursor` and the database's clock alone:

- A member *joins* with a lease, a term that it renews while it lives, and with an advisory lock
  that its session holds. A member whose session has ended (it was killed) or whose lease is over
  (it hangs, or the network does) is removed by the next member that checks, and its shards are
  free.
- Each member calculates its own fair share and releases or acquires only the difference, so
  that as few shards as possible move. A lock on the subscription's row makes members take turns.
- Acquiring a shard raises its *epoch*. Every write for a shard names owner and epoch. So a member
  that was taken over, however long it slept, changes no row, and gets an error (`Fenced`).
- A receiver that died left a trace on the cursors that it had in hand (see `saf.receiving.claim`).
  Any write erases the trace, so a statement here that writes a cursor notes the trace first
  (`NOTE_FAILURE`).

A lease does not prove that a member owns a shard at this moment. Only the epoch does, and the write
itself checks it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import psycopg

from saf.database import fetch
from saf.errors import Fenced
from saf.telemetry.metrics import TAKEOVERS, count

DEFAULT_SHARDS = 64
MAX_SHARDS = 1024

_MASK = 0xFFFFFFFF


def shard_of(key: str, shards: int) -> int:
    """Return the shard of a key, as in the column ``shard`` of a broker with ``shards`` shards.

    This is PostgreSQL's ``hashtextextended(key, 0)`` (Bob Jenkins' lookup3), reduced to 0 …
    shards-1. A message without key uses its id's text.

    >>> shard_of("N725MQ", 64), shard_of("", 64), shard_of("Zürich", 100)
    (5, 45, 62)
    """
    return hash64(key.encode()) % shards


def shard_expression(
    shards: int | str, key: str = "COALESCE(key, message_id::text)", modulo: str = "%"
) -> str:
    """Return SQL for the shard of a row, among ``shards``, as `shard_of` calculates it.

    The second modulo makes the remainder positive, because the hash is signed. In a statement with
    parameters, ``modulo`` is ``%%``, because a percent sign begins a parameter there.
    """
    hashed = f"hashtextextended({key}, 0)"
    return f"((({hashed} {modulo} {shards}) + {shards}) {modulo} {shards})::smallint"


def hash64(data: bytes) -> int:
    """Return PostgreSQL's ``hash_bytes_extended`` with seed 0, as a signed 64-bit integer."""
    a = b = c = (0x9E3779B9 + len(data) + 3923095) & _MASK
    whole = len(data) - len(data) % 12
    for at in range(0, whole, 12):
        a = (a + int.from_bytes(data[at : at + 4], "little")) & _MASK
        b = (b + int.from_bytes(data[at + 4 : at + 8], "little")) & _MASK
        c = (c + int.from_bytes(data[at + 8 : at + 12], "little")) & _MASK
        a, b, c = _mix(a, b, c)
    rest = data[whole:]
    a = (a + int.from_bytes(rest[:4], "little")) & _MASK
    b = (b + int.from_bytes(rest[4:8], "little")) & _MASK
    # the lowest byte of c is the length's, so the last three bytes sit above it
    c = (c + (int.from_bytes(rest[8:], "little") << 8)) & _MASK
    b, c = _final(a, b, c)
    value = b << 32 | c
    return value - (1 << 64) if value >> 63 else value


def _rotate(x: int, bits: int) -> int:
    return (x << bits | x >> (32 - bits)) & _MASK


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    a = ((a - c) & _MASK) ^ _rotate(c, 4)
    c = (c + b) & _MASK
    b = ((b - a) & _MASK) ^ _rotate(a, 6)
    a = (a + c) & _MASK
    c = ((c - b) & _MASK) ^ _rotate(b, 8)
    b = (b + a) & _MASK
    a = ((a - c) & _MASK) ^ _rotate(c, 16)
    c = (c + b) & _MASK
    b = ((b - a) & _MASK) ^ _rotate(a, 19)
    a = (a + c) & _MASK
    c = ((c - b) & _MASK) ^ _rotate(b, 4)
    b = (b + a) & _MASK
    return a, b, c


def _final(a: int, b: int, c: int) -> tuple[int, int]:
    c = ((c ^ b) - _rotate(b, 14)) & _MASK
    a = ((a ^ c) - _rotate(c, 11)) & _MASK
    b = ((b ^ a) - _rotate(a, 25)) & _MASK
    c = ((c ^ b) - _rotate(b, 16)) & _MASK
    a = ((a ^ c) - _rotate(c, 4)) & _MASK
    b = ((b ^ a) - _rotate(a, 14)) & _MASK
    c = ((c ^ b) - _rotate(b, 24)) & _MASK
    return b, c


def fair_share(held: Mapping[str, int], shards: int) -> dict[str, int]:
    """Return how many of ``shards`` each member should own, given how many it holds.

    Every member gets ⌊M/n⌋. The remainder stays with the members that hold most, so that as few
    shards as possible move. Names decide ties, so every member gets the same answer.

    >>> fair_share({"a": 20, "b": 20, "c": 20, "d": 20, "e": 20, "f": 0}, 100)
    {'a': 17, 'b': 17, 'c': 17, 'd': 17, 'e': 16, 'f': 16}
    >>> fair_share({"a": 17, "b": 17, "c": 17, "d": 17, "e": 16}, 100)
    {'a': 20, 'b': 20, 'c': 20, 'd': 20, 'e': 20}
    """
    if not held:
        return {}
    least, remainder = divmod(shards, len(held))
    by_holding = sorted(held, key=lambda member: (-held[member], member))
    return {member: least + (place < remainder) for place, member in enumerate(by_holding)}


_NOW = "pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
_FULL = f"{_NOW} - (({_NOW} - {{xid}}::text::bigint + 2147483648) & 4294967295) + 2147483648"


def full(xid: str) -> str:
    """Return SQL that extends a recent 32-bit transaction id to all of its bits."""
    return _FULL.format(xid=xid)


def failed(xid: str) -> str:
    """Return SQL: whether the transaction in a row's xmax, if any, was rolled back or died."""
    return f"({xid} <> '0'::xid AND pg_xact_status(({full(xid)})::text::xid8) = 'aborted')"


LAST = "9223372036854775807"
ALL_SHARDS = "generate_series(0, (SELECT shards - 1 FROM saf.broker))"


def newest(shards: str = ALL_SHARDS) -> str:
    """Return SQL for the newest cursors of a subscription, of some shards.

    While an old transaction holds the horizon, PostgreSQL keeps every version of a cursor ever
    written. A cursor's batch only rises; as the last column of the key, it lets the index find the
    newest version first and read no older ones. Whole rows are compared, because otherwise the
    planner would expect a single row and sort.
    """
    return f"""(
    SELECT c.* FROM {shards} AS s (shard) CROSS JOIN LATERAL (
        SELECT * FROM saf.cursor
        WHERE (subscription_id, shard, batch) <= (%(subscription_id)s, s.shard, {LAST})
        ORDER BY subscription_id DESC, shard DESC, batch DESC LIMIT 1
    ) AS c
    WHERE c.subscription_id = %(subscription_id)s AND c.shard = s.shard)"""


NEWEST = newest()

THIS_ROW = """
c.subscription_id = %(subscription_id)s AND c.shard = n.shard AND c.batch = n.batch
"""
"""SQL: the row of saf.cursor to write is the newest version, n."""

JOIN = """
INSERT INTO saf.member (member_id, subscription_id, name, lease_until)
VALUES (%(member_id)s, %(subscription_id)s, %(name)s,
        clock_timestamp() + make_interval(secs => %(lease_seconds)s))
"""

# Held until the session ends, for whatever reason.
BE_PRESENT = "SELECT pg_advisory_lock(hashtextextended(%(member_id)s::text, 0))"
IS_PRESENT = """EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1 AND granted
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid::bigint << 32 | objid::bigint = hashtextextended(m.member_id::text, 0))"""

RENEW = """
UPDATE saf.member SET lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
WHERE member_id = %(member_id)s
RETURNING stopping
"""

# One member at a time, because each decision depends on what all members hold. NO KEY, because a
# new cursor or member row only needs the subscription to stay.
TAKE_TURN = """
SELECT FROM saf.subscription WHERE subscription_id = %(subscription_id)s FOR NO KEY UPDATE
"""

IS_DEAD = f"""
m.subscription_id = %(subscription_id)s AND m.member_id IS DISTINCT FROM %(member_id)s::uuid
AND (m.lease_until < clock_timestamp() OR NOT {IS_PRESENT})
"""
ANY_DEAD = f"SELECT EXISTS (SELECT FROM saf.member m WHERE {IS_DEAD})"
LIVING = "SELECT name FROM saf.member WHERE subscription_id = %(subscription_id)s ORDER BY name"

# A receiver's failed delivery shows in the row's last version: see saf.receiving.claim
NOTE_FAILURE = f"allowance = CASE WHEN {failed('xmax')} THEN 1 ELSE allowance END"

# Dead members: their shards become free, and their batches stay open.
FREE_DEAD = f"""
UPDATE saf.cursor c SET owner = NULL, {NOTE_FAILURE}
FROM (SELECT shard, batch, owner FROM {NEWEST} AS c
      WHERE owner IN (SELECT member_id FROM saf.member m WHERE {IS_DEAD})) AS n
WHERE {THIS_ROW} AND c.owner = n.owner
"""
FORGET_DEAD = f"DELETE FROM saf.member m WHERE {IS_DEAD}"

HOLDINGS = f"""
SELECT m.member_id::text AS member, count(c.shard) AS held
FROM saf.member m LEFT JOIN {NEWEST} AS c ON c.owner = m.member_id
WHERE m.subscription_id = %(subscription_id)s AND NOT m.stopping
GROUP BY m.member_id
"""

SHARDS = f"SELECT count(*) FROM {NEWEST} AS c"

# Shards without an open batch go first: the next owner of an open batch has to read it again.
RELEASE = f"""
UPDATE saf.cursor c SET owner = NULL, {NOTE_FAILURE}
FROM (SELECT shard, batch FROM {NEWEST} AS c
      WHERE owner = %(member_id)s AND shard <> ALL (%(keep)s::smallint[])
      ORDER BY open IS NULL DESC, shard DESC LIMIT %(surplus)s) AS n
WHERE {THIS_ROW} AND c.owner = %(member_id)s
RETURNING c.shard
"""

ACQUIRE = f"""
UPDATE saf.cursor c SET owner = %(member_id)s, epoch = epoch + 1, {NOTE_FAILURE}
FROM (SELECT shard, batch FROM {NEWEST} AS c WHERE owner IS NULL
      ORDER BY shard LIMIT %(lacking)s) AS n
WHERE {THIS_ROW} AND c.owner IS NULL
"""

OWNED = f"SELECT count(*) FROM {NEWEST} AS c WHERE owner = %(member_id)s"

# An update, because a mere lock would erase the trace of a failed delivery
HOLD = f"""
UPDATE saf.cursor c SET {NOTE_FAILURE}
FROM (SELECT shard, batch FROM {newest("unnest(%(shards)s::smallint[])")} AS c) AS n
WHERE {THIS_ROW} AND c.owner = %(member_id)s
  AND (c.shard, c.epoch) IN (SELECT * FROM unnest(%(shards)s::smallint[], %(epochs)s::bigint[]))
RETURNING c.shard, c.epoch
"""

STOPPING = "UPDATE saf.member SET stopping = true WHERE member_id = %(member_id)s"

TAKE_BACK_STOP = "UPDATE saf.member SET stopping = false WHERE member_id = %(member_id)s"

FREE = f"""
UPDATE saf.cursor c SET owner = NULL, {NOTE_FAILURE}
FROM (SELECT shard, batch FROM {NEWEST} AS c WHERE owner = %(member_id)s) AS n
WHERE {THIS_ROW} AND c.owner = %(member_id)s
"""
LEAVE = "DELETE FROM saf.member WHERE member_id = %(member_id)s"


def living(connection: psycopg.Connection[Any], subscription_id: int) -> list[str]:
    """Return the names of a subscription's members, after removing dead ones."""
    params = {"subscription_id": subscription_id, "member_id": None}
    if fetch(connection, LIVING, params):
        with connection.transaction():
            _forget_dead(connection, params)
    return [name for (name,) in fetch(connection, LIVING, params)]


def _forget_dead(connection: psycopg.Connection[Any], params: Mapping[str, Any]) -> None:
    connection.execute(TAKE_TURN, params)
    freed = connection.execute(FREE_DEAD, params).rowcount
    if freed > 0:
        count(TAKEOVERS, freed)
    connection.execute(FORGET_DEAD, params)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A live process of a subscription. Methods write through an autocommit connection."""

    subscription_id: int
    lease_seconds: float
    name: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    member_id: UUID = field(default_factory=uuid4)

    @property
    def _params(self) -> dict[str, Any]:
        return {
            "member_id": self.member_id,
            "subscription_id": self.subscription_id,
            "name": self.name,
            "lease_seconds": self.lease_seconds,
        }

    def join(self, connection: psycopg.Connection[Any]) -> None:
        """Become a member, with a first lease and no shards yet.

        The membership ends with the connection's session.
        """
        connection.execute(BE_PRESENT, self._params)
        connection.execute(JOIN, self._params)

    def renew(self, connection: psycopg.Connection[Any], silent_seconds: float = 0.0) -> None:
        """Extend the lease to its full term, counted from the member's last sign of life.

        Raises:
            Fenced: the lease was over and the others have removed this member.
        """
        params = {**self._params, "lease_seconds": self.lease_seconds - silent_seconds}
        if connection.execute(RENEW, params).fetchone() is None:
            raise Fenced(f"member {self.name}", [])

    def balance(
        self,
        connection: psycopg.Connection[Any],
        releasing: Callable[[list[int]], None] | None = None,
        keep: Iterable[int] = (),
    ) -> int:
        """Release or acquire shards up to the fair share; return how many are owned now.

        Shards with work under way must be in ``keep``; they are not released now. ``releasing`` is
        called with the released shards, in the transaction that releases them.
        """
        params = self._params
        with connection.transaction():
            _forget_dead(connection, params)
            change = self.lacks(connection)
            if change < 0:
                surplus = {**params, "surplus": -change, "keep": list(keep)}
                released = fetch(connection, RELEASE, surplus)
                if releasing is not None:
                    releasing([shard for (shard,) in released])
            elif change > 0:
                connection.execute(ACQUIRE, {**params, "lacking": change})
            return int(fetch(connection, OWNED, params)[0][0])

    def settled(self, connection: psycopg.Connection[Any]) -> bool:
        """Whether `balance` has nothing to do. Only reads, so it is cheap to call often.

        Raises:
            Fenced: the others have removed this member.
        """
        ((dead,),) = fetch(connection, ANY_DEAD, self._params)
        return not dead and self.lacks(connection) == 0

    def lacks(self, connection: psycopg.Connection[Any]) -> int:
        """Return how many shards this member lacks of its fair share; negative: too many.

        Raises:
            Fenced: the others have removed this member.
        """
        held = dict(fetch(connection, HOLDINGS, self._params))
        own_id = str(self.member_id)
        if own_id not in held:
            raise Fenced(f"member {self.name}", [])
        ((shards,),) = fetch(connection, SHARDS, self._params)
        return fair_share(held, shards)[own_id] - int(held[own_id])

    def hold(
        self, connection: psycopg.Connection[Any], shards: Iterable[tuple[int, int]]
    ) -> set[tuple[int, int]]:
        """Return which of some shards, each with an epoch, are still this member's.

        They stay this member's until the end of the transaction.
        """
        numbers, epochs = zip(*set(shards), strict=True)
        params = {**self._params, "shards": list(numbers), "epochs": list(epochs)}
        return set(fetch(connection, HOLD, params))

    def stop(self, connection: psycopg.Connection[Any]) -> None:
        """Ask this member's tasks, wherever they run, to finish the current chunk and end."""
        connection.execute(STOPPING, self._params)

    def take_back_stop(self, connection: psycopg.Connection[Any]) -> None:
        """Withdraw `stop`, before the next `balance`: its tasks have ended."""
        connection.execute(TAKE_BACK_STOP, self._params)

    def leave(self, connection: psycopg.Connection[Any]) -> None:
        """Free the shards immediately instead of at the end of the lease."""
        with connection.transaction():
            connection.execute(FREE, self._params)
            connection.execute(LEAVE, self._params)
