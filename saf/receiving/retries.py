"""Retries: keys that wait for a receiver, and messages that are tried again with more care.

A message whose handling fails is copied to saf.parked, into the lane of its key (see
`saf.setaside.lane`). Later messages of the key park behind it; other keys continue. When the lane
is due, its first message is tried again, *alone*: in a transaction of its own, so that only this
message can be the cause of a failure. After `Policy.max_attempts` attempts it is a dead letter.

An attempt is counted before it is made, in a transaction that has committed by then (`count`). So
an attempt that ends the process counts like one that raises, and a message that kills every
receiver becomes a dead letter like any other.

A message that has not been tried alone yet is found by its shard. A cursor whose last delivery did
not complete (see `saf.receiving.claim`) is handed out alone as well, with an ``allowance`` of one
message at first, which doubles with each success. That first message is parked and counted before
it is tried.

A message without a handler is not tried at all: its lane waits for a receiver that handles its type
(`saf.setaside.unhandled`), and only such a receiver chooses it.

A message that cannot be handed out becomes a dead letter, too. The database copies its stored row,
not the row that was read (`bury_as_stored`).

Only the receiver that has the shard in hand writes any of these rows. The exception is `uncount`,
which checks the number of attempts instead. This file makes no attempts: `saf.receiving.receive`
does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import psycopg

from saf.database import fetch
from saf.errors import UndecodableEvent
from saf.log.shards import NEWEST
from saf.received import Received
from saf.receiving.arrival import hook
from saf.setaside import dead
from saf.setaside.isolation import said
from saf.setaside.lane import THE_LANE, Kind, Lane, given
from saf.setaside.parking import (
    BLOCKED,
    FIRST_WAIT_SECONDS,
    LONGEST_WAIT_SECONDS,
    wait_seconds,
)
from saf.setaside.unhandled import FOR_ALL, awaited, possible

if TYPE_CHECKING:
    from saf.receiving.hand import Reader

MINE = f"ARRAY(SELECT c.shard FROM {NEWEST} AS c WHERE owner IS NOT DISTINCT FROM %(owner)s)"
HANDLED = awaited(shards=MINE)

# Only shards that this reader may claim; and what operators have decided about the subscription
LOOK = f"""
SELECT found.troubled, s.paused_at IS NOT NULL, s.rate, s.concurrency
FROM (SELECT EXISTS (SELECT FROM saf.backoff b
               WHERE b.subscription_id = %(subscription_id)s AND b.next_attempt_at <= now()
                 AND b.shard = ANY ({MINE}))
    OR EXISTS (SELECT FROM {NEWEST} AS c
               WHERE allowance IS NOT NULL AND owner IS NOT DISTINCT FROM %(owner)s)
    OR EXISTS ({HANDLED}) AS troubled) AS found
LEFT JOIN saf.subscription s ON s.subscription_id = %(subscription_id)s
"""
PAUSED = """
SELECT EXISTS (SELECT FROM saf.subscription
               WHERE subscription_id = %(subscription_id)s AND paused_at IS NOT NULL)
"""

# At random among the oldest, so that receivers seldom choose the same lane
CHOOSE = f"""
SELECT shard, subject FROM (
    (SELECT shard, subject FROM saf.backoff JOIN {NEWEST} AS c USING (subscription_id, shard)
     WHERE next_attempt_at <= now() AND owner IS NOT DISTINCT FROM %(owner)s
     ORDER BY next_attempt_at LIMIT 100)
    UNION ALL
    {HANDLED}
    UNION ALL
    SELECT shard, NULL FROM {NEWEST} AS c
    WHERE allowance IS NOT NULL AND owner IS NOT DISTINCT FROM %(owner)s
) AS suspect ORDER BY random() LIMIT 1
"""

THIS_LANE = f"""
subscription_id = %(subscription_id)s AND destination = '' AND kind = '{Kind.KEY}'
AND subject = %(lane)s
"""

ATTEMPTS = f"SELECT attempts, error FROM saf.backoff WHERE {THIS_LANE}"
COUNT = f"""
UPDATE saf.backoff SET attempts = %(attempts)s,
       next_attempt_at = clock_timestamp() + make_interval(secs => %(wait)s), {FOR_ALL}
