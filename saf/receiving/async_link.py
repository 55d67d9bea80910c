"""A link to receive on under asyncio.

``engine`` is one of

    a SQLAlchemy AsyncEngine on psycopg  ``delivery.connection`` is SQLAlchemy's AsyncConnection
    a dsn                                an `AsyncConnection`, opened for this block
    a callable                           a psycopg AsyncConnection, from ``async with engine() as
                                         connection``: ``connection`` of an AsyncConnectionPool

The receiver is the same as without asyncio. It runs in its own thread, on a synchronous connection
beside asyncio's: two psycopg objects share one session. They are never used at the same time,
because either the receiver or the application works, never both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from saf.database import Dsn
from saf.errors import UsageError
from saf.receiving.event_loop import EventLoop, in_thread
from saf.receiving.link import Link, as_it_was

if TYPE_CHECKING:
    from sqlalchemy.ext import asyncio as sqlalchemy_asyncio

    from saf.receiving.link import AsyncEngine, Engine

T = TypeVar("T")
Base = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
B = TypeVar("B", psycopg.Connection[Any], "AsyncConnection")


class AsyncConnection(psycopg.AsyncConnection[Any]):
    """psycopg's AsyncConnection over a session that saf has opened."""

    _beside: psycopg.Connection[Any]

    def __del__(self, *_: Any) -> None:
        """Do not warn: the code that opened the session closes it."""

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


@contextmanager
def aconnected(engine: Engine | AsyncEngine, loop: EventLoop) -> Iterator[Link]:
    """Open a connection to receive on. Call it outside the loop's thread.

    Raises:
        UsageError: ``engine`` does not provide an asyncio connection.
        Unavailable: the database does not answer.
    """
    if isinstance(engine, (str, Dsn)):
        dsn = Dsn(engine) if isinstance(engine, str) else engine
        with dsn.connect(role="receive", autocommit=True) as raw:
            wrapper = _over(raw, AsyncConnection)
            wrapper._beside = raw
            yield Link(
                connection=wrapper,
                raw=raw,
                begin=partial(_closed, raw, wrapper),
                lock_seconds=dsn.bounds.lock_seconds,
            )
        return
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
                    yield Link(connection=connection, raw=raw, begin=_begins(connection, loop))
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
            "cannot receive under asyncio from what this callable gives: expected an "
            f"AsyncConnection of psycopg by ``async with``, got a {type(given).__qualname__}"
        )
    with _entered(given, loop) as opened, _beside(opened) as raw:
        yield Link(connection=opened, raw=raw, begin=partial(_closed, raw, opened))


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


def _begins(connection: sqlalchemy_asyncio.AsyncConnection, loop: EventLoop) -> Callable[[], Any]:
    """Return a callable that begins a transaction of SQLAlchemy."""
    return lambda: _entered(connection.begin(), loop)


@contextmanager
def _closed(
    raw: psycopg.Connection[Any], connection: psycopg.AsyncConnection[Any]
) -> Iterator[None]:
    """Run a block in a transaction that ends with it; psycopg refuses to commit it earlier."""
    with raw.transaction():
        connection._num_transactions += 1
        try:
            yield
        finally:
            connection._num_transactions -= 1


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
    notify_handler = pgconn.notify_handler
    try:
        with as_it_was(beside := _over(connection, _Beside)):
            yield beside
    finally:
        pgconn.notify_handler = notify_handler


def _over(connection: Base, kind: type[B]) -> B:
    """Return another connection over the same session."""
    pgconn = connection.pgconn
    handlers = pgconn.notice_handler, pgconn.notify_handler
    other = kind(pgconn)
    # notices are for the application, and notifications for the receiver, if it listens
    if isinstance(connection, psycopg.AsyncConnection):
        pgconn.notice_handler = handlers[0]
    else:
        pgconn.notify_handler = handlers[1]
    other._autocommit = connection.autocommit
    other._isolation_level = connection.isolation_level
    # both share the prepared statements, so that no name is used twice
    other._prepared = connection._prepared
    return other
