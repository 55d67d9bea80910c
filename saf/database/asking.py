"""Asking a database, and what its errors mean: lost, hanging, not allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.abc import QueryNoTemplate
from psycopg.rows import tuple_row

from saf.database.sqlstates import Meaning, meaning, translated
from saf.errors import Rejected


class NoAnswer(psycopg.OperationalError):
    """A server has said nothing for too long."""

    sqlstate = psycopg.errors.QueryCanceled.sqlstate
    """What the server would have said, had it been able to."""


LOST = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.TransactionTimeout,
)
"""The connection is not there any more, or what was asked over it did not come to its end."""

FOR_A_PERSON = (Meaning.NO_RIGHT, Meaning.READ_ONLY, Meaning.INCOMPLETE)


@contextmanager
def unavailable_if_lost(what: str) -> Iterator[None]:
    """Turn a lost connection into `Unavailable`; what a person has to mend, `ConfigurationError`.

    Other database errors pass through, and what exceeds a limit is `Rejected`.
    """
    try:
        yield
    except psycopg.Error as error:
        said = meaning(error.sqlstate)
        if said not in FOR_A_PERSON and not isinstance(error, LOST):
            raise
        reason = str(error)
        if said is Meaning.OF_THE_ROWS:  # a limit
            raise Rejected(what, " ".join(reason.split())) from error
        if said is Meaning.INCOMPLETE:
            reason = reason.splitlines()[0]
        raise translated(what, error.sqlstate, reason) from error


def fetch(
    connection: psycopg.Connection[Any],
    query: QueryNoTemplate,
    params: Mapping[str, Any] | None = None,
) -> list[tuple[Any, ...]]:
    """All rows as tuples, whatever row factory the connection's owner has chosen."""
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        return cursor.execute(query, params).fetchall()
