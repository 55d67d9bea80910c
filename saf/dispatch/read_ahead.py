"""Reading ahead: which messages of the inbox a dispatcher has in memory before it sends them.

There are enough of them that each request that ends is followed by the next, and no more: neither
many of one key or shard, nor many bytes. While nothing comes, polls are ever more seldom. Where the
inbox notifies, polls are more seldom still, because only what becomes due later needs them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import psycopg

from saf.dispatch import source
from saf.dispatch.progress import InHand
from saf.dispatch.settings import Endpoint
from saf.dispatch.window import Window
from saf.logger import Log
from saf.received import SHARD
from saf.receiving.hand import Reader

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.5
"""Pause between polls that find nothing; it doubles each time until a poll finds something."""

LISTENING_PAUSE_SECONDS = 2.0
"""The longest such pause where the inbox notifies."""

AHEAD = 20
"""How many messages are in memory for each request that may be in flight, at most `MOST`."""

MOST, MAX_BYTES = 5000, 64 << 20
"""How many messages, and how many bytes of them, are in memory; one of any size always may be."""

PART = 16
"""A shard has at most this part of the messages in memory, however many a key of it has."""

T = TypeVar("T")

log = Log("saf.dispatch")


class Ask(Protocol):
    """Asks the database."""

    def __call__(self, what: Callable[[psycopg.Connection[Any]], T], /) -> Awaitable[T]:
        """Return what a function of the connection returns."""


class ReadAhead:
    """Fills a window."""

    def __init__(
        self, window: Window, reader: Reader, endpoint: Endpoint, name: str, ask: Ask
    ) -> None:
        self.found = True
        """Whether there may be more to read than what the last poll has found."""
        self.listens = False
        """Whether the inbox notifies this session."""
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
        """Whether to read more: there are not twice as many keys as may be in flight, but rest.

        Without a shard there is nothing to read.
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
        """When to poll next, by the monotonic clock."""
        return 0.0 if self._notified else self._poll_at

    def look_again(self) -> None:
        """Poll at once: there may be more."""
        self._poll_at, self.found = 0.0, True

    def hear(self, _: object = None) -> None:
        """Note that something was stored in the inbox; called by whatever thread has heard it."""
        self._notified = True

    @property
    def _longest(self) -> float:
        return LISTENING_PAUSE_SECONDS if self.listens else LONGEST_PAUSE_SECONDS

    async def fill(self) -> None:
        """Read ahead, where it is hungry: what is due, and the next messages of the log."""
        window = self._window
        if time.monotonic() >= self.poll_at:
            self._notified = False  # what is notified from here on may be missed by this poll
            self.found = await self._poll()
            self._pause = FIRST_PAUSE_SECONDS if self.found else min(self._pause * 2, self._longest)
            self._poll_at = 0.0 if self.found else time.monotonic() + self._pause
        unread = self.unread()
        if not unread or not self.hungry:
            return
        # the window may change while the database is asked: what is asked is settled before
        limit, max_bytes = self._capacity - window.held, MAX_BYTES - window.bytes
        rows, whole = await self._ask(
            lambda connection: source.read(
                connection,
                self._reader,
                unread,
                each=self._capacity // PART,
                limit=limit,
                max_bytes=max_bytes,
            )
        )
        self._reads += 1
        for shard in whole | {row[SHARD] for row in rows}:
            window.shards[shard].turn = self._reads
        for shard in whole:
            window.shards[shard].whole = True
        source.take(window, rows)
        self.found = True

    async def _poll(self) -> bool:
        """Take what is due, and open batches of what is new; return whether there is anything."""
        window, reader = self._window, self._reader
        shards = [one for one in window.shards if one not in window.leaving]
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
            lambda connection: source.due_late(connection, reader, shards, late, **limits)
        )
        source.take_late(window, delayed)
        opened = await self._ask(lambda connection: source.open_batches(connection, reader))
        for batch in opened:
            window.shards[batch.shard].begin(batch)
        return bool(due or delayed or opened)

    def unread(self) -> list[InHand]:
        """The shards with messages to read; those first that have waited longest for a read.

        By what they have in memory, a backlog in some would keep the others waiting for ever.
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
