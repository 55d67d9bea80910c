"""Bytes on a connection whose server takes a backslash in a literal for an escape.

There, ``standard_conforming_strings`` is off, and psycopg doubles the backslashes of all bytes that
it writes as text, as if they stood in a literal. In a COPY and in an array they do not: the server
would store other bytes, and say nothing. So bytes go there as the text that a bytea is read from.
A single parameter is no text, and stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]


def in_rows(connection: Connection, rows: Iterable[Sequence[Any]]) -> Iterable[Sequence[Any]]:
    """Return rows for a COPY."""
    return ([_text(value) for value in row] for row in rows) if _doubles(connection) else rows


def in_arrays(connection: Connection, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a statement, of which some may be lists of bytes."""
    if not _doubles(connection):
        return params
    return {
        name: [*map(_text, value)] if isinstance(value, list) else value
        for name, value in params.items()
    }


def _doubles(connection: Connection) -> bool:
    return connection.info.parameter_status("standard_conforming_strings") == "off"


def _text(value: Any) -> Any:
    r"""What a value is written as.

    >>> _text(b"a\0"), _text("a")
    ('\\x6100', 'a')
    """
    return f"\\x{value.hex()}" if isinstance(value, bytes) else value
