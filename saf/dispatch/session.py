"""A session: one dispatcher at work, from the moment it joined until its connection is lost.

The database is asked in one thread of its own, one statement after the other; requests are in
flight meanwhile. A turn marks what the endpoint has answered, looks after the shards, and reads
ahead; it never waits for the endpoint. What was answered while marks were written is marked
together.

At most ``max_in_flight`` requests are in flight, and as many messages may be answered and not
marked. So a dispatcher that is killed leaves no more than twice that many messages which the
endpoint gets again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import psycopg

from saf.dispatch import condition, envelope, marking, source
from saf.dispatch.answers import Answer, Meaning
from saf.dispatch.breaker import Breaker
from saf.dispatch.condition import Book, Condition
from saf.dispatch.http import Client
from saf.dispatch.settings import Endpoint
from saf.dispatch.window import Window
from saf.errors import Fenced
from saf.failpoints import fail_point
from saf.log.shards import Member
from saf.logger import Log
from saf.received import Received
from saf.receiving.claim import Reader
from saf.receiving.membership import Membership
from saf.receiving.retries import Waiting
from saf.receiving.summary import Summary
from saf.setaside.isolation import of_messages, said

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.5
"""Pause between polls that find nothing; it doubles each time until a poll finds something."""

LOOK_SECONDS = 1.0
"""How often a dispatcher looks whether others have come or gone, and how its endpoint is."""

TRIM_SECONDS = 60.0

AHEAD = 10
"""How many messages are read ahead for each request that may be in flight, at most `MOST`."""

MOST, MAX_BYTES = 5000, 32 << 20
"""How many messages, and how many bytes of them, are read ahead at once."""

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
        self.condition = Condition()
        self._connection = connection
        self._membership = membership
        self._member: Member = membership.member
        self._client = client
        self._thread = thread
        self._book = Book(subscription_id=reader.subscription_id, endpoint=name)
        self._breaker = Breaker[Waiting](threshold=endpoint.breaker_failures)
        self._capacity = min(MOST, AHEAD * endpoint.max_in_flight)
        self._requests: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._to_write: list[Callable[[psycopg.Connection[Any]], None]] = []
        self._probe: Received | None = None
        self._stopping = False
        self._look_at = self._poll_at = self._trim_at = 0.0
        self._pause = FIRST_PAUSE_SECONDS
        self._found = True
        """Whether there may be more to read than what the last poll has found."""
        self._failure: BaseException | None = None

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
            for request in self._requests:
                request.cancel()
            if self._requests:
                await asyncio.wait(self._requests)

    async def _watch(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._stopping = True
        self._news.set()

    @property
    def _drained(self) -> bool:
        window = self.window
        nothing_moves = not window.in_flight and not window.unmarked and not self._to_write
        return nothing_moves and (
            not self.condition.sends
            or (not self._found and not window.anything_ready and not self._unread())
        )

    # A turn

    async def _turn(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._membership.lost:
            raise Fenced(f"member {self._member.name}", [])
        await self._write()
        if time.monotonic() >= self._look_at:
            await self._look()
            self._look_at = time.monotonic() + LOOK_SECONDS
        if self.window.held <= self._capacity // 2:
            await self._fill()
        self._start()

    async def _write(self) -> None:
        """Write what came of requests."""
        writes, self._to_write = self._to_write, []
        for write in writes:
            await self._ask(write)
        marks = self.window.marks()
        if marks is None:
            return
        await self._ask(lambda connection: marking.mark(connection, self.reader, marks))
        fail_point("dispatch_marked")
        self.window.written(marks)
        if marks.succeeded or marks.waiting or any(one.closed for one in marks.cursors):
            # there may be more in these lanes, or since the batches were opened
            self._poll_at, self._found = 0.0, True
        self.summary.handled += marks.accepted
        self.summary.parked += len(marks.park)
        self.summary.buried += len(marks.bury) + len(marks.unreadable)
        self._start()

    async def _look(self) -> None:
        """Look how the endpoint is, and take up shards or pass them on."""
        found = await self._ask(
            lambda connection: condition.condition(connection, self.reader.subscription_id)
        )
        if not self._to_write:
            # otherwise this session knows better, and is about to say so
            if found.sends and not self.condition.sends:
                self._breaker.reset()
            self.condition = found
        if not await self._ask(self._member.settled) or not self.window.shards:
            await self._balance()
        if time.monotonic() >= self._trim_at:
            self._trim_at = time.monotonic() + TRIM_SECONDS
            await self._ask(self._book.trim)
        probe_in = self.condition.probe_in
        due = probe_in is not None and probe_in <= 0 and not self.condition.paused
        if due and self._probe is None and self.window.anything_ready:
            seconds = self.endpoint.timeout_seconds + PROBE_SECONDS
            taken = await self._ask(lambda connection: self._book.probe(connection, seconds))
            if taken is not None:
                self._send_probe()

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
        room = self._capacity - window.held
        if not unread or room <= 0:
            return
        rows, whole = await self._ask(
            lambda connection: source.read(connection, self.reader, unread, room, MAX_BYTES)
        )
        for shard in whole:
            window.shards[shard].whole = True
        source.take(window, rows)
        self._found = True

    async def _poll(self) -> bool:
        """Take what is due, and open batches of what is new; return whether there is anything."""
        window, reader = self.window, self.reader
        shards = [one for one in window.shards if one not in window.leaving]
        room = self._capacity - window.held
        lanes = await self._ask(
            lambda connection: source.due_lanes(
                connection, reader, shards, window.known_lanes, max(1, room // 2)
            )
        )
        for lane in lanes:
            source.take_lane(window, lane, self.endpoint.attempts)
        late = await self._ask(
            lambda connection: source.due_late(
                connection, reader, shards, window.known_late, max(1, room // 2)
            )
        )
        source.take_late(window, late)
        opened = await self._ask(lambda connection: source.open_batches(connection, reader, window))
        return bool(lanes or late or opened)

    def _unread(self) -> list[Any]:
        """The shards with messages to read, those with the fewest in memory first."""
        window = self.window
        return sorted(
            (
                hand
                for hand in window.shards.values()
                if hand.open is not None and not hand.whole and hand.shard not in window.leaving
            ),
            key=lambda hand: len(hand.pending),
        )

    async def _wait(self) -> None:
        """Wait until a request has ended, or something is to be done."""
        if self.window.unmarked or self._to_write:
            await asyncio.sleep(0)
            return
        hungry = self.window.held <= self._capacity // 2
        until = min(self._look_at, self._poll_at) if hungry else self._look_at
        seconds = until - time.monotonic()
        if seconds > 0 and not (hungry and self._unread()):
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._news.wait()

    async def _end(self, stop_seconds: float) -> None:
        """Wait for what is in flight, for so long; mark what has come of it."""
        self._stopping = True
        until = time.monotonic() + stop_seconds
        while self._requests and time.monotonic() < until:
            await asyncio.wait(
                self._requests,
                timeout=until - time.monotonic(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            await self._write()
        await self._write()

    async def _ask(self, what: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Ask the database, in its own thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, what, self._connection)

    # Requests

    def _start(self) -> None:
        """Send as many messages as may be in flight."""
        most = self.endpoint.max_in_flight
        window = self.window
        while (
            self.condition.sends
            and not self._stopping
            and window.in_flight < most
            and window.in_flight + window.unmarked < 2 * most
            and (message := window.next()) is not None
        ):
            self._send(message)

    def _send(self, message: Received) -> None:
        task = asyncio.create_task(self._request(message))
        self._requests.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._news.set()

    def _send_probe(self) -> None:
        message = self.window.next()
        if message is not None:
            self._probe = message
            self._send(message)

    async def _request(self, message: Received) -> None:
        """Send one message, and note what came of it."""
        try:
            request = envelope.request(message, self.endpoint)
        except Exception as error:
            if not of_messages(error):
                raise
            self.window.reject(message, "rejected", said(error))
            return
        answer = await self._client.post(request)
        fail_point("dispatch_answered")
        if message is self._probe:
            self._probe = None
            self._probed(message, answer)
        else:
            self._answered(message, answer)
        self._start()
        self._news.set()

    def _answered(self, message: Received, answer: Answer) -> None:
        if answer.meaning in (Meaning.DONE, Meaning.REJECTED):
            self.window.count(self._breaker.succeeded())
            self._accept_or_reject(message, answer)
            return
        self.window.note(message, answer)
        if not self.condition.sends:
            # it is known to be down: this says nothing new, and nothing of the message
            self.window.put_back(message)
        elif answer.meaning is Meaning.GONE:
            self._disable(message, answer)
        else:
            self._failed(message, answer)

    def _accept_or_reject(self, message: Received, answer: Answer) -> None:
        if answer.meaning is Meaning.DONE:
            self.window.done(message)
            return
        self.window.note(message, answer)
        self.window.reject(message, "rejected", answer.error)
        self._log(log.error, "dead_letter", message, answer)

    def _failed(self, message: Received, answer: Answer) -> None:
        """Let the message wait; its attempt counts once the endpoint is known to be up."""
        wait = max(self.endpoint.wait_seconds(message.attempt), answer.retry_after or 0.0)
        counted = Waiting(
            lane=message.lane,
            shard=message.shard,
            attempts=message.attempt,
            error=answer.error,
            # a message whose last attempt has failed is looked at again at once
            wait=0.0 if message.attempt >= self.endpoint.attempts else wait,
        )
        if self._breaker.failed(counted) or answer.retry_after is not None:
            self._breaker.reset()
            self.window.put_back(message)
            self._open(answer)
            return
        self.window.wait(message, replace(counted, attempts=message.attempt - 1, wait=wait))
        self._log(log.warning, "message_failed", message, answer, next_attempt=f"in {wait:g} s")

    def _open(self, answer: Answer) -> None:
        """The endpoint is down."""
        wait = max(self.endpoint.wait_seconds(1), answer.retry_after or 0.0)
        self.condition = Condition(
            state="open", paused=self.condition.paused, probe_in=wait, error=answer.error
        )
        self._to_write.append(lambda connection: self._book.down(connection, answer.error, wait))
        log.warning(
            "endpoint_down", endpoint=self.name, error=answer.error, next_attempt=f"in {wait:g} s"
        )

    def _disable(self, message: Received, answer: Answer) -> None:
        self.window.put_back(message)
        self.condition = Condition(state="disabled", error=answer.error)
        self._to_write.append(lambda connection: self._book.disable(connection, answer.error))
        log.error("endpoint_disabled", endpoint=self.name, error=answer.error)

    def _probed(self, message: Received, answer: Answer) -> None:
        """See from a probe whether the endpoint is up again."""
        if answer.meaning in (Meaning.DONE, Meaning.REJECTED):
            self._breaker.reset()
            self.condition = Condition(paused=self.condition.paused)
            self._to_write.append(self._book.up)
            log.info("endpoint_up", endpoint=self.name)
            self._accept_or_reject(message, answer)
            return
        self.window.note(message, answer)
        if answer.meaning is Meaning.GONE:
            self._disable(message, answer)
            return
        self.window.put_back(message)
        wait = max(
            self.endpoint.wait_seconds(self.condition.failures + 1), answer.retry_after or 0.0
        )
        longest = self.endpoint.disable_after_seconds
        self._to_write.append(
            lambda connection: self._book.still_down(connection, answer.error, wait, longest)
        )

    def _log(
        self,
        say: Callable[..., Any],
        event: str,
        message: Received,
        answer: Answer,
        **more: str,
    ) -> None:
        say(
            event,
            endpoint=self.name,
            message_id=str(message.message_id),
            key=message.key,
            message_type=message.message_type,
            attempt=f"{message.attempt} of {self.endpoint.attempts}",
            error=answer.error,
            **more,
        )
