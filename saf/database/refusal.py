"""Why a server that is there refuses a connection, and what to do about it.

A server gives the reason as a SQLSTATE. libpq does not hand it on for a connection that was not
made: it gives a text only, in the server's language. But libpq can write down what it is told. So
saf connects once more, has that traced, and reads the SQLSTATE there. If nothing is written, the
reason stays unknown.
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
"""The cure where no server answers."""

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

# What libpq writes of a message from the server: its fields, each with its letter
SAID = re.compile(rb'\tErrorResponse\t.* C "(\w{5})" M ')


FOR_A_PERSON = {
    errors.InvalidPassword.sqlstate,
    errors.InvalidAuthorizationSpecification.sqlstate,
    errors.InvalidCatalogName.sqlstate,
    errors.InsufficientPrivilege.sqlstate,
    errors.ObjectNotInPrerequisiteState.sqlstate,
}
"""SQLSTATEs that do not pass by themselves: a person has to mend something."""


def cure(conninfo: str) -> str:
    """Return what to do about a database that could not be connected to."""
    return CURES.get(sqlstate(conninfo) or "", SILENT)


def to_mend(conninfo: str) -> str | None:
    """Return what a person has to mend before the server lets anybody in; None if it may pass."""
    state = sqlstate(conninfo)
    return CURES[state] if state in FOR_A_PERSON else None


def sqlstate(conninfo: str) -> str | None:
    """Return the SQLSTATE with which a server refuses a connection; None if it is not known.

    A client that has no password is not refused: it gives up when it is asked for one.
    """
    connection = pq.PGconn.connect_start(conninfo.encode())
    try:
        with _traced(connection) as said:
            _poll(connection)
        if connection.needs_password:
            return errors.InvalidPassword.sqlstate
    finally:
        connection.finish()
    found = SAID.search(b"".join(said))
    return found[1].decode() if found else None


def _poll(connection: abc.PGconn) -> None:
    """Go on with a connection until the server has let us in or not, or does not go on."""
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
    """Give what is traced, complete at the end; by a pipe, because it may hold secrets."""
    said: list[bytes] = []
    out, into = os.pipe()
    os.set_blocking(out, False)
    os.set_blocking(into, False)
    try:
        connection.trace(into)
        yield said
        connection.untrace()
        said.append(os.read(out, 1 << 16))
    except BlockingIOError:
        pass  # nothing was written
    finally:
        os.close(out)
        os.close(into)
