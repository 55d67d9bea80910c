"""The caller's transaction, whichever library it is from.

``conn`` may be a SQLAlchemy Session or Connection (on any PostgreSQL driver), or a psycopg
connection or cursor. Nothing here opens, commits or rolls back a transaction.

Statements have psycopg's named parameters, each in a CAST, so that every driver understands them.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from saf.database import HAS_SCHEMA, SCHEMA_REVISION, require_revision
from saf.database.poolers import unprepared
from saf.errors import AutocommitError, UsageError

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


class Transaction(Protocol):
    """What saf needs of the caller's connection."""

    pooled: bool
    """Whether a pooler may be in between, so that no statement is prepared under a name."""

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

    def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> None:
        """Run a statement that returns no rows."""
        ...

    def fetch(
        self, statement: str, params: Mapping[str, Any] | None = None
    ) -> Sequence[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        ...


class Entrance:
    """Takes a caller's connection and gives its `Transaction`.

    It remembers which databases it has checked the schema of, so only the first transaction of
    each costs extra queries.
    """

    def __init__(self) -> None:
        self._checked: dict[object, bool] = {}
        """By database, whether a pooler is in between."""

    def __call__(self, conn: object, *, allow_autocommit: bool = False) -> Transaction:
        """Return the caller's transaction.

        Raises:
            AutocommitError: the connection would commit each statement by itself.
            SchemaMissing, SchemaMismatch: the database is not a broker of this version.
            UsageError: ``conn`` is not a connection.
        """
        transaction = _transaction(conn)
        if not allow_autocommit and transaction.commits_by_itself():
            raise AutocommitError
        database = transaction.database
        if database not in self._checked:
            # checks first whether the table exists: a failed query would abort the caller's
            # transaction
            ((exists,),) = transaction.fetch(HAS_SCHEMA)
            ((name, process),) = transaction.fetch("SELECT current_database(), pg_backend_pid()")
            found = transaction.fetch(SCHEMA_REVISION) if exists else []
            require_revision(str(name), found[0][0] if found else None)
            self._checked[database] = transaction.process not in (None, process)
        transaction.pooled = self._checked[database]
        return transaction


enter = Entrance()
"""The entrance of the whole process."""


class _Psycopg:
    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.pooled = True

    @property
    def process(self) -> int | None:
        return self.connection.info.backend_pid

    @property
    def database(self) -> object:
        info = self.connection.info
        return (info.host, info.port, info.dbname)

    def commits_by_itself(self) -> bool:
        return (
            self.connection.autocommit
            and self.connection.info.transaction_status == TransactionStatus.IDLE
        )

    def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> None:
        psycopg.Cursor(self.connection).execute(statement, params, prepare=self._prepare)

    def fetch(
        self, statement: str, params: Mapping[str, Any] | None = None
    ) -> Sequence[tuple[Any, ...]]:
        # a cursor of our own, because the caller's row factory may turn a row into anything
        with psycopg.Cursor(self.connection, row_factory=tuple_row) as cursor:
            return cursor.execute(statement, params, prepare=self._prepare).fetchall()

    @property
    def _prepare(self) -> bool | None:
        return False if self.pooled else None  # None: let psycopg decide


class _SQLAlchemy:
    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection
        self.pooled = True

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

    def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> None:
        with self._unprepared():
            self.connection.execute(_text(statement), params)

    def fetch(
        self, statement: str, params: Mapping[str, Any] | None = None
    ) -> Sequence[tuple[Any, ...]]:
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
    raise UsageError(
        f"cannot send on a {type(conn).__module__}.{type(conn).__qualname__}: expected a "
        "SQLAlchemy Session or Connection, or a psycopg connection or cursor"
    )
