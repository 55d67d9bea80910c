"""The inbox as a dispatcher reads it: as a member that owns shards, ahead of their positions.

No transaction is open while the dispatcher waits for an endpoint. So each statement here stands
alone, and names its owner and epoch; `saf.receiving.dispatch.marking` writes results together.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from saf.database import fetch, of_broker
from saf.log.shards import NEWEST, THIS_ROW
from saf.received import EXPRESSIONS, ID, READ, SHARD, WITH_READABLE, Received
from saf.receiving.claim import NEW
from saf.receiving.dispatch.progress import NONE, InHand
from saf.receiving.dispatch.window import Window
from saf.receiving.hand import EXPIRED, LATE, UNREAD, Reader
from saf.receiving.reading import FATE, IN_BATCH, SINCE, refuse_doubled
from saf.setaside import dropped
from saf.setaside.lane import Kind
from saf.setaside.parking import BLOCKED

TALKS = "messages of dialogs are sent with reply = true only; or let a worker handle them"
"""Error of a lane that a dispatcher leaves to a worker."""

LANE_MESSAGES = 20
"""Number of messages of a due lane to read in one go."""

ALL_SHARDS = "SELECT shards FROM saf.broker"

CLOCK = "SELECT clock_timestamp()"

OWNED = f"""
SELECT c.shard, c.epoch, c.batch, c.done::text, c.open::text, c.position,
       coalesce(d.ids::text, '{NONE}')
FROM {NEWEST} AS c
LEFT JOIN saf.dispatched d ON d.subscription_id = c.subscription_id AND d.shard = c.shard
    AND d.batch = c.batch AND c.open IS NOT NULL
WHERE c.owner = %(owner)s
"""

# A poll that finds nothing writes nothing. Receivers' notes on a cursor, cuts of a deep backlog and
# caution after a failure, are not valid for the batch that begins here.
OPEN = f"""
UPDATE saf.cursor c
SET open = pg_current_snapshot(), batch = c.batch + 1, opened_at = now(), until = NULL,
    cuts = NULL, allowance = NULL
FROM (SELECT shard, batch FROM {NEWEST} AS c
      WHERE c.owner = %(owner)s AND c.open IS NULL AND ({NEW})) AS n
WHERE {THIS_ROW} AND c.owner = %(owner)s AND c.open IS NULL
RETURNING c.shard, c.epoch, c.batch, c.done::text, c.open::text
"""

# The sizes of bodies are summed in the database, and only bodies that fit are fetched
BEHIND = f"""
EXISTS (SELECT FROM saf.backoff b
        WHERE b.subscription_id = %(subscription_id)s AND b.destination = ''
          AND b.kind = '{Kind.KEY}' AND b.subject = coalesce(since.key, since.message_id::text))
"""
READ_AHEAD = f"""
SELECT * FROM (
    SELECT *, (sum(bytes) OVER (ORDER BY place, id) - bytes)::bigint AS before,
           count(*) OVER () AS found
    FROM (
        SELECT m.*, c.place
        FROM unnest(%(shards)s::smallint[], %(done)s::pg_snapshot[], %(open)s::pg_snapshot[],
                    %(read)s::bigint[], %(ids)s::int8multirange[])
            WITH ORDINALITY AS c (shard, done, open, position, ids, place)
        CROSS JOIN LATERAL (
            SELECT {EXPRESSIONS}, {FATE} AS fate, {BEHIND} AS behind,
                   octet_length(body) AS bytes
            FROM (SELECT {WITH_READABLE} FROM ({SINCE}) AS since
                  WHERE {IN_BATCH.format(open="c.open")} AND id > c.position AND NOT id <@ c.ids
                  ORDER BY id LIMIT %(each)s) AS since
            ORDER BY id
        ) AS m
        LIMIT %(limit)s
    ) AS found_rows
) AS counted
WHERE before < %(bytes)s
ORDER BY place, id
"""

# A key that a worker left waiting for a handler is sent, unless a dialog's message comes first
DUE = f"""
SELECT subject, shard, attempts, error FROM saf.backoff b
WHERE subscription_id = %(subscription_id)s AND destination = '' AND kind = '{Kind.KEY}'
  AND shard = ANY (%(shards)s) AND subject <> ALL (%(in_memory)s)
  AND (next_attempt_at <= now() OR awaits_handler AND (%(awaited)s
       OR error IS DISTINCT FROM '{TALKS}' AND (
           SELECT from_initiator FROM saf.parked p
           WHERE p.subscription_id = b.subscription_id AND p.destination = ''
             AND p.kind = '{Kind.KEY}' AND p.subject = b.subject
           ORDER BY p.id LIMIT 1) IS NULL))
