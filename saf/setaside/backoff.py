"""Backoff: when lanes are tried, and with what result (see `saf.setaside.parking`).

There may be as many lanes as services. So one statement reads, or writes, many lanes, and a cycle
gets only a bounded number. There are two kinds of lanes:

    of a destination   there are few, and a cycle knows them all: new messages for the destination
                       must wait behind them
    of a service       their number is unlimited. A cycle tries those whose turn comes first, at
                       most `AT_ONCE` of them. For the services that new messages are addressed to,
                       a task asks chunk by chunk which lanes they must wait behind (`held`)

A destination that an operator has paused has a lane of its own that is never due, even without
messages, so that new messages park there (`pause`). Its other lanes are not tried either, and count
no attempt.

A lane that has been tried goes to the end of the queue: its next attempt is later than those of all
lanes that have not been tried. So no lane starves, however many there are.

Statements lock the rows of lanes in the order of their columns, so that tasks that share lanes wait
for each other instead of deadlocking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf.database import fetch
from saf.errors import Braked, Paused, SafError
from saf.log.shards import NEWEST
from saf.setaside import parking
from saf.setaside.audit import audit
from saf.setaside.lane import (
    BROKER,
    GIVEN,
    NO_BROKER,
    OF_SERVICE,
    SAME_LANE,
    THE_LANE,
    Kind,
    Lane,
    given,
)
from saf.setaside.parking import BLOCKED, Backoff
from saf.setaside.unhandled import FOR_ALL

AT_ONCE = 2000
"""Lanes of services that one cycle tries."""

RANKS = {
    kind: number
    for number, kinds in enumerate(
        (
            (Kind.REPLAY,),
            (Kind.FOUND_REPLAY,),
            (Kind.MAIN,),
            (Kind.DOUBT,),
            (Kind.RETRY,),
            (Kind.SERVICE,),
            (Kind.ROUTE,),
            (Kind.FOUND_ROUTE, Kind.FOUND_RETRY),
        )
    )
    for kind in kinds
}
"""The kinds of a forwarder's lanes, with their ranks; see `rank`."""

SHOWN = 20
"""Lanes of a broker to show to operators who have not asked for all."""

# The shards that a member owns; evaluated once per statement
MY_SHARDS = f"ARRAY(SELECT c.shard FROM {NEWEST} AS c WHERE c.owner = %(member_id)s)"

BACKOFF = f"""
SELECT destination, kind, subject, {BROKER}, attempts, next_attempt_at,
       next_attempt_at <= now() AS due, error, since, needs_operator,
       paused_at IS NOT NULL AS paused
FROM saf.backoff b
"""
# Empty lanes of services are tried too, because that deletes them
WAITING = f"""
({BACKOFF}
 WHERE subscription_id = %(subscription_id)s AND kind <> ALL (%(of_service)s))
UNION ALL
({BACKOFF}
 WHERE subscription_id = %(subscription_id)s AND kind = ANY (%(of_service)s)
   AND next_attempt_at <= now()
   AND (EXISTS (SELECT FROM saf.parked p WHERE {SAME_LANE} AND p.shard = ANY ({MY_SHARDS}))
        OR NOT EXISTS (SELECT FROM saf.parked p WHERE {SAME_LANE}))
 ORDER BY next_attempt_at LIMIT %(at_once)s)
"""

# Whether a member's shards have messages in a lane that is due
DUE_HERE = f"""
SELECT EXISTS (
    SELECT FROM saf.backoff b
    WHERE b.subscription_id = %(subscription_id)s AND b.next_attempt_at <= now()
      AND EXISTS (SELECT FROM saf.parked p WHERE {SAME_LANE} AND p.shard = ANY ({MY_SHARDS})))
"""
# … and has had no turn yet: a lane that was tried since has attempts and a later time
NO_TURN_YET = f"""
SELECT EXISTS (
    SELECT FROM saf.backoff b
    WHERE b.subscription_id = %(subscription_id)s AND b.next_attempt_at <= now()
      AND (b.attempts = 0 OR b.next_attempt_at <= %(since)s)
      AND EXISTS (SELECT FROM saf.parked p WHERE {SAME_LANE} AND p.shard = ANY ({MY_SHARDS})))
"""
ANY_DUE = """
SELECT EXISTS (SELECT FROM saf.backoff
               WHERE subscription_id = %(subscription_id)s AND next_attempt_at <= now())
"""

ANY_LANE = """
SELECT EXISTS (SELECT FROM saf.backoff WHERE subscription_id = %(subscription_id)s)
"""

ANY_OF_SERVICES = """
SELECT EXISTS (SELECT FROM saf.backoff WHERE subscription_id = %(subscription_id)s
               AND kind = ANY (%(of_service)s))
"""

