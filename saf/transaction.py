"""The caller's transaction, from any supported library.

``conn`` may be a SQLAlchemy Session or Connection (on any PostgreSQL driver), a psycopg connection
or cursor, or Django's ``connection``. Nothing here opens, commits or rolls back a transaction.
Connections under asyncio are in `saf.sending.asynchronous`.

A Session may have several engines, and then a connection to each. Only one of these connections
has the rows that a message belongs to, and each commits separately. So the transaction of a Session
that sends must have one connection, or be committed in two phases. Anything else is rejected, also
later in the transaction. A caller that passes the connection itself has made the choice.

Statements have psycopg's named parameters, each in a CAST, so that every driver understands them.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from saf.database import (
    HAS_SCHEMA,
    SCHEMA_REVISION,
    Meaning,
    meaning,
    pinned,
    queries,
    reason_of,
    require_schema,
)
from saf.database.dsn import Place, grant_command, place_of, unprepared
from saf.errors import AutocommitError, ConfigurationError, InvalidMessage, RowsGone, UsageError

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.orm import Session, SessionTransaction, scoped_session

    Conn: TypeAlias = (
        "Session | scoped_session[Session] | sa.Connection | psycopg.Connection[Any]"
        " | psycopg.Cursor[Any] | DjangoConnection"
    )


Rows = Sequence[tuple[Any, ...]]

EXPECTED = (
    "a SQLAlchemy Session or Connection, a psycopg connection or cursor, or Django's connection"
)
THE_CONNECTION = (
    "pass the connection of the rows that the message belongs to, for example "
    "session.connection(bind_arguments={'mapper': Order}) or "
    "session.connection(bind_arguments={'bind': engine})"
)
"""Advice for a Session that has several engines."""
# Reading a table's size needs no right on the table: a sender may not read saf.broker. The size is
# 0 after a TRUNCATE, and in a copy of the schema alone.
WHO_AND_WHERE = """SELECT current_database(), pg_backend_pid(),
       coalesce(sum(pg_relation_size(c.oid)), 1) = 0
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'saf' AND c.relname = 'broker'
"""
LARGEST_STATEMENT = 256 * 1024 * 1024
"""Most bytes of bodies and headers in one INSERT, unless a single message has more. A server takes
less than 1 GB, and a body written out as text takes twice its size."""

SENDER_ALLOWED = "sender_allowed"
"""Constraint that a server names if no rule of saf.sender allows a message."""
ARGUMENTS = ("argument_valid", "name_taken")
"""Constraints that a server names, with the argument as the column, if it rejects an argument."""


class DjangoConnection(Protocol):
    """Django's ``connection``, or one of ``connections``: the properties that type checkers see."""

    alias: str
    vendor: str
    in_atomic_block: bool
    run_on_commit: list[Any]

    def ensure_connection(self) -> None:
        """Connect, unless connected."""
        ...

    def validate_no_broken_transaction(self) -> None:
        """Raise if the transaction would be rolled back at its end."""
        ...

    def set_rollback(self, rollback: bool) -> None:
        """Choose whether the transaction is rolled back at its end."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Known(Protocol):
    """Properties of a connection that are known without asking its server."""

    pooled: bool
    """True if a pooler may be in between, so that no statement is prepared under a name."""

    @property
    def user(self) -> str | None:
        """The role that has logged in; None if the driver does not tell."""
        ...

    @property
    def database(self) -> object:
        """An object that identifies the database among those already checked."""
        ...

    @property
    def place(self) -> Place:
        """Where the database is, as far as the client knows."""
        ...

    @property
    def process(self) -> int | None:
        """Id of the server's process, as reported to the client; None if it was not reported."""
        ...

    def commits_by_itself(self) -> bool:
        """Return whether each statement would be a transaction of its own."""
        ...


class Transaction(Known, Protocol):
    """Operations that saf needs on the caller's connection."""

    @property
    def below(self) -> psycopg.Connection[Any] | None:
        """The psycopg connection itself, or beneath it; None for other drivers."""
        ...

    def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> None:
        """Run a statement that returns no rows."""
        ...

    def fetch(self, statement: str, params: Mapping[str, Any] | None = None) -> Rows:
        """Run a statement and return its rows."""
        ...


