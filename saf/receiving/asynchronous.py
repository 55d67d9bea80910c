"""Receiving under asyncio: messages in order, exactly once, in the consumer's own transaction.

    async with saf.areceive(engine, "billing", wait_seconds=5) as delivery:
        for message in delivery:
            await delivery.connection.execute(…)

``engine`` is one of

    a SQLAlchemy AsyncEngine on psycopg  ``delivery.connection`` is SQLAlchemy's AsyncConnection
    a dsn                                an `AsyncConnection`, opened for this block
    a callable                           a psycopg AsyncConnection, from ``async with engine() as
                                         connection``: ``connection`` of an AsyncConnectionPool

Other values raise `UsageError`, including a synchronous SQLAlchemy Engine.

The receiver is the same as without asyncio (`saf.receiving.receive`). It runs in its own thread
while the task awaits it, so the event loop never waits for a database. It works on a synchronous
connection beside asyncio's: two psycopg objects share one session (`aconnected`). They are never
used at the same time, because either the receiver or the application works, never both.

To await a handler or an asyncio connection, the receiver's thread submits a coroutine to an event
loop of another thread and waits for its result (`EventLoop`). The loop is the application's own if
it has one, and otherwise that of `saf.receiving.worker.own_loop`.

A task that is cancelled while it waits for messages gets none. A task that is cancelled inside the
block has failed, as with any other exception: everything is rolled back, and the messages are
delivered again.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from saf.database import Dsn, pinned
from saf.errors import UsageError
from saf.receiving.chosen import Which
from saf.receiving.delivery import Delivery
from saf.receiving.link import Link, as_it_was
from saf.receiving.receive import one_delivery
from saf.receiving.retries import Policy
from saf.signing.signer import Key, RequireSigned, Signer
from saf.signing.verifier import Trust
from saf.telemetry import tracing
from saf.transaction import of_django

if TYPE_CHECKING:
    from uuid import UUID

    from saf.dialogs.dialog import Dialog
    from saf.receiving.link import AsyncEngine, Engine

T = TypeVar("T")


@asynccontextmanager
async def areceive(
    engine: AsyncEngine,
    subscription: str,
    *,
    max_messages: int = 100,
    wait_seconds: float = 0.0,
    policy: Policy | None = None,
    require_signed: RequireSigned = False,
    keys: Mapping[str, Key] | None = None,
    signer: Signer | None = None,
    conversation: Dialog | UUID | None = None,
    group: Dialog | UUID | None = None,
) -> AsyncIterator[Delivery[Any]]:
    """Receive messages of a subscription under asyncio, in order and exactly once.

    Args:
        engine: where the inbox and the consumer's tables are: a SQLAlchemy AsyncEngine on psycopg,
            a dsn, or a callable that gives psycopg's AsyncConnections by ``async with``.
        subscription: the subscription to receive from; each service has a subscription of its own
            name.
        max_messages: the most messages in one delivery, which is one transaction.
        wait_seconds: how long to wait for the first message; after that, the delivery is empty.
        policy: how to treat messages whose handling fails.
        require_signed: hand out only messages that are signed with one of the ``keys``. "origin":
            their first senders have signed them, even if routing services have passed them on.
        keys: the keys that senders sign with; as for `saf.receive`.
        signer: signs what the receiver sends on the messages' dialogs.
        conversation: receive only the messages of this dialog's end; as for `saf.receive`.
        group: receive only the messages of the dialogs in this dialog's group.

    Raises:
        ConfigurationError, UsageError, DialogNotFound, SchemaMissing, SchemaMismatch, Restored,
        Unavailable: as `saf.receive`.
    """
    trust, which = Trust.of(keys, required=require_signed), Which.of(conversation, group)
    stopping = Event()
    with ThreadPoolExecutor(1, "saf areceive") as thread:

        async def step(call: Callable[..., T], *args: Any) -> tuple[T, BaseException | None]:
            """Run a call in the thread to its end; return this task's cancellation too, if any."""
            future = asyncio.get_running_loop().run_in_executor(thread, call, *args)
            cancelled = None
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError as error:
                    cancelled = error
                    stopping.set()
            return future.result(), cancelled

        receiving = one_delivery(
            aconnected(engine, EventLoop(asyncio.get_running_loop()), subscription),
            subscription,
            max_messages=max_messages,
            wait_seconds=wait_seconds,
            policy=policy,
            trust=trust,
            signer=signer,
            stopping=stopping,
            which=which,
        )
        delivery, cancelled = await step(receiving.__enter__)
        if cancelled is not None:
            await step(receiving.__exit__, type(cancelled), cancelled, None)
            raise cancelled
        try:
            with tracing.receiving(subscription, delivery):
                yield delivery
        except BaseException as error:
            suppressed, _ = await step(receiving.__exit__, type(error), error, error.__traceback__)
            if not suppressed:
                raise
        else:
            _, cancelled = await step(receiving.__exit__, None, None, None)
            if cancelled is not None:
                raise cancelled