# The lanes that block most come first
SUMMARY = f"""
SELECT backoff.*, count(*) OVER () AS lanes
FROM ({BACKOFF} WHERE subscription_id = %(subscription_id)s) AS backoff
ORDER BY kind = ANY (%(of_service)s), attempts DESC, {THE_LANE} LIMIT %(shown)s
"""

NAMED = f"{GIVEN} AS w ({THE_LANE})"
OF_NAMES = f"""
{BACKOFF} WHERE subscription_id = %(subscription_id)s AND ({THE_LANE}) IN (SELECT * FROM {NAMED})
"""

HELD = f"""
SELECT destination, kind, subject, {BROKER}, error FROM saf.backoff b
WHERE subscription_id = %(subscription_id)s
  AND (kind, subject, broker) IN (
      SELECT * FROM unnest(%(kinds)s::text[], %(subjects)s::text[], %(brokers)s::uuid[]))
  AND EXISTS (SELECT FROM saf.parked p WHERE {SAME_LANE} AND p.shard = ANY (%(shards)s))
"""

# An attempt that was not due, because another member has just failed too, does not count. A lane
# that was not tried, because its destination is paused, has no attempts: `RESUME` recognizes it.
POSTPONE = f"""
INSERT INTO saf.backoff AS b (subscription_id, {THE_LANE}, error, attempts, next_attempt_at,
                              needs_operator)
SELECT %(subscription_id)s, {THE_LANE}, error, (NOT paused)::int,
       CASE WHEN braked OR paused THEN '{BLOCKED}'
            ELSE clock_timestamp() + make_interval(secs => (%(waits)s::float8[])[1]) END,
       needs_operator
FROM unnest(%(destinations)s::text[], %(kinds)s::text[], %(subjects)s::text[],
            %(brokers)s::uuid[], %(errors)s::text[], %(needs_operator)s::boolean[],
            %(braked)s::boolean[], %(paused)s::boolean[])
    AS w ({THE_LANE}, error, needs_operator, braked, paused)
ORDER BY {THE_LANE}
ON CONFLICT (subscription_id, {THE_LANE}) DO UPDATE SET
    error = excluded.error,
    attempts = CASE excluded.attempts WHEN 0 THEN 0 ELSE b.attempts + 1 END,
    next_attempt_at = CASE WHEN excluded.next_attempt_at = '{BLOCKED}' THEN '{BLOCKED}'
        ELSE clock_timestamp() + make_interval(
            secs => (%(waits)s::float8[])[least(b.attempts + 1, cardinality(%(waits)s::float8[]))])
        END,
    needs_operator = excluded.needs_operator
WHERE b.paused_at IS NULL
  AND (b.next_attempt_at <= now() OR excluded.next_attempt_at = '{BLOCKED}')
"""

THESE = f"SELECT {THE_LANE} FROM {NAMED}"
# A separate statement, so that the next one sees messages parked by the transactions that this one
# waited for
LOCK = f"""
SELECT FROM saf.backoff
WHERE subscription_id = %(subscription_id)s AND ({THE_LANE}) IN ({THESE})
ORDER BY {THE_LANE} FOR UPDATE
"""
# For lanes that are due, as in `POSTPONE`, which follows
START_AGAIN = f"""
UPDATE saf.backoff SET attempts = 0
WHERE subscription_id = %(subscription_id)s AND ({THE_LANE}) IN ({THESE})
  AND next_attempt_at <= now()
"""
FORGET = f"""
DELETE FROM saf.backoff b
WHERE subscription_id = %(subscription_id)s AND ({THE_LANE}) IN ({THESE}) AND paused_at IS NULL
  AND NOT EXISTS (SELECT FROM saf.parked p WHERE {SAME_LANE})
"""
# Messages in the lane need not wait any longer: those of other shards, or those that are left
RESET = f"""
UPDATE saf.backoff b SET attempts = 0, next_attempt_at = clock_timestamp(),
       needs_operator = false, {FOR_ALL}
WHERE subscription_id = %(subscription_id)s AND ({THE_LANE}) IN ({THESE}) AND paused_at IS NULL
  AND EXISTS (SELECT FROM saf.parked p WHERE {SAME_LANE})
"""