WHERE {THIS_LANE}
"""
# Runs without the lane in hand: the number shows that no other attempt was counted since
UNCOUNT = f"""
UPDATE saf.backoff SET attempts = attempts - 1, next_attempt_at = clock_timestamp()
WHERE {THIS_LANE} AND attempts = %(attempts)s
"""

WAIT = f"""
INSERT INTO saf.backoff
    (subscription_id, destination, kind, subject, shard, attempts, error, next_attempt_at,
     awaits_handler, message_type)
SELECT %(subscription_id)s, '', '{Kind.KEY}', lane, shard, attempts, error,
       coalesce(clock_timestamp() + make_interval(secs => wait), timestamptz '{BLOCKED}'),
       awaits_handler, message_type
FROM unnest(%(lane)s::text[], %(shard)s::smallint[], %(attempts)s::int[], %(error)s::text[],
            %(wait)s::float[], %(awaits_handler)s::boolean[], %(message_type)s::text[])
     AS w (lane, shard, attempts, error, wait, awaits_handler, message_type)
ORDER BY lane
ON CONFLICT (subscription_id, {THE_LANE}) DO UPDATE SET
    attempts = excluded.attempts, error = excluded.error,
    next_attempt_at = excluded.next_attempt_at,
    awaits_handler = excluded.awaits_handler, message_type = excluded.message_type
"""

# Meanwhile the message may have ended, or its lane may wait for another reason
COUNT_FAILED = f"""
UPDATE saf.backoff b SET attempts = f.attempts, error = f.error,
       next_attempt_at = clock_timestamp() + make_interval(secs => f.wait)
FROM unnest(%(lane)s::text[], %(id)s::bigint[], %(attempts)s::int[], %(error)s::text[],
            %(wait)s::float[]) AS f (lane, id, attempts, error, wait)
WHERE b.subscription_id = %(subscription_id)s AND b.destination = '' AND b.kind = '{Kind.KEY}'
  AND b.subject = f.lane AND b.attempts < f.attempts AND NOT b.awaits_handler
  AND f.id = (SELECT p.id FROM saf.parked p
              WHERE p.subscription_id = %(subscription_id)s AND p.destination = ''
                AND p.kind = '{Kind.KEY}' AND p.subject = f.lane
              ORDER BY p.id LIMIT 1)
"""

MOVE_TO_KEYS = """
UPDATE saf.parked p SET kind = m.kind, subject = m.subject
FROM unnest(%(parked_ids)s::bigint[], %(kinds)s::text[], %(subjects)s::text[])
    AS m (parked_id, kind, subject)
WHERE p.parked_id = m.parked_id AND (p.kind, p.subject) <> (m.kind, m.subject)
"""

# Uses the index parked_later, whose first entry for a lane is this one, however many messages wait.
# LIMIT, because without it the planner may join the whole lane to find whether it has any.
FIRST_LATE = f"""
SELECT deliver_at FROM saf.parked p
WHERE subscription_id = %(subscription_id)s AND destination = '' AND kind = '{Kind.LATER}'
  AND p.subject = {{of}}.subject
ORDER BY deliver_at LIMIT 1
"""
# Writes the due time of each lane's first message; a lane without messages is deleted
TIME_LATE = f"""
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, next_attempt_at, error)
SELECT %(subscription_id)s, '', '{Kind.LATER}', s.subject, first.deliver_at, 'deliver_at'
FROM unnest(%(subjects)s::text[]) AS s (subject)
CROSS JOIN LATERAL ({FIRST_LATE.format(of="s")}) AS first
ON CONFLICT (subscription_id, {THE_LANE}) DO UPDATE SET
    next_attempt_at = excluded.next_attempt_at
