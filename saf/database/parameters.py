"""Parameters: arrays and bytes in the text form that PostgreSQL reads.

psycopg inspects each element of a list several times to find the elements' type. For the 64 shards
of a small batch, that takes longer than the query. So `array` writes an array as text, for a
statement that states the type itself, in a CAST.

Some servers read a backslash in a literal as an escape: ``standard_conforming_strings`` is off.
There, psycopg doubles the backslashes of all bytes that it writes as text, as if they were in a
literal. But bytes in a COPY or in an array are not in a literal, so the server would silently store
other bytes. `in_rows` and `in_arrays` send bytes to such a server in the text form of a bytea.
Single parameters are not sent as text, and stay; for other servers, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]


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
