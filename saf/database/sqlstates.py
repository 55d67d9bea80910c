"""Meanings of SQLSTATEs: one policy for the errors of both drivers.

    of the rows   data, constraints, size limits, and errors raised by triggers: caused by a message
    hangs         the server is running, and something blocks the request
    no right      the login lacks a right that it needs
    read-only     the server is a standby, or is set to take no writes
    incomplete    part of the schema saf is missing
    published     changes are published of a table without a replica identity
    disk full     nothing can be written until somebody has made room

An error without a meaning here may pass with time: the connection is lost, the server restarts. The
step is retried later, and no message is to blame.
"""

from __future__ import annotations

from enum import Enum

from psycopg import errors

from saf.errors import ConfigurationError, DiskFull, SafError, Unavailable


class Meaning(Enum):
    """Meaning of an SQLSTATE; the module lists the meanings."""

    OF_THE_ROWS = "of the rows"
    HANGS = "hangs"
    NO_RIGHT = "no right"
    READ_ONLY = "read-only"
    INCOMPLETE = "incomplete"
    PUBLISHED = "published"
    DISK_FULL = "disk full"


OF_THE_ROWS = ("09", "22", "23", "27", "38", "39", "44", "54", "P0")
"""Classes of SQLSTATEs, by their first two characters."""

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
                f"{what} refuses this user: {reason}. Let the owner of its schema saf run "
                "`saf grant --role …` for the user, or, if row-level security is in the way, what "
                "`saf doctor` says"
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