ORDER BY next_attempt_at LIMIT %(limit)s
"""
ANY_WAITS = f"""
SELECT EXISTS (SELECT FROM saf.backoff
               WHERE subscription_id = %(subscription_id)s AND destination = ''
                 AND kind = '{Kind.KEY}' AND next_attempt_at < timestamptz '{BLOCKED}')
"""
READ_LANES = f"""
SELECT * FROM (
    SELECT m.*, l.place, (sum(bytes) OVER (ORDER BY l.place, m.id) - bytes)::bigint AS before
    FROM unnest(%(lanes)s::text[]) WITH ORDINALITY AS l (subject, place)
    LEFT JOIN LATERAL (
        SELECT {EXPRESSIONS}, {FATE} AS fate, parked_id, octet_length(body) AS bytes
        FROM (SELECT {WITH_READABLE} FROM saf.parked
              WHERE subscription_id = %(subscription_id)s AND destination = ''
                AND kind = '{Kind.KEY}' AND subject = l.subject
              ORDER BY id LIMIT {LANE_MESSAGES}) AS lane
        ORDER BY id
    ) AS m ON true
) AS counted
WHERE coalesce(before, 0) < %(bytes)s
ORDER BY place, id
"""
READ_LATE = f"""
SELECT * FROM (
    SELECT *, (sum(bytes) OVER (ORDER BY deliver_at, id) - bytes)::bigint AS before
    FROM (
        SELECT {EXPRESSIONS}, {FATE} AS fate, {BEHIND} AS behind, parked_id,
               octet_length(body) AS bytes
        FROM (SELECT {WITH_READABLE} FROM saf.parked
              WHERE subscription_id = %(subscription_id)s AND destination = ''
                AND kind = '{Kind.LATER}'
                AND subject = ANY (ARRAY(
                    SELECT subject FROM saf.backoff
                    WHERE subscription_id = %(subscription_id)s AND destination = ''
                      AND kind = '{Kind.LATER}' AND next_attempt_at <= now()
                      AND subject = ANY (%(subjects)s)))
                AND deliver_at <= now() AND parked_id <> ALL (%(in_memory)s)
              ORDER BY deliver_at, id LIMIT %(limit)s) AS since
        ORDER BY deliver_at, id
    ) AS few
) AS counted
WHERE before < %(bytes)s
ORDER BY deliver_at, id
"""


def all_shards(connection: psycopg.Connection[Any]) -> int:
    """Return the number of the broker's shards."""
    return int(of_broker(connection, ALL_SHARDS)[0])


def clock(connection: psycopg.Connection[Any]) -> tuple[datetime, float]:
    """Return the database's clock, and this machine's monotonic clock at the answer."""
    ((now,),) = fetch(connection, CLOCK)
    return now, time.monotonic()


def owned(connection: psycopg.Connection[Any], reader: Reader) -> list[InHand]:
    """Return the shards that the member owns now, with their progress."""
    rows = fetch(connection, OWNED, _of(reader))
    fields = ("shard", "epoch", "batch", "done", "open", "position", "known")
    return [InHand(**dict(zip(fields, row, strict=True))) for row in rows]


def open_batches(connection: psycopg.Connection[Any], reader: Reader) -> list[InHand]:
    """Open a batch in each owned shard with new messages and no open batch; return the shards."""
    return [
        InHand(shard=shard, epoch=epoch, batch=batch, done=done, open=opened, position=0)
        for shard, epoch, batch, done, opened in fetch(connection, OPEN, _of(reader))
    ]


def read(
    connection: psycopg.Connection[Any],
    reader: Reader,
    shards: Sequence[InHand],
    *,
    each: int,
    limit: int,
    max_bytes: int,
) -> tuple[list[tuple[Any, ...]], set[int]]:
    """Read the next messages of these shards, in this order, at most ``each`` per shard.

    Return rows for `take`, and the shards that were read completely.
    """
    params = {
        **_of(reader),
        "shards": [position.shard for position in shards],
        "done": [position.done for position in shards],
        "open": [position.open for position in shards],
        "read": [position.read for position in shards],
        "ids": [position.known for position in shards],
        "each": each,
        "limit": limit,
        "bytes": max_bytes,
    }
    rows = _rows(connection, READ_AHEAD, params)
    refuse_doubled(connection, rows)
    last = len(shards) + 1
    if rows:
        *_, place, _, found = rows[-1]
        if found == limit or len(rows) < found:
            # this shard may have more messages, and the shards after it were not read
            last = place
    counts = Counter(row[SHARD] for row in rows)
    return rows, {
        position.shard
        for place, position in enumerate(shards, start=1)
        if place < last and counts[position.shard] < each
    }


