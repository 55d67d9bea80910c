"""The columns that are read of a log: ``id`` and ``shard`` at the source, and the message's."""

from __future__ import annotations

import pyarrow as pa
from psycopg import sql

from saf import message

COLUMNS = ("id", "shard", *message.COLUMNS)


def selected(max_bytes: int | None) -> list[str | sql.Composable]:
    """What to select from a log to get `COLUMNS`; a body over ``max_bytes`` is NULL."""
    if max_bytes is None:
        return [*COLUMNS]
    return [body_within(max_bytes) if name == "body" else name for name in COLUMNS]


def body_within(max_bytes: int) -> sql.Composable:
    """The body; NULL if it is larger."""
    body = "CASE WHEN octet_length(body) <= {} THEN body END AS body"
    return sql.SQL(body).format(sql.Literal(max_bytes))


def plain(rows: pa.RecordBatch) -> pa.RecordBatch:
    """What PostgreSQL sent, in types that Arrow computes with: uuid as binary, jsonb as text."""
    return pa.RecordBatch.from_arrays([_storage(c) for c in rows.columns], names=rows.schema.names)


def _storage(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    return column
