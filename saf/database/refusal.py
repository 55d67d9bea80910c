"""Why a running server refuses a connection, and what to do about it.

A server gives the reason as a SQLSTATE. libpq does not return it for a failed connection: it
returns only a text, in the server's language. But libpq can trace its messages. So saf connects
once more with a trace, and reads the SQLSTATE there. If nothing is traced, the reason stays
unknown.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg import errors, pq
from psycopg.pq import abc

from saf.database.bounds import CONNECT_TIMEOUT_SECONDS

SILENT = "start the server, or fix the dsn in saf.toml; no message is lost while it is down"
"""The cure if no server answers."""

CURES = {
    errors.TooManyConnections.sqlstate: (
        "too many connections: raise max_connections of the server, or the CONNECTION LIMIT of "
        "the role or database, or use fewer (max_connections and tasks in saf.toml); "
        "pg_stat_activity lists them"
    ),
    errors.CannotConnectNow.sqlstate: (
        "wait: the server is starting, stopping or recovering; its log shows the progress"
    ),
    errors.InvalidPassword.sqlstate: (
        "the password is wrong or missing: fix the dsn in saf.toml, PGPASSWORD or the passfile, or "
        "ALTER ROLE … PASSWORD"
    ),
    errors.InvalidAuthorizationSpecification.sqlstate: (
        "the role may not log in from here: create it (CREATE ROLE … LOGIN), or fix pg_hba.conf "
        "and reload, or the dsn in saf.toml"
    ),
    errors.InvalidCatalogName.sqlstate: (
        "the database does not exist on this server: fix the dsn in saf.toml, or create it and run "
        "`saf migrate`"
    ),
    errors.InsufficientPrivilege.sqlstate: (
        "let the database's owner GRANT CONNECT ON DATABASE … TO the role"
    ),
    errors.ObjectNotInPrerequisiteState.sqlstate: (
        "the database takes no connections: ALTER DATABASE … ALLOW_CONNECTIONS true"
    ),
}

# The trace of a server's ErrorResponse: its fields, each with its letter
SAID = re.compile(rb'\tErrorResponse\t.* C "(\w{5})" M ')


FOR_A_PERSON = {
    errors.InvalidPassword.sqlstate,
    errors.InvalidAuthorizationSpecification.sqlstate,
    errors.InvalidCatalogName.sqlstate,
    errors.InsufficientPrivilege.sqlstate,
    errors.ObjectNotInPrerequisiteState.sqlstate,
}
"""SQLSTATEs that do not pass with time: an operator has to repair something."""


def cure(conninfo: str) -> str:
    """Return what to do about a database that could not be connected to."""
    return CURES.get(sqlstate(conninfo) or "", SILENT)


def to_mend(conninfo: str) -> str | None:
    """Return the repair that an operator must make before a login can work; None if it may pass."""
    state = sqlstate(conninfo)
    return CURES[state] if state in FOR_A_PERSON else None


def sqlstate(conninfo: str) -> str | None:
    """Return the SQLSTATE with which a server refuses a connection; None if unknown.

    A client without a password is not refused: it gives up when the server asks for one.
    """
    connection = pq.PGconn.connect_start(conninfo.encode())
    try:
        with _traced(connection) as trace:
            _poll(connection)
        if connection.needs_password:
            return errors.InvalidPassword.sqlstate
    finally:
        connection.finish()
    found = SAID.search(b"".join(trace))
    return found[1].decode() if found else None


def _poll(connection: abc.PGconn) -> None:
    """Continue connecting until the server has accepted or refused the login, or stops
    answering."""
    while True:
        status = connection.connect_poll()
        if status not in (pq.PollingStatus.READING, pq.PollingStatus.WRITING):
            return
        sockets = [connection.socket]
        reading = sockets if status == pq.PollingStatus.READING else []
        writing = sockets if status == pq.PollingStatus.WRITING else []
        if not any(select.select(reading, writing, [], CONNECT_TIMEOUT_SECONDS)):
            return


@contextmanager
def _traced(connection: abc.PGconn) -> Iterator[list[bytes]]:
    """Yield a list that gets the trace at the end; by a pipe, because it may contain secrets."""
    trace: list[bytes] = []
    out, into = os.pipe()
    os.set_blocking(out, False)
    os.set_blocking(into, False)
    try:
        connection.trace(into)
        yield trace
        connection.untrace()
        trace.append(os.read(out, 1 << 16))
    except BlockingIOError:
        pass  # nothing was written
    finally:
        os.close(out)
        os.close(into)