def take(window: Window, rows: Iterable[tuple[Any, ...]]) -> None:
    """Put rows that were read into the window, each by its fate."""
    width = len(READ)
    for row in rows:
        message, fate = Received(row), row[width]
        if fate == LATE:
            window.postpone(message)
        elif not _is_buried(window, message, fate):
            window.add(message, behind=row[width + 1])


def take_lane(window: Window, lane: DueLane, max_attempts: int) -> None:
    """Put the first messages of a due lane into the window.

    If the first message has used up its attempts, it is a dead letter.
    """
    if lane.name in window.lanes or lane.shard not in window.shards:
        return
    width, pending = len(READ), []
    for number, row in enumerate(lane.rows):
        attempts = lane.attempts if number == 0 else 0
        message, fate = Received(row, row[width + 1], attempts + 1), row[width]
        if _is_buried(window, message, fate):
            continue
        if attempts >= max_attempts:
            window.bury(message, "failed", lane.error)
        else:
            pending.append(message)
    window.add_parked(lane.name, lane.shard, pending)


def take_late(window: Window, rows: Iterable[tuple[Any, ...]]) -> None:
    """Put messages whose deliver_at has come into the window."""
    width = len(READ)
    for row in rows:
        message, fate = Received(row, row[width + 2]), row[width]
        if not _is_buried(window, message, fate):
            window.add_late(message, behind=row[width + 1])


def _is_buried(window: Window, message: Received, fate: int) -> bool:
    """Return whether a message can never be sent; if so, make it a dead letter."""
    if fate == EXPIRED:
        window.bury(message, "expired", dropped.EXPIRED)
    elif fate == UNREAD:
        window.bury(message, "over_size", None)
    else:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class DueLane:
    """A lane that is due."""

    name: str
    shard: int
    attempts: int
    """Attempts made at its first message."""
    error: str
    rows: list[tuple[Any, ...]]
    """The lane's first messages."""


def due_lanes(
    connection: psycopg.Connection[Any],
    reader: Reader,
    shards: Collection[int],
    in_memory: Collection[str],
    *,
    awaited: bool,
    limit: int,
    max_bytes: int,
) -> list[DueLane]:
    """Return due lanes that are not in memory.

    With ``awaited``, include lanes that wait for a receiver of dialogs' messages. Other lanes that
    wait for a handler are always due.
    """
    params = {
        **_of(reader),
        "shards": list(shards),
        "in_memory": list(in_memory),
        "awaited": awaited,
        "limit": limit,
    }
    found = fetch(connection, DUE, params)
    if not found:
        return []
    params |= {"lanes": [subject for subject, *_ in found], "bytes": max_bytes}
    # a lane without messages has an empty row; a lane that was not read has none
    rows: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row in _rows(connection, READ_LANES, params):
        rows[row[-2]] += [row] if row[ID] is not None else []
    return [
        DueLane(name=subject, shard=shard, attempts=attempts, error=error, rows=rows[place])
        for place, (subject, shard, attempts, error) in enumerate(found, start=1)
        if place in rows
    ]


def any_waits(connection: psycopg.Connection[Any], reader: Reader) -> bool:
    """Return whether a message waits for another attempt."""
    return bool(fetch(connection, ANY_WAITS, _of(reader))[0][0])


def due_late(
    connection: psycopg.Connection[Any],
    reader: Reader,
    shards: Collection[int],
    in_memory: Collection[int],
    *,
    limit: int,
    max_bytes: int,
) -> list[tuple[Any, ...]]:
    """Return rows of messages whose deliver_at has come, except the parked ids ``in_memory``."""
    params = {
        **_of(reader),
        "subjects": [str(shard) for shard in shards],
        "in_memory": list(in_memory),
        "limit": limit,
        "bytes": max_bytes,
    }
    return _rows(connection, READ_LATE, params)


def _of(reader: Reader) -> dict[str, Any]:
    return {
        "subscription_id": reader.subscription_id,
        "owner": reader.owner,
        "service": reader.service,
    }


def _rows(
    connection: psycopg.Connection[Any], query: str, params: dict[str, Any]
) -> list[tuple[Any, ...]]:
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        return cursor.execute(query, params, binary=True).fetchall()