class Entrance:
    """Turns a caller's connection into its `Transaction`.

    It remembers the databases whose schema it has checked, so only the first transaction of each
    costs extra queries.

    Args:
        duty: the kind of role that may do the work, for `saf grant --role`.
        sends: only statements of senders are run, which also work at the schema's next revision.
    """

    def __init__(self, duty: str = "dialog", *, sends: bool = False) -> None:
        self.duty = duty
        self.sends = sends
        self._checked: dict[object, bool] = {}
        """By database, whether a pooler is in between."""

    def __call__(
        self, conn: object, *, allow_autocommit: bool = False, done: str = "sent"
    ) -> Transaction:
        """Return the caller's transaction; ``done`` says what the caller does with a message.

        Raises:
            AutocommitError: the connection would commit each statement separately.
            SchemaMissing, SchemaMismatch: the database is not a broker of this version.
            ConfigurationError: the role lacks a right.
            UsageError: ``conn`` is not a connection, or it is closed.
        """
        transaction = of_caller(conn)
        if not allow_autocommit and transaction.commits_by_itself():
            raise AutocommitError(done)
        pooled = self._checked.get(transaction.database)
        if pooled is None:
            pooled = self._checked_now(transaction)
        transaction.pooled = pooled
        return transaction

    def known(self, database: object) -> bool | None:
        """Return whether a pooler is in between; None if the database has not been checked."""
        return self._checked.get(database)

    def check(self, transaction: Known) -> Generator[str, Rows, bool]:
        """Check a database by the rows of the queries that this yields; return as `known`.

        The caller runs the queries in its own way: synchronously, or under asyncio.
        """
        # first ask whether the table exists: a failed query would abort the caller's transaction
        ((exists,),) = yield HAS_SCHEMA
        ((name, process, is_empty),) = yield WHO_AND_WHERE
        found = (yield SCHEMA_REVISION) if exists else []
        require_schema(str(name), exists, found, sends=self.sends)
        if is_empty:
            raise RowsGone(str(name), ["saf.broker is empty"])
        pooled = self._checked[transaction.database] = transaction.process not in (None, process)
        return pooled

    def _checked_now(self, transaction: Transaction) -> bool:
        checking = self.check(transaction)
        query = next(checking)
        while True:
            with self.with_right(transaction):
                rows = transaction.fetch(query)
            try:
                query = checking.send(rows)
            except StopIteration as end:
                return bool(end.value)

    @contextmanager
    def with_right(self, transaction: Known) -> Iterator[None]:
        """Raise a helpful error if the database rejects this block's message or role.

        Raises:
            ConfigurationError: a right is missing; names the command that grants it.
            InvalidMessage: the database rejects an argument of a sender.
        """
        try:
            yield
        except Exception as error:
            _refuse_argument(error)
            self._refuse_without_right(error, transaction)
            raise

    def _refuse_without_right(self, error: Exception, transaction: Known) -> None:
        cause = getattr(error, "orig", None) or error
        state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        if meaning(state) is not Meaning.NO_RIGHT:
            return
        if refused := _sender_refused(cause):
            raise ConfigurationError(refused) from error
        user = transaction.user
        role = "this role" if user is None else f"role {user!r}"
        raise ConfigurationError(
            f"{role} may not do this: {reason_of(cause)}. Let the owner of its schema saf run "
            f"`{grant_command(self.duty, user, transaction.place)}`"
        ) from error


def refuse_in_parts(transaction: Known, statements: Sequence[object]) -> None:
    """Reject several statements where each would be a transaction of its own.

    Raises:
        InvalidMessage: explains the alternatives; nothing is written.
    """
    if len(statements) > 1 and transaction.commits_by_itself():
        raise InvalidMessage(
            "messages",
            f"more than {LARGEST_STATEMENT:,} bytes need several statements, and this connection "
            "commits each separately: open a transaction, or send fewer messages",
        )


def _refuse_argument(error: Exception) -> None:
    """Raise the server's text if it rejects an argument, such as a name that is taken.

    Raises:
        InvalidMessage: names the argument.
    """
    for source in _reports(getattr(error, "orig", None) or error):
        if getattr(source, "constraint_name", None) in ARGUMENTS:
            field = str(source.column_name)
            raise InvalidMessage(field, _text_of(source).removeprefix(f"{field}: ")) from error


def _sender_refused(cause: BaseException) -> str | None:
    """Return the server's text if no rule of saf.sender allows a message; else None."""
    for source in _reports(cause):
        if getattr(source, "constraint_name", None) == SENDER_ALLOWED:
            hint = getattr(source, "message_hint", None) or getattr(source, "hint", None)
            return f"{_text_of(source)}. {hint or ''}".strip()
    return None


def _reports(cause: BaseException) -> list[Any]:
    """Return the objects that may have the fields of a server's error, by driver."""
    # SQLAlchemy wraps asyncpg's error in its own
    return [getattr(error, "diag", error) for error in (cause, cause.__cause__)]


def _text_of(source: Any) -> str:
    return str(getattr(source, "message_primary", None) or getattr(source, "message", ""))


