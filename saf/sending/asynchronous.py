"""The caller's transaction under asyncio.

``conn`` may be an AsyncSession or AsyncConnection of SQLAlchemy, on psycopg or asyncpg, or an
AsyncConnection or AsyncCursor of psycopg. What is checked, and how a statement is run, is
`saf.transaction`'s: SQLAlchemy runs it on its own connection, and here it is awaited on psycopg's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import tuple_row

from saf.errors import AutocommitError, UsageError
from saf.transaction import Entrance, OnPsycopg, Rows, described

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    AsyncConn = (
        AsyncSession
        | async_scoped_session[AsyncSession]
        | AsyncConnection
        | psycopg.AsyncConnection[Any]
        | psycopg.AsyncCursor[Any]
    )

Execute = Callable[[Any, str, Mapping[str, Any]], None]


class _AsyncPsycopg(OnPsycopg):
    connection: psycopg.AsyncConnection[Any]

    async def execute(self, statement: str, params: Mapping[str, Any]) -> None:
        cursor = psycopg.AsyncCursor(self.connection)
        await cursor.execute(statement, params, prepare=self.prepare)

    async def fetch(self, statement: str) -> Rows:
        # a cursor of our own, because the caller's row factory may turn a row into anything
        async with psycopg.AsyncCursor(self.connection, row_factory=tuple_row) as cursor:
            await cursor.execute(statement, prepare=self.prepare)
            return await cursor.fetchall()


async def execute(
    conn: object,
    statement: str,
    params: Mapping[str, Any],
    enter: Entrance,
    at_once: Execute,
    *,
    allow_autocommit: bool,
) -> None:
    """Run a statement in the caller's transaction.

    Args:
        conn: the caller's connection.
        statement: what to run; it returns no rows.
        params: its parameters.
        enter: the entrance, which checks each database once.
        at_once: runs a statement on a connection that is not of asyncio.
        allow_autocommit: also on a connection that commits by itself.

    Raises:
        UsageError: ``conn`` is not a connection of asyncio, or it is closed.
    """
    if isinstance(conn, psycopg.AsyncCursor):
        conn = conn.connection
    if isinstance(conn, psycopg.AsyncConnection):
        await _on_psycopg(conn, statement, params, enter, allow_autocommit=allow_autocommit)
        return
    if "sqlalchemy.ext.asyncio" in sys.modules:
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

        if isinstance(conn, async_scoped_session):
            conn = conn()
        if isinstance(conn, (AsyncConnection, AsyncSession)):
            await conn.run_sync(at_once, statement, params)
            return
    raise UsageError(
        f"cannot await a send on a {described(conn)}: expected SQLAlchemy's AsyncSession or "
        "AsyncConnection, on psycopg or asyncpg, or psycopg's AsyncConnection or AsyncCursor; "
        "without asyncio, say outbox.send or outbox.send_many"
    )


async def _on_psycopg(
    conn: psycopg.AsyncConnection[Any],
    statement: str,
    params: Mapping[str, Any],
    enter: Entrance,
    *,
    allow_autocommit: bool,
) -> None:
    transaction = _AsyncPsycopg(conn)
    if not allow_autocommit and transaction.commits_by_itself():
        raise AutocommitError
    try:
        pooled = enter.known(transaction.database)
        if pooled is None:
            pooled = await _checked_now(transaction, enter)
        transaction.pooled = pooled
        await transaction.execute(statement, params)
    except psycopg.Error as error:
        enter.refuse_without_right(error, transaction)
        raise


async def _checked_now(transaction: _AsyncPsycopg, enter: Entrance) -> bool:
    checking = enter.check(transaction)
    query = next(checking)
    while True:
        rows = await transaction.fetch(query)
        try:
            query = checking.send(rows)
        except StopIteration as end:
            return bool(end.value)
