"""Queries to a database: their parameters and rows, pages of long lists, and the schema's revision.

*Rows.* `fetch` returns tuples from any connection. `unavailable_if_lost` gives errors their
meaning: the database is lost, it hangs, a right is missing. Nothing is retried here.

*Schema.* Library and database must use the same tables, so `check_schema` requires the schema's
revision to be `REVISION`. A sender may also meet the next revision, because a revision keeps the
statements of the senders before it working (docs/upgrading.md). Checks only read: an error names
the command that repairs the schema.

*Parameters.* psycopg inspects each element of a list several times to find the elements' type. For
the 64 shards of a small batch, that takes longer than the query. So `array` writes an array as
text, for a statement that states the type itself, in a CAST.

Some servers read a backslash in a literal as an escape: ``standard_conforming_strings`` is off.
There, psycopg doubles the backslashes of all bytes that it writes as text, as if they were in a
literal. But bytes in a COPY or in an array are not in a literal, so the server would silently store
other bytes. `in_rows` and `in_arrays` send bytes to such a server in the text form of a bytea.
Single parameters are not sent as text, and stay; for other servers, nothing is changed.

*Pages.* A `Page` has some rows of a list, and the place where the next page begins. A place is a
text with the last row's values of the columns that its list is sorted by. So inserted or deleted
rows before it do not move other rows. Each list reads its own places back, and rejects a place that
none of its pages has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

import psycopg
from psycopg.abc import QueryNoTemplate
from psycopg.rows import class_row, tuple_row

from saf.database.sqlstates import Meaning, meaning, reason_of, translated
from saf.errors import Rejected, RowsGone, SchemaMismatch, SchemaMissing, UsageError

Connection: TypeAlias = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

T = TypeVar("T")

REVISION = "0051"
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
        reason = reason_of(error)
        if kind is Meaning.OF_THE_ROWS:  # a limit of the server
            raise Rejected(what, reason) from error
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


def require_schema(
    database: str, exists: object, found: Sequence[Sequence[Any]], *, sends: bool = False
) -> None:
    """Raise unless ``database`` has the library's own revision, or one that a sender may meet.

    ``exists`` is the answer to `HAS_SCHEMA`, and ``found`` the rows of `SCHEMA_REVISION`.
    """
    if not exists:
        raise SchemaMissing(database)
    if not found:
        raise RowsGone(database, ["saf.alembic_version is empty"])
    ((revision,),) = found
    if sends and revision == following(REVISION):
        return
    require_revision(database, revision)


def following(revision: str) -> str:
    """Return the name of the revision after this one.

    >>> following("0038"), following("0099")
    ('0039', '0100')
    """
    return f"{int(revision) + 1:04}"


def require_revision(database: str, found: str) -> None:
    """Raise unless ``found``, the revision read from ``database``, is the library's own."""
    if found != REVISION:
        raise SchemaMismatch(database, found, REVISION)


def array(values: Iterable[Hashable]) -> str:
    r"""Write numbers, or other values as text, as an array; None is NULL.

    >>> print(array([7, None, -1]), array(["", 'a"b', "c\\d", "NULL"]))
    {7,NULL,-1} {"","a\"b","c\\d","NULL"}
    """
    return f"{{{','.join(map(_element, values))}}}"


@lru_cache(4096, typed=True)  # most batches have similar shards
def _element(value: Hashable) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def in_rows(connection: Connection, rows: Iterable[Sequence[Any]]) -> Iterable[Sequence[Any]]:
    """Return rows for a COPY, with bytes in a form that the server reads correctly."""
    return ([_text(value) for value in row] for row in rows) if _doubles(connection) else rows


def in_arrays(connection: Connection, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a statement, in which arrays may be lists of bytes."""
    if not _doubles(connection):
        return params
    return {
        name: [*map(_text, value)] if isinstance(value, list) else value
        for name, value in params.items()
    }


def _doubles(connection: Connection) -> bool:
    return connection.info.parameter_status("standard_conforming_strings") == "off"


def _text(value: Any) -> Any:
    r"""Return the form in which to write a value.

    >>> _text(b"a\0"), _text("a")
    ('\\x6100', 'a')
    """
    return f"\\x{value.hex()}" if isinstance(value, bytes) else value


DIGITS = 18
"""Digits that every bigint may have."""


@dataclass(frozen=True, kw_only=True)
class Page(Generic[T]):
    """Some rows of a list."""

    shown: Sequence[T] = ()
    next: str | None = None
    """Where the next page begins; None: no next page."""


def page_of(
    read: Callable[[int | None], Sequence[T]], limit: int | None, place: Callable[[T], str]
) -> Page[T]:
    """Return a page of up to ``limit`` rows, or of all.

    Args:
        read: returns the given number of rows, in the list's order. It is asked for one more than
            the limit, to find out whether another page exists.
        limit: at least one; None for all rows.
        place: returns where a page begins that comes after this row.

    >>> page_of(lambda most: "abcd"[:most], 3, str), page_of(lambda most: "abc"[:most], 3, str)
    (Page(shown='abc', next='c'), Page(shown='abc', next=None))
    """
    if limit is None:
        return Page(shown=read(None))
    found = read(limit + 1)
    more = len(found) > limit
    return Page(shown=found[:limit], next=place(found[limit - 1]) if more else None)


def foreign(
    place: str, what: str, *, said: str = "the place at the end of the page before"
) -> UsageError:
    """Return the error for a place at which no page of a list ends."""
    return UsageError(f"no page of {what} ends at {place!r}: use {said}")


def number_at(place: str | None, what: str) -> int | None:
    """Return the number that a page of a list ends at; None for the first page.

    >>> number_at("17", "the audit"), number_at(None, "the audit")
    (17, None)

    Raises:
        UsageError: it is not a number.
    """
    if place is None:
        return None
    if not (place.isascii() and place.isdecimal() and len(place) <= DIGITS):
        raise foreign(place, what)
    return int(place)