@contextmanager
def aconnected(
    engine: Engine | AsyncEngine, loop: EventLoop, subscription: str = ""
) -> Iterator[Link]:
    """Open a connection to receive on, like `connected`. Call it outside the loop's thread.

    Raises:
        UsageError: ``engine`` does not provide an asyncio connection.
        Unavailable: the database does not answer.
    """
    if isinstance(engine, (str, Dsn)):
        dsn = Dsn(engine) if isinstance(engine, str) else engine
        with dsn.connect(role="receive", autocommit=True, subject=subscription) as raw:
            yield Link(
                connection=AsyncConnection(raw),
                raw=raw,
                begin=raw.transaction,
                lock_seconds=dsn.bounds.lock_seconds,
            )
        return
    if of_django(engine) is not None:
        raise UsageError(
            "async handlers cannot use Django's connection, which is not async: write them with "
            "def, or give the worker a dsn"
        )
    if "sqlalchemy" in sys.modules:
        import sqlalchemy as sa
        from sqlalchemy.ext import asyncio as asa

        if isinstance(engine, sa.Engine):
            raise UsageError(
                "cannot receive under asyncio from a SQLAlchemy Engine: make the engine by "
                "create_async_engine"
            )
        if isinstance(engine, asa.AsyncEngine):
            with _entered(engine.connect(), loop) as connection:
                below = loop.run(connection.get_raw_connection())
                with _beside(below.driver_connection) as raw:
                    begin = _begins(connection.begin, loop)
                    yield Link(connection=connection, raw=raw, begin=begin)
            return
    if not callable(engine):
        raise UsageError(
            f"cannot receive under asyncio from a "
            f"{type(engine).__module__}.{type(engine).__qualname__}: expected a SQLAlchemy "
            "AsyncEngine, a dsn, or a callable that gives psycopg's AsyncConnections"
        )
    given = engine()
    if not isinstance(given, AbstractAsyncContextManager):
        raise UsageError(
            "cannot receive under asyncio from the result of this callable: expected an "
            f"AsyncConnection of psycopg by ``async with``, got a {type(given).__qualname__}"
        )
    with _entered(given, loop) as opened, _beside(opened) as raw:
        yield Link(connection=opened, raw=raw, begin=_begins(opened.transaction, loop))


@contextmanager
def _entered(context: AbstractAsyncContextManager[T], loop: EventLoop) -> Iterator[T]:
    async def enter() -> T:
        return await context.__aenter__()

    async def leave(*raised: Any) -> bool | None:
        return await context.__aexit__(*raised)

    entered = loop.run(enter())
    try:
        yield entered
    except BaseException as error:
        if not loop.run(leave(type(error), error, error.__traceback__)):
            raise
    else:
        loop.run(leave(None, None, None))


def _begins(begin: Callable[[], Any], loop: EventLoop) -> Callable[[], Any]:
    """Return a callable that begins a transaction of the application's library."""
    return lambda: _entered(begin(), loop)


@contextmanager
def _beside(connection: object) -> Iterator[psycopg.Connection[Any]]:
    """Yield a synchronous connection over an asyncio connection's session, and restore it later."""
    if not isinstance(connection, psycopg.AsyncConnection):
        raise UsageError(
            "receiving needs psycopg 3, and this connection is a "
            f"{type(connection).__module__}.{type(connection).__qualname__}: create the engine "
            "with postgresql+psycopg://, or open psycopg's AsyncConnection"
        )
    pgconn = connection.pgconn
    notice_handler, notify_handler = pgconn.notice_handler, pgconn.notify_handler
    try:
        # notices are for the application, and notifications for the receiver, if it listens
        beside = _Beside(pgconn)
        pgconn.notice_handler = notice_handler
        if pgconn.transaction_status == TransactionStatus.IDLE:  # otherwise, `Link` refuses it
            beside.autocommit = connection.autocommit
            beside.isolation_level = connection.isolation_level
        pinned.share_prepared(connection, beside)
        with as_it_was(beside):
            yield beside
    finally:
        pgconn.notify_handler = notify_handler


