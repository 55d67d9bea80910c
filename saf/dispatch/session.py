"""A session: one dispatcher at work, from the moment it joined until its connection is lost.

The database is asked in one thread of its own, one statement after the other; requests are in
flight meanwhile. A turn marks what the endpoint has answered, looks after the shards, and reads
ahead; it never waits for the endpoint. What was answered while marks were written is marked
together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import psycopg

from saf.dispatch import condition, marking, source, talking
from saf.dispatch.condition import Book
from saf.dispatch.http import Client
from saf.dispatch.progress import InHand
from saf.dispatch.sending import Sender
from saf.dispatch.settings import Endpoint
from saf.dispatch.window import Window
from saf.errors import Fenced
from saf.failpoints import fail_point
from saf.log.shards import Member
from saf.logger import Log
from saf.received import Received
from saf.receiving.hand import Reader
from saf.receiving.membership import Membership
from saf.receiving.summary import Summary

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.5
"""Pause between polls that find nothing; it doubles each time until a poll finds something."""

LOOK_SECONDS = 1.0
"""How often a dispatcher looks whether others have come or gone, and how its endpoint is."""

TRIM_SECONDS = 60.0

AHEAD = 20
"""How many messages are in memory for each request that may be in flight, at most `MOST`."""

MOST, MAX_BYTES = 5000, 64 << 20
"""How many messages, and how many bytes of them, are in memory; one of any size always may be."""

PART = 16
"""A shard has at most this part of the messages in memory, however many a key of it has."""

PROBE_SECONDS = 5.0
"""How much longer than its request a probe may take, before another dispatcher sends one."""

T = TypeVar("T")

log = Log("saf.dispatch")


class Session:
    """See the top of this module. It ends when it is told to stop, or drained, or raises."""

    def __init__(
        self,
        *,
        name: str,
        endpoint: Endpoint,
        reader: Reader,
        connection: psycopg.Connection[Any],
        membership: Membership,
        client: Client,
        thread: ThreadPoolExecutor,
        summary: Summary,
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.reader = reader
        self.window = Window()
        self.summary = summary
        self._connection = connection
        self._membership = membership
        self._member: Member = membership.member
        self._thread = thread
        self._news = asyncio.Event()
        self._book = Book(subscription_id=reader.subscription_id, endpoint=name)
        self.sender = Sender(
            self.window,
            self._book,
            endpoint,
            client,
            self._news.set,
            converses=reader.converses,
        )
        self._capacity = min(MOST, max(AHEAD * endpoint.max_in_flight, AHEAD * PART))
        self._look_at = self._poll_at = self._trim_at = 0.0
        self._pause = FIRST_PAUSE_SECONDS
        self._found = True
        """Whether there may be more to read than what the last poll has found."""

    async def run(self, stopping: asyncio.Event, *, drain: bool, stop_seconds: float) -> None:
        """Dispatch until told to stop; with ``drain``, until nothing is there and due.

        Raises:
            Fenced: others have taken over. Begin another session.
        """
        watch = asyncio.create_task(self._watch(stopping))
        try:
            while not stopping.is_set():
                await self._turn()
                if drain and self._drained:
                    break
                await self._wait()
            await self._end(stop_seconds)
        finally:
            watch.cancel()
            await self.sender.cancel()

    async def _watch(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self.sender.stopping = True
        self._news.set()

    @property
    def _drained(self) -> bool:
        window = self.window
        nothing_moves = not window.in_flight and not window.unmarked and not self.sender.to_write
        return nothing_moves and (
            not self.sender.condition.sends
            or (not self._found and not window.anything_ready and not self._unread())
        )

    @property
    def _hungry(self) -> bool:
        """Whether to read more: there are not twice as many keys as may be in flight."""
        window = self.window
        return (
            len(window.lanes) < 2 * self.endpoint.max_in_flight
            and window.held < self._capacity
            and window.bytes < MAX_BYTES // 2
        )

    # A turn

    async def _turn(self) -> None:
        if self.sender.failure is not None:
            raise self.sender.failure
        if self._membership.lost:
            raise Fenced(f"member {self._member.name}", [])
        talks, self.sender.talks = self.sender.talks, []
        await self._write()
        if talks:
            # what came of their dialogs before is written
            await self._talk(talks)
        if time.monotonic() >= self._look_at:
            await self._look()
            self._look_at = time.monotonic() + LOOK_SECONDS
        if self._hungry:
            await self._fill()
        self.sender.start()

    async def _write(self) -> None:
        """Write what came of requests."""
        writes, self.sender.to_write = self.sender.to_write, []
        for write in writes:
            await self._ask(write)
        marks = self.window.marks()
        if marks is None:
            return
        parked, buried = await self._ask(
            lambda connection: marking.mark(connection, self.reader, marks, self.endpoint.one_reply)
        )
        fail_point("dispatch_marked")
        self.window.written(marks)
        if (
            marks.succeeded
            or marks.waiting
            or marks.talked
            or any(one.closed for one in marks.cursors)
        ):
            # there may be more in these lanes, or since the batches were opened
            self._poll_at, self._found = 0.0, True
        self.summary.handled += marks.accepted
        self.summary.parked += parked
        self.summary.buried += buried
        self.sender.start()

    async def _talk(self, messages: list[Received]) -> None:
        """Send those messages of dialogs whose turn it is, and settle the others."""
        batches = {one.shard: self.window.shards[one.shard].batch for one in messages}
        found, bad = await self._ask(
            lambda connection: talking.look(
                connection, self.reader, batches, messages, self.sender.made
            )
        )
        for message in messages:
            if (what := found.get(message.message_id)) is not None:
                self.sender.talk(message, what)
        for message, error in bad:
            self.window.reject(message, "rejected", error)

    async def _look(self) -> None:
        """Look how the endpoint is, and take up shards or pass them on."""
        sender, number = self.sender, self.reader.subscription_id
        sender.hear(await self._ask(lambda connection: condition.condition(connection, number)))
        if not await self._ask(self._member.settled) or not self.window.shards:
            await self._balance()
        if time.monotonic() >= self._trim_at:
            self._trim_at = time.monotonic() + TRIM_SECONDS
            await self._ask(self._book.trim)
        if sender.condition.probe_due and sender.probe is None and self.window.anything_ready:
            seconds = self.endpoint.timeout_seconds + PROBE_SECONDS
            taken = await self._ask(lambda connection: self._book.probe(connection, seconds))
            if taken is not None:
                sender.send_probe()

    async def _balance(self) -> None:
        """Shards that are too many go as soon as nothing of them is in flight."""
        window = self.window
        surplus = max(0, -await self._ask(self._member.lacks))
        busy = window.busy()
        by_ease = sorted(
            window.shards, key=lambda one: (one not in window.leaving, one in busy, one)
        )
        window.leaving = frozenset(by_ease[:surplus])
        keep = set(window.shards) - (window.leaving - busy)
        await self._ask(lambda connection: self._member.balance(connection, keep=keep))
        window.own(await self._ask(lambda connection: source.owned(connection, self.reader)))
        if self.sender.bucket is not None:
            shards = await self._ask(source.all_shards)
            self.sender.bucket.share = len(window.shards) / shards
        if surplus == 0:
            window.leaving = frozenset()

    async def _fill(self) -> None:
        """Read ahead: what is due, and the next messages of the log."""
        window = self.window
        if not window.shards:
            return
        if time.monotonic() >= self._poll_at:
            self._found = await self._poll()
            self._pause = (
                FIRST_PAUSE_SECONDS if self._found else min(self._pause * 2, LONGEST_PAUSE_SECONDS)
            )
            self._poll_at = 0.0 if self._found else time.monotonic() + self._pause
        unread = self._unread()
        if not unread or not self._hungry:
            return
        # the window may change while the database is asked: what is asked is settled before
        limit, max_bytes = self._capacity - window.held, MAX_BYTES - window.bytes
        rows, whole = await self._ask(
            lambda connection: source.read(
                connection,
                self.reader,
                unread,
                each=self._capacity // PART,
                limit=limit,
                max_bytes=max_bytes,
            )
        )
        for shard in whole:
            window.shards[shard].whole = True
        source.take(window, rows)
        self._found = True

    async def _poll(self) -> bool:
        """Take what is due, and open batches of what is new; return whether there is anything."""
        window, reader = self.window, self.reader
        shards = [one for one in window.shards if one not in window.leaving]
        limits = {
            "limit": self.endpoint.max_in_flight,
            "max_bytes": (MAX_BYTES - window.bytes) // 2,
        }
        lanes, late = window.known_lanes, window.known_late
        due = await self._ask(
            lambda connection: source.due_lanes(
                connection, reader, shards, lanes, awaited=self.endpoint.reply, **limits
            )
        )
        for lane in due:
            if lane.rows and lane.attempts >= self.endpoint.attempts:
                log.error(
                    "dead_letter",
                    endpoint=self.name,
                    key=lane.name,
                    attempt=f"{lane.attempts} of {self.endpoint.attempts}",
                    error=lane.error,
                )
            source.take_lane(window, lane, self.endpoint.attempts)
        delayed = await self._ask(
            lambda connection: source.due_late(connection, reader, shards, late, **limits)
        )
        source.take_late(window, delayed)
        opened = await self._ask(lambda connection: source.open_batches(connection, reader))
        for batch in opened:
            window.shards[batch.shard].begin(batch)
        return bool(due or delayed or opened)

    def _unread(self) -> list[InHand]:
        """The shards with messages to read, those with the fewest in memory first."""
        window, most = self.window, self._capacity // PART
        return sorted(
            (
                hand
                for hand in window.shards.values()
                if hand.open is not None
                and not hand.whole
                and hand.shard not in window.leaving
                and len(hand.pending) < most
            ),
            key=lambda hand: len(hand.pending),
        )

    async def _wait(self) -> None:
        """Wait until a request has ended, or something is to be done."""
        if self.window.unmarked or self.sender.to_write or self.sender.talks:
            await asyncio.sleep(0)
            return
        hungry = self._hungry
        until = min(self._look_at, self._poll_at) if hungry else self._look_at
        seconds = until - time.monotonic()
        if seconds > 0 and not (hungry and self._unread()):
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._news.wait()

    async def _end(self, stop_seconds: float) -> None:
        """Wait for what is in flight, for so long; mark what has come of it."""
        requests = self.sender.requests
        self.sender.stopping = True
        until = time.monotonic() + stop_seconds
        while requests and time.monotonic() < until:
            await asyncio.wait(
                requests,
                timeout=until - time.monotonic(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            await self._write()
        await self._write()

    async def _ask(self, what: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Ask the database, in its own thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, what, self._connection)
