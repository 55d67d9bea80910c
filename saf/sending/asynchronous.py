"""The caller's transaction under asyncio.

``conn`` may be SQLAlchemy's AsyncSession or AsyncConnection, on psycopg or asyncpg, psycopg's
AsyncConnection or AsyncCursor, or asyncpg's Connection. Checks and statements are those of
`saf.transaction`: SQLAlchemy runs a statement on its own connection; on a driver's connection, the
statement is awaited here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import psycopg
from psycopg.rows import tuple_row

from saf.database import pinned, queries
from saf.database.dsn import Place
from saf.errors import AutocommitError, UsageError
from saf.transaction import (
    Entrance,
    Known,
    OnPsycopg,
    Rows,
    closed,
    described,
    is_asyncpg,
    refuse_in_parts,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    AsyncConn: TypeAlias = (
        "AsyncSession | async_scoped_session[AsyncSession] | AsyncConnection"
        " | psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any] | AsyncpgConnection"
    )

    class _Transaction(Known, Protocol):
        async def execute(self, statement: str, params: Mapping[str, Any]) -> None: ...

        async def fetch(self, statement: str, params: Mapping[str, Any] | None = None) -> Rows: ...


AtOnce = Callable[..., Rows]


class AsyncpgConnection(Protocol):
    """asyncpg's Connection, or its pool's: methods that tell it from other connections.

    asyncpg has no types, so to a type checker any argument would be an asyncpg.Connection.
    """

    def is_closed(self) -> bool:
        """Return whether the connection is closed."""
        ...

    def is_in_transaction(self) -> bool:
        """Return whether the caller has begun a transaction."""
        ...

    def get_server_pid(self) -> int:
        """Return the process id of the session."""
        ...


class _AsyncPsycopg(OnPsycopg):
    connection: psycopg.AsyncConnection[Any]

    async def execute(self, statement: str, params: Mapping[str, Any]) -> None:
        cursor = psycopg.AsyncCursor(self.connection)
        params = queries.in_arrays(self.connection, params)
        await cursor.execute(statement, params, prepare=self.prepare)

    async def fetch(self, statement: str, params: Mapping[str, Any] | None = None) -> Rows:
        params = params and queries.in_arrays(self.connection, params)
        # a separate cursor, because the caller's row factory may turn a row into anything
        async with psycopg.AsyncCursor(self.connection, row_factory=tuple_row) as cursor:
            await cursor.execute(statement, params, prepare=self.prepare)
            return await cursor.fetchall()


class _Asyncpg:
    def __init__(self, connection: Any) -> None:
        if connection.is_closed():
            raise closed()
        self.connection = connection
        # the caller configures asyncpg for poolers when connecting: statement_cache_size=0
        self.pooled = True

    @property
    def user(self) -> str | None:
        return pinned.login(self.connection)[0]

    @property
    def database(self) -> object:
        return pinned.login(self.connection)[1:]

    @property
    def place(self) -> Place:
        _, address, database = pinned.login(self.connection)
        if isinstance(address, tuple):
            return (*address[:2], database)
        folder, _, port = str(address).rpartition("/.s.PGSQL.")  # a socket
        return (folder, port, database)

    @property
    def process(self) -> int | None:
        return int(self.connection.get_server_pid())

    def commits_by_itself(self) -> bool:
        return not self.connection.is_in_transaction()

    async def execute(self, statement: str, params: Mapping[str, Any]) -> None:
        numbered, names = _numbered(statement)
        await self.connection.execute(numbered, *(params[name] for name in names))

    async def fetch(self, statement: str, params: Mapping[str, Any] | None = None) -> Rows:
        numbered, names = _numbered(statement)
        values = [(params or {})[name] for name in names]
        return [tuple(row) for row in await self.connection.fetch(numbered, *values)]


@cache
def _numbered(statement: str) -> tuple[str, list[str]]:
    """Convert a statement to asyncpg's parameters; return their names, too.

    JSON is passed as text, because the caller may have set how asyncpg encodes JSON.

    >>> _numbered("SELECT CAST(%(a)s AS uuid), CAST(%(b)s AS jsonb)")
    ('SELECT CAST($1 AS uuid), CAST(CAST($2 AS text) AS jsonb)', ['a', 'b'])
    """
    names: list[str] = []

    def numbered(found: re.Match[str]) -> str:
        names.append(found["name"])
        number, type_ = f"${len(names)}", found["type"]
        if type_.startswith("jsonb"):
            number = f"CAST({number} AS {type_.replace('jsonb', 'text')})"
        return f"CAST({number} AS {type_})"

    return re.sub(r"CAST\(%\((?P<name>\w+)\)s AS (?P<type>[^()]+)\)", numbered, statement), names


async def execute(
    conn: object,
    statement: str,
    params: Sequence[Mapping[str, Any]],
    enter: Entrance,
    at_once: AtOnce,
    *,
    allow_autocommit: bool,
    returns: bool = False,
    done: str = "sent",
) -> Rows:
    """Run a statement in the caller's transaction, once or several times; return all its rows.

    Args:
        conn: the caller's connection.
        statement: a statement with psycopg's named parameters, each in a CAST.
        params: the parameters of each execution.
        enter: the entrance, which checks each database once.
        at_once: runs a statement on a synchronous connection.
        allow_autocommit: also accept a connection in autocommit.
        returns: whether the statement returns rows.
        done: what the statement does with a message.

    Raises:
        UsageError: ``conn`` is not an async connection, or it is closed.
    """
    if "sqlalchemy.ext.asyncio" in sys.modules:
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

        if isinstance(conn, async_scoped_session):
            conn = conn()
        if isinstance(conn, (AsyncConnection, AsyncSession)):
            return await conn.run_sync(at_once, statement, *params)
    transaction = _on_driver(conn)
    if not allow_autocommit and transaction.commits_by_itself():
        raise AutocommitError(done)
    refuse_in_parts(transaction, params)
    with enter.with_right(transaction):
        pooled = enter.known(transaction.database)
        if pooled is None:
            pooled = await _checked_now(transaction, enter)
        transaction.pooled = pooled
        found: list[tuple[Any, ...]] = []
        for row in params:
            if returns:
                found += await transaction.fetch(statement, row)
            else:
                await transaction.execute(statement, row)
        return found


def _on_driver(conn: object) -> _Transaction:
    if isinstance(conn, psycopg.AsyncCursor):
        conn = conn.connection
    if isinstance(conn, psycopg.AsyncConnection):
        return _AsyncPsycopg(conn)
    if is_asyncpg(conn):
        return _Asyncpg(conn)
    raise UsageError(
        f"cannot await a send on a {described(conn)}: expected SQLAlchemy's AsyncSession or "
        "AsyncConnection, psycopg's AsyncConnection or AsyncCursor, or a connection of asyncpg; "
        "without asyncio, use outbox.send, outbox.send_many, outbox.cancel or outbox.reschedule"
    )


async def _checked_now(transaction: _Transaction, enter: Entrance) -> bool:
    checking = enter.check(transaction)
    query = next(checking)
    while True:
        rows = await transaction.fetch(query)
        try:
            query = checking.send(rows)
        except StopIteration as end:
            return bool(end.value)