class AsyncConnection(psycopg.AsyncConnection[Any]):
    """psycopg's AsyncConnection over a session that saf has opened."""

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        notify_handler = raw.pgconn.notify_handler
        super().__init__(raw.pgconn)
        raw.pgconn.notify_handler = notify_handler  # the receiver listens
        pinned.share_prepared(raw, self)
        self._beside = raw

    def __del__(self, *_: Any) -> None:
        """Do not warn: the code that opened the session closes it."""

    async def commit(self) -> None:
        """Refuse: the transaction is committed when the block ends."""
        raise psycopg.ProgrammingError(
            "Explicit commit() forbidden: the delivery's transaction is committed at its end"
        )

    async def rollback(self) -> None:
        """Refuse: an exception rolls the transaction back."""
        raise psycopg.ProgrammingError(
            "Explicit rollback() forbidden: an exception rolls the delivery's transaction back"
        )

    async def run_sync(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a function that takes a synchronous connection first, in the same transaction.

        Use it for other functions of saf: ``await connection.run_sync(dialog.send, body)``. If the
        task is cancelled, the call still runs to its end; then this raises CancelledError.
        """
        async with self.lock:
            return await in_thread(partial(call, self._beside, *args, **options))


class _Beside(psycopg.Connection[Any]):
    def __del__(self, *_: Any) -> None:
        """Do not warn: the code that opened the session closes it."""


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call in a thread. A cancelled caller waits until the call, which cannot stop, ends.

    The caller may have locked objects that the call uses.
    """
    context = contextvars.copy_context()
    running = asyncio.get_running_loop().run_in_executor(None, context.run, call)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()
        raise cancelled
    return running.result()


class EventLoop:
    """Runs coroutines in an event loop, for other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: set[asyncio.Task[Any]] = set()
        self._cancelled = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. Do not call this in the loop's own thread."""
        return asyncio.run_coroutine_threadsafe(self._noted(coroutine), self._loop).result()

    def call(self, calls: Sequence[Callable[[], Awaitable[object]]]) -> None:
        """Call handlers at the same time, each to its end; then raise the first error, if any.

        After `cancel`, this calls no handler and raises asyncio's CancelledError. CancelledError is
        not an Exception, so it counts as no handler's failure: it undoes the whole delivery.
        """

        async def unless_cancelled() -> None:
            self._refuse_if_cancelled()
            await all_of(calls)

        self._refuse_if_cancelled()
        # any Exception, because a handler may turn the cancellation into an error of its own
        try:
            self.run(unless_cancelled())
        except Exception:
            self._refuse_if_cancelled()
            raise

    def cancel(self) -> None:
        """Cancel the running coroutines; callers that wait for them wait until they have ended."""
        self._cancelled = True
        self._loop.call_soon_threadsafe(self._cancel)

    def end(self, seconds: float) -> None:
        """Cancel the running coroutines; wait up to ``seconds``. Not for the loop's own thread."""
        self.cancel()
        ended = asyncio.run_coroutine_threadsafe(self._ended(), self._loop)
        with suppress(TimeoutError):
            ended.result(seconds)
        ended.cancel()

    async def _ended(self) -> None:
        while self._running:
            await asyncio.wait([*self._running])

    async def _noted(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in a task
        self._running.add(task)
        try:
            return await coroutine
        finally:
            self._running.discard(task)

    def _refuse_if_cancelled(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError

    def _cancel(self) -> None:
        for task in self._running:
            task.cancel()


async def all_of(calls: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Run calls at the same time, each to its end; then raise the first error, if any."""

    async def one(call: Callable[[], Awaitable[object]]) -> None:
        await call()

    if len(calls) == 1:
        await calls[0]()
        return
    results = await asyncio.gather(*map(one, calls), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