"""
FORGET_LATE = f"""
DELETE FROM saf.backoff b
WHERE subscription_id = %(subscription_id)s AND destination = '' AND kind = '{Kind.LATER}'
  AND subject = ANY (%(subjects)s) AND ({FIRST_LATE.format(of="b")}) IS NULL
"""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Treatment of a message whose handling fails.

    Raises:
        ValueError: a number is out of range, or ``permanent`` contains a value that is not an
            exception class.
    """

    max_attempts: int = 5
    """Number of attempts after which a message is a dead letter."""
    first_wait_seconds: float = FIRST_WAIT_SECONDS
    """Wait before the second attempt, in seconds; it doubles before each later attempt."""
    longest_wait_seconds: float = LONGEST_WAIT_SECONDS
    permanent: tuple[type[Exception], ...] = ()
    """Exceptions after which no further attempt is made, besides `saf.UndecodableEvent`."""
    block: bool = False
    """True if later messages of a key wait until an operator decides about its dead letter."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.first_wait_seconds < 0 or self.longest_wait_seconds < 0:
            raise ValueError(f"max_attempts is at least 1, and no wait is negative: {self}")
        if not isinstance(self.permanent, tuple) or not all(
            isinstance(kind, type) and issubclass(kind, BaseException) for kind in self.permanent
        ):
            raise ValueError(f"permanent: expected a tuple of exceptions, got {self.permanent!r}")

    def wait_seconds(self, attempts: int) -> float:
        """Return the seconds to wait after ``attempts`` attempts."""
        return wait_seconds(attempts, self.first_wait_seconds, self.longest_wait_seconds)

    def gives_up(self, attempts: int, error: BaseException | str) -> bool:
        """Return whether attempt number ``attempts``, which ended with ``error``, was the last one.

        >>> Policy(max_attempts=2).gives_up(1, "no"), Policy(max_attempts=2).gives_up(2, "no")
        (False, True)
        """
        return attempts >= self.max_attempts or self.is_permanent(error)

    def is_permanent(self, error: BaseException | str) -> bool:
        """Return whether no further attempt helps after ``error``."""
        return isinstance(error, (UndecodableEvent, *self.permanent))


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A subject to try alone: a lane, or a shard whose last delivery failed."""

    shard: int
    lane: str | None
    """Lane of the key, as in `saf.received.Received.lane`."""
    attempts: int = 1


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How a key's lane continues to wait."""

    lane: str
    shard: int
    attempts: int
    error: str
    wait: float | None = None
    """Seconds to wait; None to wait for an operator or a handler."""
    awaits_handler: bool = False
    message_type: str | None = None
    """Message type whose handler the lane waits for."""


@dataclass(frozen=True, kw_only=True)
class FailedAttempt(Waiting):
    """A failed attempt that was not counted when it failed, and the wait after it."""

    id: int
    """Id of the message in the inbox."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a receiver must know before it takes messages."""

    troubled: bool
    """True if there may be anything to try alone now."""
    paused: bool
    """True if an operator has paused the subscription."""
    rate: str | None
    """Most messages in a time, e.g. 100/s; None: unlimited."""
    concurrency: int | None
    """Most deliveries at a time; None: unlimited."""


def look(connection: psycopg.Connection[Any], reader: Reader) -> Look:
    """Return what a receiver must know before it takes messages; one statement."""
    ((troubled, paused, rate, concurrency),) = fetch(connection, LOOK, params_of(reader))
    return Look(troubled=troubled, paused=paused, rate=rate, concurrency=concurrency)


def paused(connection: psycopg.Connection[Any], reader: Reader) -> bool:
    """Return whether an operator has paused the subscription."""
    ((paused,),) = fetch(connection, PAUSED, {"subscription_id": reader.subscription_id})
    return bool(paused)


def choose(connection: psycopg.Connection[Any], reader: Reader) -> Suspect | None:
    """Choose a suspect that is due to be tried alone, if any. Locks nothing."""
    found = fetch(connection, CHOOSE, params_of(reader))
    return Suspect(shard=found[0][0], lane=found[0][1]) if found else None