enter = Entrance()
"""The entrance of the whole process."""


class OnPsycopg:
    """The `Known` properties of a psycopg connection, asynchronous or not."""

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
        """Id of the server's process, as reported to the client."""
        return self.connection.info.backend_pid

    @property
    def database(self) -> object:
        """An object that identifies the database."""
        return self.place

    @property
    def place(self) -> Place:
        """Where the database is."""
        return place_of(self.connection)

    def commits_by_itself(self) -> bool:
        """Return whether each statement would be a transaction of its own."""
        return (
            self.connection.autocommit
            and self.connection.info.transaction_status == TransactionStatus.IDLE
        )

    @property
    def prepare(self) -> bool | None:
        """False to prepare no statement under a name; None lets psycopg decide."""
        return False if self.pooled else None


class _Psycopg(OnPsycopg):
    connection: psycopg.Connection[Any]

    @property
    def below(self) -> psycopg.Connection[Any]:
        return self.connection

    def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> None:
        params = params and queries.in_arrays(self.connection, params)
        psycopg.Cursor(self.connection).execute(statement, params, prepare=self.prepare)

    def fetch(self, statement: str, params: Mapping[str, Any] | None = None) -> Rows:
        given = params and queries.in_arrays(self.connection, params)
        # a separate cursor, because the caller's row factory may turn a row into anything
        with psycopg.Cursor(self.connection, row_factory=tuple_row) as cursor:
            return cursor.execute(statement, given, prepare=self.prepare).fetchall()


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

    @property
    def place(self) -> Place:
        if (raw := self._psycopg) is not None:
            return place_of(raw)
        url = self.connection.engine.url
        return (url.host, url.port, url.database)

    def commits_by_itself(self) -> bool:
        raw = self.connection.connection.dbapi_connection
        return raw is not None and self.connection.dialect.detect_autocommit_setting(raw)

    @property
    def below(self) -> psycopg.Connection[Any] | None:
        raw = self._psycopg
        return raw if isinstance(raw, psycopg.Connection) else None

    def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> None:
        if params and (raw := self._psycopg) is not None:
            params = queries.in_arrays(raw, params)
        with self._unprepared():
            self.connection.execute(_text(statement), params)

    def fetch(self, statement: str, params: Mapping[str, Any] | None = None) -> Rows:
        if params and (raw := self._psycopg) is not None:
            params = queries.in_arrays(raw, params)
        with self._unprepared():
            return [tuple(row) for row in self.connection.execute(_text(statement), params)]

    @property
    def _psycopg(self) -> psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None:
        """The psycopg connection beneath; None for other drivers, which the caller configures."""
        raw = self.connection.connection.driver_connection
        return raw if isinstance(raw, (psycopg.Connection, psycopg.AsyncConnection)) else None

    def _unprepared(self) -> AbstractContextManager[None]:
        raw = self._psycopg if self.pooled else None
        return nullcontext() if raw is None else unprepared(raw)


_sent_on: weakref.WeakKeyDictionary[SessionTransaction, sa.Connection] = weakref.WeakKeyDictionary()
"""The connection of each Session's transaction that has sent; a second connection is rejected."""


def _only_connection(session: Session) -> sa.Connection:
    """Return the connection of a Session's transaction, and forbid a second one."""
    from sqlalchemy.exc import UnboundExecutionError

    try:
        connection = session.connection()
    except UnboundExecutionError as error:
        raise UsageError(f"this session has no default engine: {THE_CONNECTION}") from error
    transaction = session.get_transaction()
    if transaction is not None and not session.twophase:
        _watch_sessions()
        for core in pinned.connections_of(transaction):
            if core is not connection:
                raise _two_connections(connection, core)
        _sent_on[transaction] = connection
    return connection


@cache
def _watch_sessions() -> None:
    """Have SQLAlchemy report each connection that any Session begins to use."""
    import sqlalchemy as sa
    from sqlalchemy.orm import Session

    sa.event.listen(Session, "after_begin", _refuse_second)


def _refuse_second(session: Session, _: SessionTransaction, connection: sa.Connection) -> None:
    """Raise, before any commit, if a transaction that has sent uses another engine."""
    transaction = session.get_transaction()
    sent_on = None if transaction is None else _sent_on.get(transaction)
    if sent_on is not None and sent_on is not connection:
        raise _two_connections(sent_on, connection)


