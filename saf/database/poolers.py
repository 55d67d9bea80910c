"""Poolers between a client and a server, such as PgBouncer: detected, then tolerated or refused.

A pooler in transaction mode gives each transaction any of the server's sessions. So a client must
leave nothing behind in a session: no setting, no lock, no LISTEN, and no prepared statement with a
name, which the next client would run in place of its own. A pooler in session mode keeps a client's
session, but a client cannot tell which mode a pooler is in.

- Sending and receiving leave nothing behind, and prepare nothing if there is a pooler.
- Everything else needs its own session and refuses any pooler: a forwarder, processors, a listener,
  and the commands, whose `saf.database.bounds` are set for a session.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import tuple_row

from saf.errors import ConfigurationError

if TYPE_CHECKING:
    Raw = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

WHO_ANSWERS = "SELECT pg_backend_pid()"


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Whether a pooler is in between: another process answers than was announced.

    A pooler that lends sessions invents the process number that it gives a client when connecting,
    which the client needs to cancel a query.
    """
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        row = cursor.execute(WHO_ANSWERS, prepare=False).fetchone()
    return row is not None and row[0] != connection.info.backend_pid


def refuse_pooler(connection: psycopg.Connection[Any]) -> None:
    """Raise unless the connection leads to the server itself.

    Raises:
        ConfigurationError: the connection leads to a pooler.
    """
    if is_pooled(connection):
        raise pooled(f"database {connection.info.dbname!r}")


def pooled(what: str) -> ConfigurationError:
    """Return the error for a pooler if ``what`` needs a session."""
    return ConfigurationError(
        f"{what} is reached through a connection pooler: forwarders, processors, listeners and "
        "commands need sessions of their own, so name the server itself. Only sending and "
        "receiving go through a pooler"
    )


@contextmanager
def unprepared(connection: Raw) -> Iterator[None]:
    """Create no named prepared statements during a block."""
    before, connection.prepare_threshold = connection.prepare_threshold, None
    try:
        yield
    finally:
        connection.prepare_threshold = before
