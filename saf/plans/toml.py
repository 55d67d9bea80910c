"""Writes TOML, as far as plans need it, because Python can only read TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

WIDTH = 80
LAST_OF_FOUR_DIGITS = 0xFFFF
"""Last character whose escape has four digits."""
BARE = re.compile(r"[A-Za-z0-9_-]+")


def document(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the lines of a table: first its values, then its tables, then its arrays of tables.

    >>> print(*document({"a": {"names": ["x"], "b c": {"n": 1}, "rows": [{"s": "it's"}]}}), sep="|")
    [a]|names = ["x"]||[a."b c"]|n = 1||[[a.rows]]|s = "it's"|
    """
    values = {name: item for name, item in table.items() if not _tables(item) and not _rows(item)}
    if values and path:
        yield f"[{_name(path)}]"
    for name, item in values.items():
        yield from _assigned(_name((name,)), item)
    if values:
        yield ""
    for name, item in table.items():
        if _tables(item):
            yield from document(item, (*path, name)) if item else [f"[{_name((*path, name))}]", ""]
    for name, rows in table.items():
        for row in rows if _rows(rows) else ():
            yield f"[[{_name((*path, name))}]]"
            for field, item in row.items():
                yield from _assigned(_name((field,)), item)
            yield ""


def _tables(value: object) -> bool:
    return isinstance(value, Mapping)


def _rows(value: object) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def _assigned(name: str, value: object) -> Iterator[str]:
    line = f"{name} = {_value(value)}"
    if len(line) <= WIDTH or not isinstance(value, (list, tuple)):
        yield line
        return
    yield f"{name} = ["
    yield from (f"    {_value(item)}," for item in value)
    yield "]"


def _value(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        inside = ", ".join(
            f"{_name((str(name),))} = {_value(item)}" for name, item in value.items()
        )
        return f"{{{inside}}}" if not inside else f"{{ {inside} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value, default=str)  # e.g. an id


def _text(text: str) -> str:
    r"""Return a TOML string, as in JSON; characters that do not print become escapes.


    >>> print(_text("Zürich\xad \x85 \x7f \U000e0001 \t"))
    "Zürich\u00ad \u0085 \u007f \U000e0001 \t"
    """
    return "".join(
        character if character.isprintable() else _escape(ord(character))
        for character in json.dumps(str(text), ensure_ascii=False)
    )


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code <= LAST_OF_FOUR_DIGITS else f"\\U{code:08x}"


def _name(path: tuple[str, ...]) -> str:
    return ".".join(part if BARE.fullmatch(part) else _text(part) for part in path)
