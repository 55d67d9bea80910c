"""Headers as maps, built from the JSON text that the database sends.

Most messages share a few headers, so each distinct text is parsed once per batch of rows. Parsing
at the server would cost more than everything else it does to read a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pyarrow as pa

# Values that are not texts are cut out verbatim, so numbers need no parsing
DECODER = json.JSONDecoder(parse_int=lambda _: 0, parse_float=lambda _: 0)
TEXT = r'"(?:[^"\\]|\\.)*"'
NAME = re.compile(TEXT)
TOKEN = re.compile(TEXT + r"|[][{},]")


def maps(texts: pa.Array, type_: pa.DataType) -> pa.Array:
    """Return JSON objects, in PostgreSQL's jsonb format, as maps; NULL for other JSON."""
    encoded = texts.dictionary_encode()
    known = pa.array(
        [None if text is None else members(text) for text in encoded.dictionary.to_pylist()], type_
    )
    return known.take(encoded.indices)


def members(text: str) -> list[tuple[str, str | None]] | None:
    """Return a JSON object's members: texts as they are, null as None, other values as JSON.

    The text must have PostgreSQL's jsonb format.

    >>> members('{"a": "b\\\\n", "n": 1.10, "o": {"x": [1, "}"]}, "z": null}')
    [('a', 'b\\n'), ('n', '1.10'), ('o', '{"x": [1, "}"]}'), ('z', None)]
    >>> members("{}"), members("[1]")
    ([], None)
    """
    if not text.startswith("{"):
        return None
    try:
        found = DECODER.decode(text)
    except RecursionError:  # nested more deeply than Python supports
        return [*_cut(text)]
    if all(value is None or isinstance(value, str) for value in found.values()):
        return [*found.items()]
    return [*_cut(text)]


def _cut(text: str) -> Iterator[tuple[str, str | None]]:
    at = 1
    while text[at] == '"':
        name = NAME.match(text, at)
        assert name is not None  # noqa: S101 - an object's member begins with its name
        at = name.end() + len(": ")
        end = _end(text, at)
        raw = text[at:end]
        value = None if raw == "null" else json.loads(raw) if raw[0] == '"' else raw
        yield json.loads(name[0]), value
        if text[end] == "}":
            return
        at = end + len(", ")


def _end(text: str, at: int) -> int:
    """Return the position where a member's value ends."""
    depth = 0
    for token in TOKEN.finditer(text, at):
        if token[0] in "[{":
            depth += 1
        elif depth == 0 and token[0] in "}],":
            return token.start()
        elif token[0] in "]}":
            depth -= 1
    raise ValueError("not an object as PostgreSQL writes it")
