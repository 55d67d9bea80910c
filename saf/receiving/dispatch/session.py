"""A session: one dispatcher at work, from joining until its connection is lost.

The database is queried in a thread of its own, one statement after the other, while requests are in
flight. A turn marks the answered messages, maintains the shards, and reads ahead; it never waits
for the endpoint. Answers that arrive while marks are being written are marked together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import psycopg

from saf.errors import EndpointRemoved, Fenced
from saf.failpoints import fail_point
from saf.log.shards import Member
from saf.outbox import Outbox
from saf.receiving import link
from saf.receiving.dispatch import marking, replies, source, talking
from saf.receiving.dispatch.condition import Book
from saf.receiving.dispatch.http import Client
from saf.receiving.dispatch.judging import Judge
from saf.receiving.dispatch.read_ahead import ReadAhead
from saf.receiving.dispatch.sending import Sender
from saf.receiving.dispatch.settings import Endpoint, StoredEndpoint
from saf.receiving.dispatch.walk import State, Walk
from saf.receiving.dispatch.window import Window
from saf.receiving.hand import Reader
from saf.receiving.membership import Membership
from saf.receiving.summary import Summary
from saf.telemetry.logger import Log

LOOK_SECONDS = 1.0
"""Interval at which a dispatcher checks its endpoint's condition and other members."""

TRIM_SECONDS = 60.0

PROBE_SECONDS = 5.0
"""Extra time for a probe beyond its request's timeout, until another dispatcher sends one."""

T = TypeVar("T")

log = Log("saf.dispatch")


