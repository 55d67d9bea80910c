"""The caller's psycopg connection as one of SQLAlchemy's, inside the caller's transaction.

Alembic runs on SQLAlchemy. An application with a bare psycopg connection, or with Django's, can
migrate in its own transaction: SQLAlchemy neither configures the connection, nor ends its
transaction, nor closes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg.rows import tuple_row
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from saf.database.dsn import unprepared

DRIVER = "saf_borrowed"


class Borrowing(PGDialect_psycopg):
    """psycopg's dialect, which leaves a connection and its transaction to the caller."""

    supports_statement_cache = True

    def on_connect(self) -> None:
        """Change no setting of the connection."""

    def do_commit(self, dbapi_connection: object) -> None:
        """Leave the commit to the caller."""

    def do_rollback(self, dbapi_connection: object) -> None:
        """Leave the rollback to the caller."""

    def do_close(self, dbapi_connection: object) -> None:
        """Leave the connection open."""

    def do_terminate(self, dbapi_connection: object) -> None:
        """Leave the connection open."""


sa.dialects.registry.register(f"postgresql.{DRIVER}", __name__, Borrowing.__name__)


@contextmanager
def borrowed(connection: psycopg.Connection[Any]) -> Iterator[sa.Connection]:
    """Lend a psycopg connection to SQLAlchemy for a block; the caller ends the transaction."""
    engine = sa.create_engine(
        f"postgresql+{DRIVER}://",
        creator=lambda: connection,
        poolclass=sa.pool.StaticPool,
        use_native_hstore=False,
    )
    # the caller's factories may turn a row into anything
    factories = connection.row_factory, connection.cursor_factory
    connection.row_factory, connection.cursor_factory = tuple_row, psycopg.Cursor
    try:
        with unprepared(connection), engine.connect() as lent:
            yield lent
    finally:
        connection.row_factory, connection.cursor_factory = factories
