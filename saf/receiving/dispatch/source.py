"""The inbox as a dispatcher reads it: as a member that owns shards, ahead of their positions.

No transaction is open while the dispatcher waits for an endpoint. So each statement here stands
alone, and names its owner and epoch; `saf.receiving.dispatch.marking` writes results together.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from saf.database import fetch, of_broker
from saf.log.read import BEYOND
from saf.log.shards import NEWEST, THIS_ROW
from saf.received import Received
from saf.receiving import reading
from saf.receiving.claim import NEW
from saf.receiving.dispatch.progress import InHand
from saf.receiving.dispatch.window import Window, dead
from saf.receiving.hand import NO_IDS, Reader, outcome_of
from saf.receiving.reading import FATE_AT, PARKED_AT
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
       coalesce(d.ids::text, '{NO_IDS}')
FROM {NEWEST} AS c
{BEYOND}
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


def take_lane(window: Window, lane: DueLane, max_attempts: int) -> None:
    """Put the first messages of a due lane into the window.

    If the first message has used up its attempts, it is a dead letter.
    """
    if lane.name in window.lanes or lane.shard not in window.shards:
        return
    pending = []
    for number, row in enumerate(lane.rows):
        attempts = lane.attempts if number == 0 else 0
        message = Received(row, row[PARKED_AT], attempts + 1)
        outcome = outcome_of(message, row[FATE_AT])
        if outcome is None and attempts >= max_attempts:
            outcome = dead("failed", lane.error)
        if outcome is None:
            pending.append(message)
        else:
            window.add(message, outcome)
    window.add_parked(lane.name, lane.shard, pending)


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
    lanes = [subject for subject, *_ in found]
    rows = reading.of_lanes(connection, reader, lanes, LANE_MESSAGES, max_bytes)
    return [
        DueLane(name=subject, shard=shard, attempts=attempts, error=error, rows=rows[subject])
        for subject, shard, attempts, error in found
        if subject in rows
    ]


def any_waits(connection: psycopg.Connection[Any], reader: Reader) -> bool:
    """Return whether a message waits for another attempt."""
    return bool(fetch(connection, ANY_WAITS, _of(reader))[0][0])


def _of(reader: Reader) -> dict[str, Any]:
    return {
        "subscription_id": reader.subscription_id,
        "owner": reader.owner,
        "service": reader.service,
    }
