"""Shards: which bucket a key falls into, and which member owns the bucket.

M shards, N members, M much greater than N (microsharding, from Dempsy). Members coordinate
through the rows of `saf.member` and `saf.cursor` and the database's clock alone:

- A member *joins* with a lease, a term that it renews while it lives, and with an advisory lock
  that its session holds. A member whose session has ended (it was killed) or whose lease is over
  (it hangs, or the network does) is forgotten by whoever looks next, and its shards are free.
- Each member works out its own fair share and releases or acquires only the difference, so
  that the fewest shards move. A lock on the subscription's row makes the members do so in turn.
- Acquiring a shard raises its *epoch*. Every write on behalf of a shard names owner and epoch,
  so one who was taken over, however long it slept, changes no row and learns it (`Fenced`).

What a lease is not: proof of ownership at this moment. Only the epoch, checked by the write
itself, is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import psycopg

from saf.database import fetch
from saf.errors import Fenced

_MASK = 0xFFFFFFFF


def shard_of(key: str, shards: int) -> int:
    """The shard of a key: the same as the column ``shard`` of a broker with that many shards.

    This is PostgreSQL's ``hashtextextended(key, 0)`` (Bob Jenkins' lookup3), brought into
    0 … shards-1. A message without key uses its id's text.

    >>> shard_of("N725MQ", 64), shard_of("", 64), shard_of("Zürich", 100)
    (5, 45, 62)
    """
    return hash64(key.encode()) % shards


def hash64(data: bytes) -> int:
    """PostgreSQL's ``hash_bytes_extended`` with seed 0, as a signed 64-bit integer."""
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
    """How many of ``shards`` each member should own, given how many it holds.

    Everyone gets ⌊M/n⌋; the remainder stays with those who hold most, so that the fewest move.
    Ties go by name, so every member comes to the same answer.

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


JOIN = """
INSERT INTO saf.member (member_id, subscription_id, name, lease_until)
VALUES (%(member_id)s, %(subscription_id)s, %(name)s,
        clock_timestamp() + make_interval(secs => %(lease_seconds)s))
"""

# Held until the session ends, however it ends.
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

# One member at a time: what each decides rests on what all hold. NO KEY, because a new cursor
# or member row only needs the subscription to stay.
TAKE_TURN = """
SELECT FROM saf.subscription WHERE subscription_id = %(subscription_id)s FOR NO KEY UPDATE
"""

# The foreign key sets the owner of its shards to NULL: they are free, their batches stay open.
FORGET_DEAD = f"""
DELETE FROM saf.member m
WHERE subscription_id = %(subscription_id)s AND member_id <> %(member_id)s
  AND (lease_until < clock_timestamp() OR NOT {IS_PRESENT})
"""

HOLDINGS = """
SELECT m.member_id::text AS member,
       (SELECT count(*) FROM saf.cursor c
        WHERE c.subscription_id = m.subscription_id AND c.owner = m.member_id) AS held
FROM saf.member m WHERE m.subscription_id = %(subscription_id)s AND NOT m.stopping
"""

SHARDS = "SELECT count(*) FROM saf.cursor WHERE subscription_id = %(subscription_id)s"

# Shards with no batch in hand go first: the next owner of an open one has to read it again.
RELEASE = """
UPDATE saf.cursor SET owner = NULL
WHERE subscription_id = %(subscription_id)s AND owner = %(member_id)s
  AND shard IN (SELECT shard FROM saf.cursor
                WHERE subscription_id = %(subscription_id)s AND owner = %(member_id)s
                ORDER BY open IS NULL DESC, shard DESC LIMIT %(surplus)s)
"""

ACQUIRE = """
UPDATE saf.cursor SET owner = %(member_id)s, epoch = epoch + 1
WHERE subscription_id = %(subscription_id)s AND owner IS NULL
  AND shard IN (SELECT shard FROM saf.cursor
                WHERE subscription_id = %(subscription_id)s AND owner IS NULL
                ORDER BY shard LIMIT %(lacking)s)
"""

OWNED = """
SELECT count(*) FROM saf.cursor
WHERE subscription_id = %(subscription_id)s AND owner = %(member_id)s
"""

STOPPING = "UPDATE saf.member SET stopping = true WHERE member_id = %(member_id)s"

GOING_ON = "UPDATE saf.member SET stopping = false WHERE member_id = %(member_id)s"

LEAVE = "DELETE FROM saf.member WHERE member_id = %(member_id)s"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A live process of a subscription. The methods write through a connection in autocommit."""

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

        The member lives no longer than the connection's session.
        """
        connection.execute(BE_PRESENT, self._params)
        connection.execute(JOIN, self._params)

    def renew(self, connection: psycopg.Connection[Any]) -> None:
        """Extend the lease.

        Raises:
            Fenced: the lease was over and the others have forgotten this member.
        """
        if connection.execute(RENEW, self._params).fetchone() is None:
            raise Fenced(f"member {self.name}", [])

    def balance(self, connection: psycopg.Connection[Any]) -> int:
        """Release or acquire shards up to the fair share; return how many are owned now.

        Call it only while no work on the member's shards is under way.
        """
        params = self._params
        with connection.transaction():
            connection.execute(TAKE_TURN, params)
            connection.execute(FORGET_DEAD, params)
            held = dict(fetch(connection, HOLDINGS, params))
            me = str(self.member_id)
            if me not in held:
                raise Fenced(f"member {self.name}", [])
            shards = fetch(connection, SHARDS, params)[0][0]
            change = fair_share(held, shards)[me] - held[me]
            if change < 0:
                connection.execute(RELEASE, {**params, "surplus": -change})
            elif change > 0:
                connection.execute(ACQUIRE, {**params, "lacking": change})
            return int(fetch(connection, OWNED, params)[0][0])

    def stop(self, connection: psycopg.Connection[Any]) -> None:
        """Ask this member's tasks, wherever they run, to finish the chunk in hand and end."""
        connection.execute(STOPPING, self._params)

    def go_on(self, connection: psycopg.Connection[Any]) -> None:
        """Take `stop` back, before the next `balance`: its tasks have ended."""
        connection.execute(GOING_ON, self._params)

    def leave(self, connection: psycopg.Connection[Any]) -> None:
        """Free the shards at once instead of at the end of the lease."""
        connection.execute(LEAVE, self._params)
