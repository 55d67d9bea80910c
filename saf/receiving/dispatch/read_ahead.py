"""Reading ahead: the messages of the inbox that a dispatcher loads before it sends them.

A dispatcher loads just enough messages that each finished request is followed by the next: not many
of one key or shard, and not many bytes. While nothing arrives, polls become less frequent. If the
inbox notifies, polls are rarer still, because only messages that become due later need them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import psycopg

from saf.received import SHARD, Received
from saf.receiving import reading
from saf.receiving.dispatch import source
from saf.receiving.dispatch.progress import InHand
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.dispatch.window import Window
from saf.receiving.hand import Reader, outcome_of
from saf.receiving.reading import FATE_AT, PARKED_AT
from saf.telemetry.logger import Log

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.5
"""Pause between polls that find nothing; it doubles each time until a poll finds something."""

LISTENING_PAUSE_SECONDS = 2.0
"""Longest pause if the inbox notifies."""

AHEAD = 20
"""Messages in memory per request that may be in flight; at most `MOST` in total."""

MOST, MAX_BYTES = 5000, 64 << 20
"""Limits of messages and bytes in memory; one message of any size is always allowed."""

PART = 16
"""Divisor of the capacity: one shard holds at most this fraction, however large its backlog."""

T = TypeVar("T")

log = Log("saf.dispatch")


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
        self._pause = FIRST_PAUSE_SECONDS

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
            self._pause = FIRST_PAUSE_SECONDS if self.found else min(self._pause * 2, self._longest)
            self._poll_at = 0.0 if self.found else time.monotonic() + self._pause
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
            lambda connection: source.due_lanes(
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
            source.take_lane(window, lane, self._endpoint.attempts)
        delayed = await self._ask(
            lambda connection: reading.delayed(
                connection, reader, shards, in_memory=late, behind=True, **limits
            )
        )
        for row in delayed:
            message = Received(row, row[PARKED_AT])
            window.add(message, outcome_of(message, row[FATE_AT]))
        opened = await self._ask(lambda connection: source.open_batches(connection, reader))
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
