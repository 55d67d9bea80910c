"""Poolers between us and a server, such as PgBouncer: recognised, borne or refused.

A pooler in transaction mode gives each transaction any of the server's sessions, so nothing may be
left behind in one: no setting, no lock, no LISTEN, and no statement prepared under a name, which
the next client would run in place of its own. One in session mode keeps a client's session, but a
client cannot tell which mode it is.

- What sends and receives leaves nothing behind, and prepares nothing where there is a pooler.
- What needs a session of its own refuses any pooler: a forwarder, processors, a listener, and the
  commands, whose `saf.database.bounds` hold for a session.
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
    """Whether a pooler stands between: another process answers than the one that was named.

    A pooler that lends sessions makes up the number that it tells a client at connecting, for its
    requests to cancel.
    """
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        row = cursor.execute(WHO_ANSWERS, prepare=False).fetchone()
    return row is not None and row[0] != connection.info.backend_pid


def refuse_pooler(connection: psycopg.Connection[Any]) -> None:
    """Raise unless the server itself is at the other end.

    Raises:
        ConfigurationError: a pooler is.
    """
    if is_pooled(connection):
        raise pooled(f"database {connection.info.dbname!r}")


def pooled(what: str) -> ConfigurationError:
    """The error for a pooler where a session is needed."""
    return ConfigurationError(
        f"{what} is reached through a connection pooler: forwarders, processors, listeners and "
        "commands need sessions of their own, so name the server itself. Only sending and "
        "receiving go through a pooler"
    )


@contextmanager
def unprepared(connection: Raw) -> Iterator[None]:
    """Meanwhile, nothing is prepared under a name."""
    before, connection.prepare_threshold = connection.prepare_threshold, None
    try:
        yield
    finally:
        connection.prepare_threshold = before
