"""Messages as lines of JSON, written by Arrow, without Python code per message.

    {"source": "…", "shard": 7, "message_id": "…", "to_service": "billing", "key": "order 7",
     "headers": {"content-type": "application/json"}, "body": "{\\"order\\": 7}",
     "created_at": "2026-01-31T12:00:00.000001Z"}

The names are those of a message's columns; NULL columns are left out. ``source`` is the broker_id
of the source, ``shard`` the key's shard there. A UTF-8 body is a text in ``body``; any other body
is in ``body_base64``. Only if a chunk contains such a body, Python checks its bodies one by one.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.columns import MESSAGE
from saf.destinations.texts import TEXT, in_quotes, moments, quoted, uuids, whole


def lines(rows: pa.Table, source: UUID) -> pa.Array:
    """Return a line for each message, ending with a newline."""
    rows = rows.combine_chunks()
    parts = [_text(f'{{"source":"{source}","shard":'), rows["shard"].cast(TEXT)]
    for column in MESSAGE:
        values = whole(rows[column.name])
        if values.null_count == len(values):
            continue
        if column.name == "body":
            parts += _body(values)
        else:
            parts.append(_field(column.name, WRITTEN[column.type](values)))
    return whole(_join(*parts, _text("}\n")))


def content(written: pa.Array) -> memoryview:
    """Return the concatenated bytes of lines, without copying them."""
    offsets = np.frombuffer(written.buffers()[1], np.int64)
    first, last = offsets[written.offset], offsets[written.offset + len(written)]
    return memoryview(written.buffers()[2])[first:last]


def _body(values: pa.Array) -> list[pa.Array]:
    values = values.cast(pa.large_binary())
    try:
        return [_field("body", quoted(values.cast(TEXT)))]
    except pa.ArrowInvalid:  # some are not UTF-8
        texts = [_as_text(body) for body in values.to_pylist()]
    encoded = [
        None if text is not None else base64.b64encode(body).decode()
        for text, body in zip(texts, values.to_pylist(), strict=True)
    ]
    return [
        _field("body", quoted(pa.array(texts, TEXT))),
        _field("body_base64", quoted(pa.array(encoded, TEXT))),
    ]


def _as_text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _field(name: str, written: pa.Array) -> pa.Array:
    """Return a field of each line, preceded by a comma; null where the value is null."""
    return pc.binary_join_element_wise(_text(f',"{name}":'), written, _text(""))


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(TEXT)


WRITTEN: dict[str, Callable[[pa.Array], pa.Array]] = {
    "uuid": lambda values: in_quotes(uuids(values)),
    "text": lambda values: quoted(values.cast(TEXT)),
    "boolean": _plain,
    "bigint": _plain,
    "jsonb": _plain,
    "timestamptz": lambda values: in_quotes(moments(values)),
}
"""Function that writes a column's values, by the column's type in PostgreSQL."""


def _join(*parts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(
        *parts, _text(""), null_handling="replace", null_replacement=""
    )


def _text(text: str) -> pa.Scalar:
    return pa.scalar(text, TEXT)
