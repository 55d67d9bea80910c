"""SQLSTATEs: meanings of a database's errors, and reasons for refused connections.

`meaning` is one policy for the errors of both drivers; `Meaning` lists the meanings. An error
without a meaning may pass with time: the connection is lost, the server restarts. The step is
retried later, and no message is to blame.

`reason_of` returns the message of an error of either driver, in one line and without SQL.

`cure` and `to_mend` return what to do about a connection that a running server refuses. A server
gives the reason as a SQLSTATE. libpq does not return it for a failed connection: it returns only a
text, in the server's language. But libpq can trace its messages. So `sqlstate` connects once more
with a trace, and reads the SQLSTATE there. If nothing is traced, the reason stays unknown.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from psycopg import errors, pq
from psycopg.pq import abc

from saf.database.bounds import CONNECT_TIMEOUT_SECONDS
from saf.errors import ConfigurationError, DiskFull, SafError, Unavailable


class Meaning(Enum):
    """Meaning of an SQLSTATE."""

    OF_THE_ROWS = "of the rows"
    """Data, constraints, size limits, and errors raised by triggers: caused by a message."""
    HANGS = "hangs"
    """The server is running, and something blocks the request."""
    NO_RIGHT = "no right"
    """The login lacks a right that it needs."""
    READ_ONLY = "read-only"
    """The server is a standby, or is set to take no writes."""
    INCOMPLETE = "incomplete"
    """Part of the schema saf is missing."""
    PUBLISHED = "published"
    """Changes of a table without a replica identity are published."""
    DISK_FULL = "disk full"
    """Nothing can be written until an operator has made room."""


OF_THE_ROWS = ("09", "22", "23", "27", "38", "39", "44", "54", "P0")
"""Classes of SQLSTATEs that are about the rows, by their first two characters."""

MEANINGS = {
    errors.LockNotAvailable.sqlstate: Meaning.HANGS,
    errors.QueryCanceled.sqlstate: Meaning.HANGS,
    errors.InsufficientPrivilege.sqlstate: Meaning.NO_RIGHT,
    errors.ReadOnlySqlTransaction.sqlstate: Meaning.READ_ONLY,
    errors.UndefinedTable.sqlstate: Meaning.INCOMPLETE,
    errors.UndefinedColumn.sqlstate: Meaning.INCOMPLETE,
    errors.UndefinedFunction.sqlstate: Meaning.INCOMPLETE,
    errors.InvalidSchemaName.sqlstate: Meaning.INCOMPLETE,
    errors.ObjectNotInPrerequisiteState.sqlstate: Meaning.PUBLISHED,
    errors.DiskFull.sqlstate: Meaning.DISK_FULL,
}

SILENT = "start the server, or fix {dsn}; no message is lost while it is down"
"""The cure if no server answers; ``{dsn}`` stands for the origin of the dsn."""

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
        "the password is wrong or missing: fix {dsn}, PGPASSWORD or the passfile, or "
        "ALTER ROLE … PASSWORD"
    ),
    errors.InvalidAuthorizationSpecification.sqlstate: (
        "the role may not log in from here: create it (CREATE ROLE … LOGIN), or fix pg_hba.conf "
        "and reload, or {dsn}"
    ),
    errors.InvalidCatalogName.sqlstate: (
        "the database does not exist on this server: fix {dsn}, or create it and run `saf migrate`"
    ),
    errors.InsufficientPrivilege.sqlstate: (
        "let the database's owner GRANT CONNECT ON DATABASE … TO the role"
    ),
    errors.ObjectNotInPrerequisiteState.sqlstate: (
        "the database takes no connections: ALTER DATABASE … ALLOW_CONNECTIONS true"
    ),
}

FOR_A_PERSON = {
    errors.InvalidPassword.sqlstate,
    errors.InvalidAuthorizationSpecification.sqlstate,
    errors.InvalidCatalogName.sqlstate,
    errors.InsufficientPrivilege.sqlstate,
    errors.ObjectNotInPrerequisiteState.sqlstate,
}
"""SQLSTATEs that do not pass with time: an operator has to repair something."""

# The trace of a server's ErrorResponse: its fields, each with its letter
SAID = re.compile(rb'\tErrorResponse\t.* C "(\w{5})" M ')


def meaning(sqlstate: str | None) -> Meaning | None:
    """Return the meaning of an SQLSTATE; None if the error may pass with time.

    >>> meaning("54000"), meaning("53200"), meaning(None)
    (<Meaning.OF_THE_ROWS: 'of the rows'>, None, None)
    """
    if sqlstate is None:
        return None
    return MEANINGS.get(sqlstate) or (
        Meaning.OF_THE_ROWS if sqlstate.startswith(OF_THE_ROWS) else None
    )


FIELDS = {"PRIMARY": "", "DETAIL": "DETAIL: ", "HINT": "HINT: "}
"""Fields of a server's error to show, and their names in texts."""

