"""Queries to a database: their rows, the meaning of their errors, and the revision of the schema.

`fetch` returns tuples from any connection. `unavailable_if_lost` gives errors their meaning: the
database is lost, it hangs, a right is missing. Nothing is retried here.

Library and database must use the same tables, so `check_schema` requires the schema's revision to
be `REVISION`. It only reads: an error names the command that repairs the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.abc import QueryNoTemplate
from psycopg.rows import class_row, tuple_row

from saf.database.sqlstates import Meaning, meaning, translated
from saf.errors import Rejected, RowsGone, SchemaMismatch, SchemaMissing

T = TypeVar("T")

REVISION = "0038"
"""The Alembic revision of the schema that this library reads and writes."""
SCHEMA_REVISION = "SELECT version_num FROM saf.alembic_version"
# Not to_regclass: for a user without USAGE on the schema it fails, and with it the transaction.
# Two tables, because Alembic's may outlive saf's own.
HAS_SCHEMA = """
SELECT count(*) = 2
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'saf' AND c.relname IN ('alembic_version', 'broker')
"""

DURABLY = "SET LOCAL synchronous_commit = on"
"""SQL that makes a transaction's commit wait for the disk, whatever the default."""

FOR_A_PERSON = (Meaning.NO_RIGHT, Meaning.READ_ONLY, Meaning.INCOMPLETE, Meaning.PUBLISHED)
"""Meanings of errors that an operator must fix."""

LOST = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.TransactionTimeout,
)
"""Errors of a connection that is gone, or of a query without a complete answer."""


class NoAnswer(psycopg.OperationalError):
    """The error for a server that has sent nothing for too long."""

    sqlstate = psycopg.errors.QueryCanceled.sqlstate
    """The SQLSTATE that the server would have sent if it had been able to."""


@contextmanager
def unavailable_if_lost(what: str) -> Iterator[None]:
    """Turn a lost connection into `Unavailable`, an operator's problem into `ConfigurationError`.

    An exceeded limit of the server becomes `Rejected`. Other errors of the database pass through.
    ``what`` names the database in errors.
    """
    try:
        yield
    except psycopg.Error as error:
        kind = meaning(error.sqlstate)
        if kind not in FOR_A_PERSON and not isinstance(error, LOST):
            raise
        reason = str(error)
        if kind is Meaning.OF_THE_ROWS:  # a limit of the server
            raise Rejected(what, " ".join(reason.split())) from error
        if kind is Meaning.INCOMPLETE:
            reason = reason.splitlines()[0]
        raise translated(what, error.sqlstate, reason) from error


def fetch(
    connection: psycopg.Connection[Any],
    query: QueryNoTemplate,
    params: Mapping[str, Any] | None = None,
) -> list[tuple[Any, ...]]:
    """Return all rows as tuples; the connection may have any row factory."""
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        return cursor.execute(query, params).fetchall()


def records(
    connection: psycopg.Connection[Any],
    kind: type[T],
    query: QueryNoTemplate,
    params: Mapping[str, Any] | None = None,
) -> list[T]:
    """Return all rows as objects of a class, whose fields have the columns' names."""
    with psycopg.Cursor(connection, row_factory=class_row(kind)) as cursor:
        return cursor.execute(query, params).fetchall()


def of_broker(
    connection: psycopg.Connection[Any],
    query: QueryNoTemplate,
    params: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:
    """Return the row of a query of saf.broker.

    Raises:
        RowsGone: saf.broker has no row.
    """
    return the_row(fetch(connection, query, params), connection.info.dbname)


def the_row(found: Sequence[tuple[Any, ...]], database: str) -> tuple[Any, ...]:
    """Return the row that a query of saf.broker has found.

    Raises:
        RowsGone: saf.broker has no row.
    """
    if not found:
        raise RowsGone(database, ["saf.broker has no row"])
    return found[0]


def check_schema(connection: psycopg.Connection[Any]) -> None:
    """Check that the library and the database have the same schema.

    It first checks that the table exists, because a failed query would abort the caller's
    transaction.

    Raises:
        SchemaMissing, SchemaMismatch, RowsGone: the error names the command that repairs it.
    """
    ((exists,),) = fetch(connection, HAS_SCHEMA)
    found = fetch(connection, SCHEMA_REVISION) if exists else []
    require_schema(connection.info.dbname, exists, found)


def require_schema(database: str, exists: object, found: Sequence[Sequence[Any]]) -> None:
    """Raise unless ``database`` has the library's own revision.

    ``exists`` is the answer to `HAS_SCHEMA`, and ``found`` the rows of `SCHEMA_REVISION`.
    """
    if not exists:
        raise SchemaMissing(database)
    if not found:
        raise RowsGone(database, ["saf.alembic_version is empty"])
    ((revision,),) = found
    require_revision(database, revision)


def require_revision(database: str, found: str) -> None:
    """Raise unless ``found``, the revision read from ``database``, is the library's own."""
    if found != REVISION:
        raise SchemaMismatch(database, found, REVISION)