def _two_connections(sent_on: sa.Connection, other: sa.Connection) -> UsageError:
    names = [f"database {one.engine.url.database or 'unknown'!r}" for one in (sent_on, other)]
    return UsageError(
        f"this session's transaction has two connections: a message goes to {names[0]} on the "
        f"session's default engine, and {names[1]} is used on another engine, which commits "
        f"separately. {THE_CONNECTION[0].upper()}{THE_CONNECTION[1:]}; or make the session with "
        "twophase=True"
    )


_texts: dict[str, sa.TextClause] = {}


def _text(statement: str) -> sa.TextClause:
    """Convert ``statement`` to SQLAlchemy's parameters, parsed once per process."""
    if statement not in _texts:
        import sqlalchemy as sa  # only where the caller already uses it

        _texts[statement] = sa.text(re.sub(r"%\((\w+)\)s", r":\1", statement))
    return _texts[statement]


def of_caller(conn: object) -> _Psycopg | _SQLAlchemy:
    """Return the transaction of a caller's connection, without a check of the schema.

    Raises:
        UsageError: ``conn`` is not a connection, or it is closed.
    """
    if isinstance(conn, psycopg.Connection):
        return _Psycopg(conn)
    if isinstance(conn, psycopg.Cursor):
        return _Psycopg(conn.connection)
    # a caller that passes a Session has imported SQLAlchemy; others need not pay for the import
    if "sqlalchemy" in sys.modules:
        import sqlalchemy as sa
        import sqlalchemy.orm

        if isinstance(conn, (sqlalchemy.orm.Session, sqlalchemy.orm.scoped_session)):
            session = conn
            if isinstance(session, sqlalchemy.orm.scoped_session):
                session = session.registry()
            return _SQLAlchemy(_only_connection(session))
        if isinstance(conn, sa.Connection):
            return _SQLAlchemy(conn)
    if (django := of_django(conn)) is not None:
        return _Psycopg(below_django(django))
    if is_asynchronous(conn):
        raise UsageError(
            f"{described(conn)} is an async connection: use `await outbox.asend(…)`, "
            "`asend_many`, `acancel` or `areschedule`; for other functions of saf, with "
            "SQLAlchemy, `await session.run_sync(function, …)`"
        )
    raise UsageError(f"cannot use a {described(conn)}: expected {EXPECTED}")


def of_django(conn: object) -> DjangoConnection | None:
    """Return Django's own object for its ``connection``; None if ``conn`` is not Django's.

    Raises:
        UsageError: the connection is not to PostgreSQL.
    """
    # a caller that passes Django's connection has imported Django
    if "django.db" not in sys.modules:
        return None
    from django.db import connections
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.utils.connection import ConnectionProxy

    if isinstance(conn, ConnectionProxy) and hasattr(conn, "alias"):
        conn = connections[conn.alias]
    if not isinstance(conn, BaseDatabaseWrapper):
        return None
    if conn.vendor != "postgresql":
        raise _not_postgresql(conn.vendor)
    return conn


def below_django(conn: Any) -> psycopg.Connection[Any]:
    """Return the psycopg connection beneath a Django connection, which is opened if necessary."""
    conn.ensure_connection()
    if not isinstance(conn.connection, psycopg.Connection):
        raise UsageError(
            f"Django uses {described(conn.connection)}, and saf needs psycopg 3: "
            "pip install psycopg, which Django then prefers"
        )
    return conn.connection


def is_asynchronous(conn: object) -> bool:
    """Return whether a connection is for asyncio."""
    if isinstance(conn, (psycopg.AsyncConnection, psycopg.AsyncCursor)):
        return True
    if is_asyncpg(conn):
        return True
    if "sqlalchemy.ext.asyncio" not in sys.modules:
        return False
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    return isinstance(conn, (AsyncConnection, AsyncSession, async_scoped_session))


def is_asyncpg(conn: object) -> bool:
    """Return whether a connection is asyncpg's, or a proxy from its pool."""
    # a caller that passes a connection has imported its driver
    if "asyncpg" not in sys.modules:
        return False
    import asyncpg
    from asyncpg.pool import PoolConnectionProxy

    return isinstance(conn, (asyncpg.Connection, PoolConnectionProxy))


def closed() -> UsageError:
    """Return the error for a closed connection."""
    return UsageError(
        "this connection is closed, so nothing was sent: send before it is closed, inside of the "
        "transaction, or open another one"
    )


def described(conn: object) -> str:
    """Return the name of an object's class, for an error."""
    return f"{type(conn).__module__}.{type(conn).__qualname__}"


def _not_postgresql(name: str) -> UsageError:
    return UsageError(
        f"this connection is to {name}, and the outbox is a table in PostgreSQL: send on a "
        "connection to the PostgreSQL database that `saf migrate` was run on. To test without one, "
        "see the pytest plugin saf.testing"
    )
