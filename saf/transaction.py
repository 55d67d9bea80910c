"""The caller's transaction, whichever library it is from.

``conn`` may be a SQLAlchemy Session or Connection (on any PostgreSQL driver), a psycopg connection
or cursor, or Django's ``connection``. Nothing here opens, commits or rolls back a transaction.
Connections under asyncio are in `saf.sending.asynchronous`.

Statements have psycopg's named parameters, each in a CAST, so that every driver understands them.
"""

from __future__ import annotations

import re
import shlex
import sys
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from saf.database import (
    HAS_SCHEMA,
    SCHEMA_REVISION,
    Meaning,
    backslashes,
    meaning,
    require_schema,
)
from saf.database.poolers import unprepared
from saf.errors import AutocommitError, ConfigurationError, UsageError

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.orm import Session, scoped_session

    Conn = (
        Session
        | scoped_session[Session]
        | sa.Connection
        | psycopg.Connection[Any]
        | psycopg.Cursor[Any]
    )


Rows = Sequence[tuple[Any, ...]]

EXPECTED = (
    "a SQLAlchemy Session or Connection, a psycopg connection or cursor, or Django's connection"
)
WHO_AND_WHERE = "SELECT current_database(), pg_backend_pid()"
SENDER_ALLOWED = "sender_allowed"
"""The constraint that a server names if no rule of saf.sender allows a message."""


class Known(Protocol):
    """What a connection says of itself, without asking its server."""

    pooled: bool
    """Whether a pooler may be in between, so that no statement is prepared under a name."""

    @property
    def user(self) -> str | None:
        """The role that has logged in; None if the driver does not say."""
        ...

    @property
    def database(self) -> object:
        """An object that identifies the database among those already checked."""
        ...

    @property
    def process(self) -> int | None:
        """The id of the server's process, as the client was told; None: the client was not told."""
        ...

    def commits_by_itself(self) -> bool:
        """Whether each statement would be a transaction of its own."""
        ...


class Transaction(Known, Protocol):
    """What saf needs of the caller's connection."""

    @property
    def below(self) -> psycopg.Connection[Any] | None:
        """The connection of psycopg that it is, or stands on; None for other drivers."""
        ...

    def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> None:
        """Run a statement that returns no rows."""
        ...

    def fetch(self, statement: str, params: Mapping[str, Any] | None = None) -> Rows:
        """Run a statement and return its rows."""
        ...


class Entrance:
    """Takes a caller's connection and gives its `Transaction`.

    It remembers which databases it has checked the schema of, so only the first transaction of
    each costs extra queries.

    Args:
        duty: the kind of role that may do what follows, for `saf grant --role`.
    """

    def __init__(self, duty: str = "dialog") -> None:
        self.duty = duty
        self._checked: dict[object, bool] = {}
        """By database, whether a pooler is in between."""

    def __call__(self, conn: object, *, allow_autocommit: bool = False) -> Transaction:
        """Return the caller's transaction.

        Raises:
            AutocommitError: the connection would commit each statement by itself.
            SchemaMissing, SchemaMismatch: the database is not a broker of this version.
            ConfigurationError: the role may not do this.
            UsageError: ``conn`` is not a connection, or it is closed.
        """
        transaction = _transaction(conn)
        if not allow_autocommit and transaction.commits_by_itself():
            raise AutocommitError
        pooled = self._checked.get(transaction.database)
        if pooled is None:
            pooled = self._checked_now(transaction)
        transaction.pooled = pooled
        return transaction

    def known(self, database: object) -> bool | None:
        """Whether a pooler is in between; None if the database has not been checked."""
        return self._checked.get(database)

    def check(self, transaction: Known) -> Generator[str, Rows, bool]:
        """Check a database by the rows of the queries that this yields; return as `known`.

        Whoever calls it runs the queries, in its own way: at once, or under asyncio.
        """
        # asks first whether the table exists: a failed query would abort the caller's transaction
        ((exists,),) = yield HAS_SCHEMA
        ((name, process),) = yield WHO_AND_WHERE
        found = (yield SCHEMA_REVISION) if exists else []
        require_schema(str(name), exists, found)
        pooled = self._checked[transaction.database] = transaction.process not in (None, process)
        return pooled

    def _checked_now(self, transaction: Transaction) -> bool:
        checking = self.check(transaction)
        query = next(checking)
        while True:
            try:
                rows = transaction.fetch(query)
            except Exception as error:
                self.refuse_without_right(error, transaction)
                raise
            try:
                query = checking.send(rows)
            except StopIteration as end:
                return bool(end.value)

    def refuse_without_right(self, error: Exception, transaction: Known) -> None:
        """Raise what helps, if the database has raised an error because a right is missing.

        Raises:
            ConfigurationError: with the command that grants it.
        """
        cause = getattr(error, "orig", None) or error
        state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        if meaning(state) is not Meaning.NO_RIGHT:
            return
        if refused := _sender_refused(cause):
            raise ConfigurationError(refused) from error
        user = transaction.user
        who = "this role" if user is None else f"role {user!r}"
        reason = " ".join(str(cause).split())
        raise ConfigurationError(
            f"{who} may not do this: {reason}. Let the owner of its schema saf run "
            f"`saf grant --role {self.duty} {'ROLE' if user is None else shlex.quote(user)}`"
        ) from error


