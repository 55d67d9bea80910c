"""The inbox as a dispatcher reads it: as a member that owns shards, ahead of their positions.

A dispatcher loads just enough messages that each finished request is followed by the next: not many
of one key or shard, and not many bytes. While nothing arrives, polls become less frequent. If the
inbox notifies, polls are rarer still, because only messages that become due later need them.

No transaction is open while the dispatcher waits for an endpoint. So each statement here stands
alone, and names its owner; `saf.receiving.dispatch.marking` writes results together.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeVar

import psycopg

from saf.database import fetch, of_broker
from saf.log.pauses import Pauses
from saf.log.read import BEYOND
from saf.log.shards import NEWEST, THIS_ROW
from saf.received import SHARD, Received
from saf.receiving import reading
from saf.receiving.claim import NEW
from saf.receiving.dispatch.progress import InHand
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.dispatch.window import Window, dead
from saf.receiving.hand import NO_IDS, Reader, outcome_of
from saf.receiving.reading import FATE_AT, PARKED_AT
from saf.setaside.lane import Kind
from saf.setaside.parking import BLOCKED
from saf.telemetry.logger import Log

T = TypeVar("T")

log = Log("saf.dispatch")

TALKS = "messages of dialogs are sent with reply = true only; or let a worker handle them"
"""Error of a lane that a dispatcher leaves to a worker."""

LANE_MESSAGES = 20
"""Number of messages of a due lane to read in one go."""

LONGEST_PAUSE_SECONDS = 0.5
"""Longest pause between polls that find nothing."""

LISTENING_PAUSE_SECONDS = 2.0
"""Longest pause if the inbox notifies."""

AHEAD = 20
"""Messages in memory per request that may be in flight; at most `MOST` in total."""

MOST, MAX_BYTES = 5000, 64 << 20
"""Limits of messages and bytes in memory; one message of any size is always allowed."""

PART = 16
"""Divisor of the capacity: one shard holds at most this fraction, however large its backlog."""

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
    fields = ("shard", "epoch", "batch", "done", "open", "position", "beyond")
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


class Ask(Protocol):
    """A call of the database."""

    def __call__(self, what: Callable[[psycopg.Connection[Any]], T], /) -> Awaitable[T]:
        """Return the result of a function of the connection."""


class ReadAhead:
    """Loads messages into a window."""

    def __init__(
        self, window: Window, reader: Reader, endpoint: Endpoint, name: str, ask: Ask
    ) -> None:
        self.found = True
        """True if there may be more to read than the last poll found."""
        self.listens = False
        """True if the inbox notifies this session."""
        self._notified = False
        self._poll_at = 0.0
        self._reads = 0
        self._window = window
        self._reader = reader
        self._endpoint = endpoint
        self._name = name
        self._ask = ask
        self._capacity = min(MOST, max(AHEAD * endpoint.max_in_flight, AHEAD * PART))
        self._pauses = Pauses()

    @property
    def hungry(self) -> bool:
        """True if more must be read: fewer active keys than twice the requests in flight.

        Keys that rest do not count. Without a shard there is nothing to read.
        """
        window = self._window
        return (
            bool(window.shards)
            and len(window.lanes) - window.resting < 2 * self._endpoint.max_in_flight
            and window.held < self._capacity
            and window.bytes < MAX_BYTES // 2
        )

    @property
    def poll_at(self) -> float:
        """Time of the next poll, by the monotonic clock."""
        return 0.0 if self._notified else self._poll_at

    def look_again(self) -> None:
        """Poll immediately: there may be more."""
        self._poll_at, self.found = 0.0, True
        self._pauses.end()

    def hear(self, _: object = None) -> None:
        """Note that a message was stored in the inbox; called by the thread that is notified."""
        self._notified = True

    @property
    def _longest(self) -> float:
        return LISTENING_PAUSE_SECONDS if self.listens else LONGEST_PAUSE_SECONDS

    async def fill(self) -> None:
        """Read ahead if hungry: due messages, and the next messages of the log."""
        window = self._window
        if time.monotonic() >= self.poll_at:
            self._notified = False  # this poll may miss later notifications
            self.found = await self._poll()
            if self.found:
                self.look_again()
            else:
                self._poll_at = time.monotonic() + self._pauses.next(self._longest)
        unread = self.unread()
        if not unread or not self.hungry:
            return
        # the window may change during the query: compute the arguments first
        places = [hand.place for hand in unread]
        limit, max_bytes = self._capacity - window.held, MAX_BYTES - window.bytes
        rows, whole = await self._ask(
            lambda connection: reading.next_messages(
                connection,
                self._reader,
                places,
                limit,
                each=self._capacity // PART,
                max_bytes=max_bytes,
                behind=True,
            )
        )
        self._reads += 1
        for shard in whole | {row[SHARD] for row in rows}:
            window.shards[shard].turn = self._reads
        for shard in whole:
            window.shards[shard].whole = True
        for row in rows:
            message = Received(row)
            window.add(message, outcome_of(message, row[FATE_AT]))
        self.found = True

    async def _poll(self) -> bool:
        """Take due messages, and open batches of new ones; return whether any were found."""
        window, reader = self._window, self._reader
        shards = [shard for shard in window.shards if shard not in window.leaving]
        limits = {
            "limit": self._endpoint.max_in_flight,
            "max_bytes": (MAX_BYTES - window.bytes) // 2,
        }
        lanes, late = window.known_lanes, window.known_late
        takes_all = self._endpoint.reply or not reader.converses
        due = await self._ask(
            lambda connection: due_lanes(
                connection, reader, shards, lanes, awaited=takes_all, **limits
            )
        )
        for lane in due:
            if lane.rows and lane.attempts >= self._endpoint.attempts:
                log.error(
                    "dead_letter",
                    endpoint=self._name,
                    key=lane.name,
                    attempt=f"{lane.attempts} of {self._endpoint.attempts}",
                    error=lane.error,
                )
            take_lane(window, lane, self._endpoint.attempts)
        delayed = await self._ask(
            lambda connection: reading.delayed(
                connection, reader, shards, in_memory=late, behind=True, **limits
            )
        )
        for row in delayed:
            message = Received(row, row[PARKED_AT])
            window.add(message, outcome_of(message, row[FATE_AT]))
        opened = await self._ask(lambda connection: open_batches(connection, reader))
        for batch in opened:
            window.shards[batch.shard].begin(batch)
        return bool(due or delayed or opened)

    def unread(self) -> list[InHand]:
        """Return the shards with messages to read, in the order of their last reads.

        If ordered by messages in memory, shards with a backlog would starve the others.
        """
        window, most = self._window, self._capacity // PART
        return sorted(
            (
                hand
                for hand in window.shards.values()
                if hand.open is not None
                and not hand.whole
                and hand.shard not in window.leaving
                and len(hand.pending) < most
            ),
            key=lambda hand: hand.turn,
        )