# Texts of ADBC around the server's message: a status, the failed step with its SQL, a severity
BEFORE = re.compile(
    r"\A(?:[A-Z_]+: (?:\[libpq\] )?|\[libpq\] )"
    r"(?:Failed to execute query '.*': |[^:\n]*: (?:PGRES_\w+ )?)?(?:(?:ERROR|FATAL|PANIC):  )?",
    re.S,
)
AFTER = re.compile(r"\s*(?:\n\nQuery was: .*|\. SQLSTATE: \w{5})\Z", re.S)
CONTINUED = re.compile(r"\n\s+(?=[a-z])")


def reason_of(error: BaseException) -> str:
    r"""Return the message of an error of psycopg or ADBC, in one line and without SQL.

    >>> reason_of(OSError("IO: [libpq] Failed to connect: to port 1: refused\n\tIs it running?\n"))
    'to port 1: refused; Is it running?'
    """
    if isinstance(error, errors.Error):
        of_server = [getattr(error.diag, f"message_{field.lower()}") for field in FIELDS]
    else:
        found = dict(getattr(error, "details", None) or ())
        of_server = [
            found.get(f"PG_DIAG_MESSAGE_{field}".encode(), b"").decode() for field in FIELDS
        ]
    if not of_server[0]:  # the driver's own text
        text = CONTINUED.sub(" ", BEFORE.sub("", AFTER.sub("", str(error))))
        return "; ".join(line.strip() for line in text.splitlines() if line.strip())
    named = zip(FIELDS.values(), of_server, strict=True)
    return "; ".join(" ".join(f"{name}{text}".split()) for name, text in named if text)


def translated(what: str, sqlstate: str | None, reason: str) -> SafError:
    """Return the error for an SQLSTATE that is about the server, and not about some rows.

    Args:
        what: names the database in errors.
        sqlstate: the server's SQLSTATE; None if it sent none.
        reason: the text of the error, without secrets.
    """
    reason = " ".join(reason.split())
    match meaning(sqlstate):
        case Meaning.NO_RIGHT:
            return ConfigurationError(
                f"{what} refuses this user: {reason}. `saf doctor` shows which rights are "
                "missing, with the `saf grant --role` for its owner, or whether row-level security "
                "applies"
            )
        case Meaning.READ_ONLY:
            return ConfigurationError(
                f"{what} is read-only: it is a standby, or default_transaction_read_only is on for "
                "this role or database. Name the primary in the dsn, or turn it off"
            )
        case Meaning.INCOMPLETE:
            return ConfigurationError(
                f"{what}: its schema saf is incomplete: {reason}. Restore the missing objects from "
                "a backup; `saf migrate` does not create them again"
            )
        case Meaning.PUBLISHED:
            return ConfigurationError(
                f"{what}: {reason}. If a publication, such as one FOR ALL TABLES, publishes a "
                "table of saf's that has no replica identity, `saf doctor` names it and the cure"
            )
        case Meaning.DISK_FULL:
            return DiskFull(what, reason)
        case one:
            return Unavailable(what, reason, hangs=one is Meaning.HANGS)


def cure(conninfo: str, origin: str) -> str:
    """Return what to do about a database that could not be connected to.

    ``origin`` names the place where the dsn is to be fixed.
    """
    return CURES.get(sqlstate(conninfo) or "", SILENT).format(dsn=origin)


def to_mend(conninfo: str, origin: str) -> str | None:
    """Return the repair that an operator must make before a login can work; None if it may pass."""
    state = sqlstate(conninfo)
    return CURES[state].format(dsn=origin) if state in FOR_A_PERSON else None


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
    """Continue connecting until the server accepts or refuses the login, or stops answering."""
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