THE_FORWARDER = """
(SELECT subscription_id FROM saf.subscription WHERE (log, name) = ('outbox', 'forwarder'))
"""
PAUSE = f"""
INSERT INTO saf.backoff AS b (subscription_id, destination, paused_at, next_attempt_at,
                              needs_operator, error)
SELECT {THE_FORWARDER}, %(destination)s, clock_timestamp(), '{BLOCKED}', true,
       'paused by ' || session_user || CASE %(why)s::text WHEN '' THEN '' ELSE ': ' END || %(why)s
ON CONFLICT (subscription_id, {THE_LANE}) DO UPDATE SET
    paused_at = excluded.paused_at, next_attempt_at = excluded.next_attempt_at, attempts = 0,
    needs_operator = true, error = excluded.error
WHERE b.paused_at IS NULL
"""
PAUSED = f"""
SELECT error FROM saf.backoff
WHERE subscription_id = %(subscription_id)s AND destination = %(destination)s
  AND kind = '{Kind.MAIN}' AND subject = '' AND broker = '{NO_BROKER}' AND paused_at IS NOT NULL
"""
# In the order in which all transactions lock lanes. Lanes that were not tried in the pause are due.
RESUME = f"""
WITH resumed AS (
    SELECT subscription_id, {THE_LANE} FROM saf.backoff
    WHERE subscription_id = {THE_FORWARDER} AND destination = %(destination)s
      AND (paused_at IS NOT NULL OR next_attempt_at = '{BLOCKED}' AND attempts = 0)
    ORDER BY {THE_LANE} FOR UPDATE)
UPDATE saf.backoff b SET paused_at = NULL, next_attempt_at = clock_timestamp(),
       needs_operator = false
FROM resumed p WHERE {SAME_LANE}
  AND EXISTS (SELECT FROM saf.backoff m
              WHERE m.subscription_id = b.subscription_id AND m.destination = b.destination
                AND m.paused_at IS NOT NULL)
RETURNING b.kind
"""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Waiting lanes for operators: some of the lanes, and the number of all."""

    shown: tuple[Backoff, ...] = ()
    lanes: int = 0


@dataclass(frozen=True, kw_only=True)
class _Counted(Backoff):
    lanes: int


def waiting(
    connection: psycopg.Connection[Any], subscription_id: int, member_id: UUID
) -> tuple[Backoff, ...]:
    """Return the lanes that a member's cycle must know: all of destinations, some due of services.

    They are in the order in which to try them.
    """
    params = {
        "subscription_id": subscription_id,
        "member_id": member_id,
        "of_service": list(OF_SERVICE),
        "at_once": AT_ONCE,
    }
    with psycopg.Cursor(connection, row_factory=class_row(Backoff)) as cursor:
        return in_turn(cursor.execute(WAITING, params).fetchall())


def in_turn(lanes: Iterable[Backoff]) -> tuple[Backoff, ...]:
    """Sort lanes by destination, the longest waiting first; those of one destination by `rank`."""
    lanes = list(lanes)
    since: dict[str, datetime] = {}
    for lane in lanes:
        known = since.get(lane.destination, lane.next_attempt_at)
        since[lane.destination] = min(known, lane.next_attempt_at)
    return tuple(
        sorted(
            lanes,
            key=lambda one: (
                since[one.destination],
                one.destination,
                rank(one),
                one.next_attempt_at,
                one.order,
            ),
        )
    )


def rank(lane: Lane) -> int:
    """Return the rank of a lane: a destination's lanes with the same rank are released together.

    Lower ranks are released first: a replay before everything else, and messages that have waited
    for a service or a route after older ones.

    >>> kinds = "replay", "main", "retry", "service", "found_route"
    >>> ranks = [rank(Lane(destination="mom", kind=Kind(kind))) for kind in kinds]
    >>> ranks == sorted(set(ranks))
    True
    """
    return RANKS[lane.kind]


def due_here(connection: psycopg.Connection[Any], subscription_id: int, member_id: UUID) -> bool:
    """Whether any parked messages in the member's shards are due."""
    params = {"subscription_id": subscription_id, "member_id": member_id}
    ((due,),) = fetch(connection, DUE_HERE, params)
    return bool(due)


def had_no_turn(
    connection: psycopg.Connection[Any], subscription_id: int, member_id: UUID, since: datetime
) -> bool:
    """Whether parked messages in the member's shards had no turn, or no complete turn.

    Their lanes were due at ``since``, and still are.
    """
    params = {"subscription_id": subscription_id, "member_id": member_id, "since": since}
    ((left,),) = fetch(connection, NO_TURN_YET, params)
    return bool(left)


def any_due(connection: psycopg.Connection[Any], subscription_id: int) -> bool:
    """Whether any lane is due, in the shards of any member."""
    ((due,),) = fetch(connection, ANY_DUE, {"subscription_id": subscription_id})
    return bool(due)


def any_of_services(connection: psycopg.Connection[Any], subscription_id: int) -> bool:
    """Whether lanes of services wait, due or not."""
    params = {"subscription_id": subscription_id, "of_service": list(OF_SERVICE)}
    ((exists,),) = fetch(connection, ANY_OF_SERVICES, params)
    return bool(exists)