class Session:
    """A dispatcher at work; see the module's docstring. Ends on a stop, a drain or an error."""

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
        self._outbox = Outbox(max_bytes=replies.MOST, signer=reader.signer)
        self._membership = membership
        self._member: Member = membership.member
        self._thread = thread
        self._news = asyncio.Event()
        url = endpoint.url if isinstance(endpoint, StoredEndpoint) else None
        self._book = Book(subscription_id=reader.subscription_id, endpoint=name, url=url)
        self.judge = Judge(self.window, self._book, endpoint, converses=reader.converses)
        self.sender = Sender(self.window, self.judge, endpoint, client, self._news.set)
        self._ahead = ReadAhead(self.window, reader, endpoint, name, self._ask)
        connection.add_notify_handler(self._ahead.hear)
        self._look_at = self._trim_at = 0.0
        self._spare = False
        """True if this member has no shard and needs none, because others have all shards."""

    async def run(self, stopping: asyncio.Event, *, drain: bool, stop_seconds: float) -> None:
        """Dispatch until told to stop; with ``drain``, until no message is due.

        Raises:
            Fenced: others have taken over. Begin another session.
            EndpointRemoved: the endpoint was stored in a broker, and has been removed.
        """
        watch = asyncio.create_task(self._watch(stopping))
        try:
            while not stopping.is_set() and not self.judge.condition.removed:
                await self._turn()
                if drain and self._drained:
                    break
                await self._wait()
            await self._end(stop_seconds)
            if self.judge.condition.removed:
                raise EndpointRemoved(self.name)
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
        if window.in_flight or window.unmarked or self.judge.to_write:
            return False
        condition = self.judge.condition
        if not condition.sends and not condition.probe_due:
            return True
        if not window.shards:
            return self._spare
        return not (
            self._ahead.found or window.anything_ready or window.resting or self._ahead.unread()
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
            # earlier results of their dialogs are written by now
            await self._talk(talks)
        is_due = time.monotonic() >= self._look_at
        if is_due:
            await self._look()
            self._look_at = time.monotonic() + LOOK_SECONDS
        if self._ahead.hungry:
            await self._ahead.fill()
        if is_due:
            # a drain's first turn has no probe to send before it has read
            await self._probe()
        self.sender.start()

    async def _write(self) -> None:
        """Write the results of requests."""
        writes, self.judge.to_write = self.judge.to_write, []
        for write in writes:
            await self._ask(write)
        marks = self.window.marks()
        if marks is None:
            return
        parked, buried = await self._ask(
            lambda connection: marking.mark(
                connection, self.reader, marks, self._outbox, self.endpoint.one_reply
            )
        )
        fail_point("dispatch_marked")
        self.window.written(marks)
        if (
            marks.succeeded
            or marks.waiting
            or marks.of(State.RECEIVED)
            or any(cursor.closed for cursor in marks.cursors)
        ):
            # there may be more messages in these lanes, or since the batches were opened
            self._ahead.look_again()
        self.summary.handled += marks.accepted
        self.summary.parked += parked
        self.summary.buried += buried
        self.sender.start()

    async def _talk(self, walks: list[Walk]) -> None:
        """Send the dialog messages whose turn it is, and settle the others."""
        messages = [walk.message for walk in walks]
        batches = {entry.shard: self.window.shards[entry.shard].batch for entry in messages}
        found, bad = await self._ask(
            lambda connection: talking.look(
                connection, self.reader, batches, messages, self.sender.made
            )
        )
        errors = dict(bad)
        for walk in walks:
            if (content := found.get(walk.message.message_id)) is not None:
                self.sender.talk(walk, content)
            else:
                self.sender.reject(walk, errors[walk.message])

    async def _look(self) -> None:
        """Check the endpoint's condition, and take over shards or pass them on."""
        self.judge.hear(await self._ask(self._book.look))
        self.sender.clock = await self._ask(source.clock)
        # the reason why shards must leave may disappear, and nothing else reports that
        leaving = bool(self.window.leaving) or not self.window.shards
        if leaving or not await self._ask(self._member.settled):
            await self._balance()
        if time.monotonic() >= self._trim_at:
            self._trim_at = time.monotonic() + TRIM_SECONDS
            await self._ask(self._book.trim)
            self._ahead.listens = await self._ask(link.listen_if_it_notifies)

    async def _probe(self) -> None:
        """Send a probe if one is due and no other dispatcher has taken it."""
        sender, condition = self.sender, self.judge.condition
        if not condition.probe_due or sender.probe is not None or not self.window.anything_ready:
            return
        seconds = self.endpoint.timeout_seconds + PROBE_SECONDS
        self.judge.condition = replace(condition, probe_in=seconds)  # taken, by this or another one
        claim = await self._ask(lambda connection: self._book.probe(connection, seconds))
        if claim is not None:
            sender.send_probe()

    async def _balance(self) -> None:
        """Release surplus shards as soon as none of their messages is in flight."""
        window = self.window
        surplus = max(0, -await self._ask(self._member.lacks))
        busy = window.busy()
        by_ease = sorted(
            window.shards, key=lambda shard: (shard not in window.leaving, shard in busy, shard)
        )
        window.leaving = frozenset(by_ease[:surplus])
        kept = set(window.shards) - (window.leaving - busy)
        await self._ask(lambda connection: self._member.balance(connection, keep=kept))
        window.own(await self._ask(lambda connection: source.owned(connection, self.reader)))
        if self.sender.bucket is not None:
            shards = await self._ask(source.all_shards)
            self.sender.bucket.share = len(window.shards) / shards
        self._spare = not window.shards and await self._ask(self._member.settled)

    async def _wait(self) -> None:
        """Wait until a request has ended, or there is work to do."""
        if self.window.unmarked or self.judge.to_write or self.sender.talks:
            await asyncio.sleep(0)
            return
        ahead = self._ahead
        has_room = ahead.hungry
        deadline = min(self._look_at, ahead.poll_at) if has_room else self._look_at
        seconds = deadline - time.monotonic()
        if seconds > 0 and not (has_room and ahead.unread()):
            self._news.clear()
            with suppress(TimeoutError), self._listening(has_room):
                async with asyncio.timeout(seconds):
                    await self._news.wait()

    @contextmanager
    def _listening(self, hungry: bool) -> Iterator[None]:
        """Listen for notifications of the inbox during a block, which must not query the database.

        The following poll takes a notification that arrives now off the connection; the handler
        gets notifications that arrive with a statement's answer.
        """
        if not (self._ahead.listens and hungry):
            yield
            return
        loop, connection = asyncio.get_running_loop(), self._connection.fileno()

        def notified() -> None:
            loop.remove_reader(connection)
            self._ahead.hear()
            self._news.set()

        loop.add_reader(connection, notified)
        try:
            yield
        finally:
            loop.remove_reader(connection)

    async def _end(self, stop_seconds: float) -> None:
        """Wait up to ``stop_seconds`` for requests in flight; mark their results."""
        requests = self.sender.requests
        self.sender.stopping = True
        deadline = time.monotonic() + stop_seconds
        while requests and time.monotonic() < deadline:
            await asyncio.wait(
                requests,
                timeout=deadline - time.monotonic(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            await self._write()
        await self._write()

    async def _ask(self, query: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Call the database in its own thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, query, self._connection)
