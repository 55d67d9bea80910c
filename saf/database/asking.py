"""Asking a database, and the meaning of its errors: it is lost, it hangs, a right is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.abc import QueryNoTemplate
from psycopg.rows import tuple_row

from saf.database.sqlstates import Meaning, meaning, translated
from saf.errors import Rejected, RowsGone


class NoAnswer(psycopg.OperationalError):
    """The error for a server that has sent nothing for too long."""

    sqlstate = psycopg.errors.QueryCanceled.sqlstate
    """The SQLSTATE that the server would have sent if it had been able to."""


LOST = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.TransactionTimeout,
)
"""Errors of a connection that is gone, or of a query without a complete answer."""

DURABLY = "SET LOCAL synchronous_commit = on"
"""SQL that makes a transaction's commit wait for the disk, whatever the default."""

FOR_A_PERSON = (Meaning.NO_RIGHT, Meaning.READ_ONLY, Meaning.INCOMPLETE, Meaning.PUBLISHED)


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
    """Return all rows as tuples, whatever row factory the connection has."""
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
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
