"""Asking a database, and what its errors mean: lost, hanging, not allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.abc import QueryNoTemplate
from psycopg.rows import tuple_row

from saf.errors import ConfigurationError, Rejected, Unavailable


class NoAnswer(psycopg.OperationalError):
    """A server has said nothing for too long."""


HANGS = (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled, NoAnswer)
"""The database is there, and something holds up what was asked of it."""

LOST = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.TransactionTimeout,
)
"""The connection is not there any more, or what was asked over it did not come to its end."""

INCOMPLETE = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.InvalidSchemaName,
)
"""Something of the schema is not there any more."""

HANGING = frozenset({
    psycopg.errors.LockNotAvailable.sqlstate,
    psycopg.errors.QueryCanceled.sqlstate,
})  # fmt: skip


@contextmanager
def unavailable_if_lost(what: str) -> Iterator[None]:
    """Turn a lost connection into `Unavailable`; what a person has to mend, `ConfigurationError`.

    Other database errors pass through, and what exceeds a limit is `Rejected`.
    """
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise lacks_right(what, str(error)) from error
    except psycopg.errors.ReadOnlySqlTransaction as error:
        raise ConfigurationError(
            f"{what} is read-only: it is a standby, or default_transaction_read_only is on for "
            "this role or database. Name the primary in the dsn, or turn it off"
        ) from error
    except INCOMPLETE as error:
        raise ConfigurationError(
            f"{what}: its schema saf is not whole: {str(error).splitlines()[0]}. Restore what is "
            "missing from a backup; `saf migrate` does not create again what it had created"
        ) from error
    except LOST as error:
        reason = " ".join(str(error).split())
        if (error.sqlstate or "").startswith("54"):  # a limit: said of the rows
            raise Rejected(what, reason) from error
        raise Unavailable(what, reason, hangs=isinstance(error, HANGS)) from error


def lacks_right(what: str, reason: str) -> ConfigurationError:
    """The error for a login that may not do what it has to."""
    return ConfigurationError(
        f"{what} refuses this user: {' '.join(reason.split())}. Let the owner of its schema saf "
        "run `saf grant --role …` for the user"
    )


def fetch(
    connection: psycopg.Connection[Any],
    query: QueryNoTemplate,
    params: Mapping[str, Any] | None = None,
) -> list[tuple[Any, ...]]:
    """All rows as tuples, whatever row factory the connection's owner has chosen."""
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        return cursor.execute(query, params).fetchall()