def params_of(reader: Reader) -> dict[str, Any]:
    """Return the parameters of the statements that find the lanes a reader may try."""
    return {
        "subscription_id": reader.subscription_id,
        "owner": reader.owner,
        "types": None if reader.types is None else possible(reader.types),
    }


def attempts(
    connection: psycopg.Connection[Any], reader: Reader, lane: str
) -> tuple[int, str] | None:
    """Return the attempts at a lane's first message, and its last error; None if nothing waits."""
    params = {"subscription_id": reader.subscription_id, "lane": lane}
    found = fetch(connection, ATTEMPTS, params)
    return (found[0][0], found[0][1]) if found else None


def count(
    connection: psycopg.Connection[Any], reader: Reader, lane: str, number: int, policy: Policy
) -> None:
    """Count an attempt that is about to be made, and set the time of the next one."""
    params = {"subscription_id": reader.subscription_id, "lane": lane}
    connection.execute(COUNT, params | {"attempts": number, "wait": policy.wait_seconds(number)})


def uncount(connection: psycopg.Connection[Any], reader: Reader, lane: str, number: int) -> None:
    """Take back the count of an attempt that is not made, because another receiver was first."""
    params = {"subscription_id": reader.subscription_id, "lane": lane, "attempts": number}
    connection.execute(UNCOUNT, params)


def wait(connection: psycopg.Connection[Any], reader: Reader, lanes: Mapping[str, Waiting]) -> None:
    """Make keys wait in their lanes."""
    if lanes:
        columns: dict[str, Any] = {
            column.name: [getattr(lane, column.name) for lane in lanes.values()]
            for column in fields(Waiting)
        }
        connection.execute(WAIT, columns | {"subscription_id": reader.subscription_id})


def count_failed(
    connection: psycopg.Connection[Any], reader: Reader, failed: Collection[FailedAttempt]
) -> None:
    """Count attempts at messages that still wait first in their lanes."""
    columns: dict[str, Any] = {
        name: [getattr(attempt, name) for attempt in failed]
        for name in ("lane", "id", "attempts", "error", "wait")
    }
    connection.execute(COUNT_FAILED, columns | {"subscription_id": reader.subscription_id})


def move(connection: psycopg.Connection[Any], parked: Sequence[tuple[int, Lane]]) -> None:
    """Move parked messages, given by their ids in saf.parked, into lanes."""
    ids, places = zip(*parked, strict=True)
    connection.execute(MOVE_TO_KEYS, {"parked_ids": list(ids), **given(places)})


def time_late(connection: psycopg.Connection[Any], reader: Reader, shards: Sequence[int]) -> None:
    """Write the due times of shards' delayed messages, after some were added or removed."""
    if shards:
        params = {
            "subscription_id": reader.subscription_id,
            "subjects": [str(shard) for shard in shards],
        }
        connection.execute(TIME_LATE, params)
        connection.execute(FORGET_LATE, params)


def bury_as_stored(
    raw: psycopg.Connection[Any],
    reader: Reader,
    some: Sequence[tuple[Received, str | None]],
    *,
    reason: str = "rejected",
) -> None:
    """Make dead letters of messages from their stored rows, not from the rows that were read.

    Each message comes with its error; None stands for "too large to be read".
    """
    for table, places in (
        ("inbox", [(one.id, one, error) for one, error in some if one.parked_id is None]),
        ("parked", [(one.parked_id, one, error) for one, error in some if one.parked_id]),
    ):
        rows = [
            dead.AsStored(
                shard=one.shard,
                id=place or 0,
                reason="over_size" if error is None else reason,
                error=error and said(error),
            )
            for place, one, error in places
        ]
        dead.bury_as_stored(raw, reader.subscription_id, table, rows)


def fail_unseen(raw: psycopg.Connection[Any], reader: Reader, messages: Iterable[Received]) -> None:
    """End the conversations of messages that cannot be received, unless the reader listens in."""
    if reader.converses:
        for message in messages:
            hook().fail_unseen(raw, message)