def summary(connection: psycopg.Connection[Any], subscription_id: int) -> Summary:
    """Return a summary of the waiting lanes, for operators."""
    params = {
        "subscription_id": subscription_id,
        "of_service": list(OF_SERVICE),
        "shown": SHOWN,
    }
    with psycopg.Cursor(connection, row_factory=class_row(_Counted)) as cursor:
        found = cursor.execute(SUMMARY, params).fetchall()
    return Summary(shown=tuple(found), lanes=found[0].lanes if found else 0)


def named(
    connection: psycopg.Connection[Any], subscription_id: int, lanes: Collection[Lane]
) -> tuple[Backoff, ...]:
    """Return which of some lanes wait."""
    with psycopg.Cursor(connection, row_factory=class_row(Backoff)) as cursor:
        return tuple(cursor.execute(OF_NAMES, _params(subscription_id, lanes)).fetchall())


def held(
    connection: psycopg.Connection[Any],
    subscription_id: int,
    shards: Sequence[int],
    lanes: Iterable[Lane],
) -> dict[Lane, str]:
    """Return which lanes have messages in some shards, with the reasons for which they wait.

    The lanes' destinations are ignored.
    """
    params = {"subscription_id": subscription_id, "shards": list(shards), **given(lanes)}
    return {
        Lane(destination=destination, kind=kind, subject=subject, broker=broker): error
        for destination, kind, subject, broker, error in fetch(connection, HELD, params)
    }


def postpone(
    connection: psycopg.Connection[Any],
    subscription_id: int,
    failed: Mapping[Lane, SafError],
    moving: Collection[Lane] = (),
) -> None:
    """Note that attempts at lanes have failed, with their errors. Call it in a transaction.

    A lane that failed with `Braked` or `Paused` is not tried again until an operator requests it.

    In lanes that are ``moving``, some messages were delivered nevertheless: their backoff starts
    again.
    """
    if moving:
        connection.execute(LOCK, _params(subscription_id, moving))
        connection.execute(START_AGAIN, _params(subscription_id, moving))
    if failed:
        errors = failed.values()
        params = _params(subscription_id, failed) | {
            "errors": [str(error) for error in errors],
            "needs_operator": [error.needs_operator for error in errors],
            "braked": [isinstance(error, Braked) for error in errors],
            "paused": [isinstance(error, Paused) for error in errors],
            "waits": _waits(),
        }
        connection.execute(POSTPONE, params)


def succeeded(
    connection: psycopg.Connection[Any], subscription_id: int, lanes: Collection[Lane]
) -> None:
    """Open lanes again: reset their attempts, and delete empty ones. Call it in a transaction.

    Messages left in a lane have their next turn after all lanes that have waited longer.
    """
    if lanes:
        forget(connection, subscription_id, lanes)
        connection.execute(RESET, _params(subscription_id, lanes))


def forget(
    connection: psycopg.Connection[Any], subscription_id: int, lanes: Collection[Lane]
) -> None:
    """Delete lanes that have no messages left. Call it in a transaction."""
    if lanes:
        connection.execute(LOCK, _params(subscription_id, lanes))
        connection.execute(FORGET, _params(subscription_id, lanes))


def pause(connection: psycopg.Connection[Any], destination: str, why: str = "") -> bool:
    """Pause a destination: this source sends nothing there until it is resumed.

    Its messages wait in their lanes, and no attempt is counted. Return False if it is paused
    already. The audit records it.
    """
    with connection.transaction():
        params = {"destination": destination, "why": why}
        changed = connection.execute(PAUSE, params).rowcount == 1
        if changed:
            audit(connection, f"pause destination {destination}", [], why)
    return changed


def paused(
    connection: psycopg.Connection[Any], subscription_id: int, destination: str
) -> str | None:
    """Return who has paused a destination, and why, in words; None if it is not paused."""
    params = {"subscription_id": subscription_id, "destination": destination}
    found = fetch(connection, PAUSED, params)
    return found[0][0] if found else None


def resume(connection: psycopg.Connection[Any], destination: str, why: str = "") -> bool:
    """Resume a paused destination; return False if it is not paused. The audit records it.

    Its lanes are due now.
    """
    with connection.transaction():
        lanes = fetch(connection, RESUME, {"destination": destination})
        if not lanes:
            return False
        ((subscription_id,),) = fetch(connection, f"SELECT {THE_FORWARDER}")
        forget(connection, subscription_id, [Lane(destination=destination)])
        audit(connection, f"resume destination {destination}", [], why)
    return True


def _params(subscription_id: int, lanes: Iterable[Lane]) -> dict[str, Any]:
    return {"subscription_id": subscription_id, **given(lanes)}


def _waits() -> list[float]:
    """Return the seconds to wait after each attempt, up to the longest wait."""
    waits = [parking.wait_seconds(1)]
    while (longer := parking.wait_seconds(len(waits) + 1)) > waits[-1]:
        waits.append(longer)
    return waits