def _sender_refused(cause: BaseException) -> str | None:
    """What the server says if no rule of saf.sender allows a message; else None."""
    # SQLAlchemy has an error of its own around asyncpg's
    for error in (cause, cause.__cause__):
        said: Any = getattr(error, "diag", error)
        if getattr(said, "constraint_name", None) == SENDER_ALLOWED:
            text = getattr(said, "message_primary", None) or getattr(said, "message", "")
            hint = getattr(said, "message_hint", None) or getattr(said, "hint", None)
            return f"{text}. {hint or ''}".strip()
    return None


enter = Entrance()
"""The entrance of the whole process."""


class OnPsycopg:
    """What a psycopg connection says of itself, asynchronous or not."""

    def __init__(self, connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
        if connection.closed:
            raise closed()
        self.connection = connection
        self.pooled = True

    @property
    def user(self) -> str | None:
        """The role that has logged in."""
        return self.connection.info.user

    @property
    def process(self) -> int | None:
        """The id of the server's process, as the client was told."""
        return self.connection.info.backend_pid

    @property
    def database(self) -> object:
        """An object that identifies the database."""
        info = self.connection.info
        return (info.host, info.port, info.dbname)

    def commits_by_itself(self) -> bool:
        """Whether each statement would be a transaction of its own."""
        return (
            self.connection.autocommit
            and self.connection.info.transaction_status == TransactionStatus.IDLE
        )

    @property
    def prepare(self) -> bool | None:
        """Whether to prepare statements under a name; None: let psycopg decide."""
        return False if self.pooled else None


class _Psycopg(OnPsycopg):
    connection: psycopg.Connection[Any]

    @property
    def below(self) -> psycopg.Connection[Any]:
        return self.connection

    def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> None:
        params = params and backslashes.in_arrays(self.connection, params)
        psycopg.Cursor(self.connection).execute(statement, params, prepare=self.prepare)

    def fetch(self, statement: str, params: Mapping[str, Any] | None = None) -> Rows:
        # a cursor of our own, because the caller's row factory may turn a row into anything
        with psycopg.Cursor(self.connection, row_factory=tuple_row) as cursor:
            return cursor.execute(statement, params, prepare=self.prepare).fetchall()


class _SQLAlchemy:
    def __init__(self, connection: sa.Connection) -> None:
        if connection.closed:
            raise closed()
        if connection.dialect.name != "postgresql":
            raise _not_postgresql(connection.dialect.name)
        self.connection = connection
        self.pooled = True

    @property
    def user(self) -> str | None:
        raw = self._psycopg
        return self.connection.engine.url.username if raw is None else raw.info.user

    @property
    def process(self) -> int | None:
        raw = self._psycopg
        return None if raw is None else raw.info.backend_pid

    @property
    def database(self) -> object:
        # weak, so that an engine per tenant does not live as long as the entrance
        return weakref.ref(self.connection.engine)

    def commits_by_itself(self) -> bool:
        raw = self.connection.connection.dbapi_connection
        return raw is not None and self.connection.dialect.detect_autocommit_setting(raw)

    @property
    def below(self) -> psycopg.Connection[Any] | None:
        raw = self._psycopg
        return raw if isinstance(raw, psycopg.Connection) else None

    def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> None:
        if params and (raw := self._psycopg) is not None:
            params = backslashes.in_arrays(raw, params)
        with self._unprepared():
            self.connection.execute(_text(statement), params)

    def fetch(self, statement: str, params: Mapping[str, Any] | None = None) -> Rows:
        with self._unprepared():
            return [tuple(row) for row in self.connection.execute(_text(statement), params)]

    @property
    def _psycopg(self) -> psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None:
        """The psycopg connection below; None for other drivers, which the caller sets up."""
        raw = self.connection.connection.driver_connection
        return raw if isinstance(raw, (psycopg.Connection, psycopg.AsyncConnection)) else None

    def _unprepared(self) -> AbstractContextManager[None]:
        raw = self._psycopg if self.pooled else None
        return nullcontext() if raw is None else unprepared(raw)


_texts: dict[str, sa.TextClause] = {}


def _text(statement: str) -> sa.TextClause:
    """Turn ``statement`` into one with SQLAlchemy's parameters, parsed once per process."""
    if statement not in _texts:
        import sqlalchemy as sa  # only where the caller uses it already

        _texts[statement] = sa.text(re.sub(r"%\((\w+)\)s", r":\1", statement))
    return _texts[statement]


def _transaction(conn: object) -> Transaction:
    if isinstance(conn, psycopg.Connection):
        return _Psycopg(conn)
    if isinstance(conn, psycopg.Cursor):
        return _Psycopg(conn.connection)
    # whoever hands over a Session has imported SQLAlchemy; others need not pay for the import
    if "sqlalchemy" in sys.modules:
        import sqlalchemy as sa
        import sqlalchemy.orm

        if isinstance(conn, (sqlalchemy.orm.Session, sqlalchemy.orm.scoped_session)):
            return _SQLAlchemy(conn.connection())
        if isinstance(conn, sa.Connection):
            return _SQLAlchemy(conn)
    if "django.db" in sys.modules and (below := _of_django(conn)) is not None:
        return _Psycopg(below)
    if is_asynchronous(conn):
        raise UsageError(
            f"{described(conn)} is of asyncio: say `await outbox.asend(…)` or "
            "`await outbox.asend_many(…)`; for other functions of saf, with SQLAlchemy, "
            "`await session.run_sync(function, …)`"
        )
    raise UsageError(f"cannot send on a {described(conn)}: expected {EXPECTED}")


def _of_django(conn: object) -> psycopg.Connection[Any] | None:
    """The psycopg connection below one of Django; None if it is not Django's."""
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.utils.connection import ConnectionProxy

    if isinstance(conn, ConnectionProxy):
        conn = conn._connections[conn._alias]
    if not isinstance(conn, BaseDatabaseWrapper):
        return None
    if conn.vendor != "postgresql":
        raise _not_postgresql(conn.vendor)
    conn.ensure_connection()
    if not isinstance(conn.connection, psycopg.Connection):
        raise UsageError(
            f"Django is connected by {described(conn.connection)}, and saf needs psycopg 3: "
            "pip install psycopg, which Django then prefers"
        )
    return conn.connection


def is_asynchronous(conn: object) -> bool:
    """Whether a connection is one of asyncio."""
    if isinstance(conn, (psycopg.AsyncConnection, psycopg.AsyncCursor)):
        return True
    if is_asyncpg(conn):
        return True
    if "sqlalchemy.ext.asyncio" not in sys.modules:
        return False
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    return isinstance(conn, (AsyncConnection, AsyncSession, async_scoped_session))


def is_asyncpg(conn: object) -> bool:
    """Whether a connection is one of asyncpg, or one that its pool lends."""
    # whoever hands over a connection has imported its driver
    if "asyncpg" not in sys.modules:
        return False
    import asyncpg
    from asyncpg.pool import PoolConnectionProxy

    return isinstance(conn, (asyncpg.Connection, PoolConnectionProxy))


def closed() -> UsageError:
    """The error for a connection that is closed."""
    return UsageError(
        "this connection is closed, so nothing was sent: send before it is closed, inside of the "
        "transaction, or open another one"
    )


def described(conn: object) -> str:
    """A thing by its class, for an error."""
    return f"{type(conn).__module__}.{type(conn).__qualname__}"


def _not_postgresql(name: str) -> UsageError:
    return UsageError(
        f"this connection is to {name}, and the outbox is a table in PostgreSQL: send on a "
        "connection to the PostgreSQL database that `saf migrate` was run on. To test without one, "
        "see the pytest plugin saf.testing"
    )
