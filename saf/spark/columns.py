"""The columns in which messages travel through Spark, and back into those of `saf.message`.

``id`` and ``shard`` at the source, and the message's. Those that most messages leave empty travel
as one, ``packed``: an array of their values in PostgreSQL's binary form, NULL where all of them
are. What is not there then costs one null a message instead of seven, in each of the six places
where a row is copied.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

PLAIN = {
    "id": "long",
    "shard": "short",
    "message_id": "binary",
    "to_service": "string",
    "key": "string",
    "message_type": "string",
    "headers": "string",
    "body": "binary",
    "created_at": "timestamp",
}
COLUMNS = PLAIN | {"packed": "array<binary>"}
SCHEMA = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())

_ARROW = {
    "int": pa.int32(),
    "long": pa.int64(),
    "short": pa.int16(),
    "binary": pa.binary(),
    "string": pa.string(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "array<binary>": pa.list_(pa.binary()),
}

# PostgreSQL counts microseconds from the year 2000, Arrow from 1970
_EPOCH = 946_684_800_000_000


def arrow_type(kind: str) -> pa.DataType:
    """Arrow's name for one of Spark's types.

    >>> arrow_type("long")
    DataType(int64)
    """
    return _ARROW[kind]


def _text(values: pa.Array) -> pa.Array:
    return values.cast(pa.string())


def _uuid(values: pa.Array) -> pa.Array:
    return values


def _numbers(values: pa.Array, kind: str) -> pa.Array:
    size = np.dtype(kind).itemsize
    fixed = pc.fill_null(values, bytes(size)).cast(pa.binary(size))
    numbers = np.frombuffer(fixed.buffers()[1], kind, len(fixed), fixed.offset * size)
    return pa.array(numbers.astype(kind[1:]), mask=values.is_null().to_numpy(zero_copy_only=False))


def _boolean(values: pa.Array) -> pa.Array:
    return _numbers(values, ">u1").cast(pa.bool_())


def _bigint(values: pa.Array) -> pa.Array:
    return _numbers(values, ">i8")


def _moment(values: pa.Array) -> pa.Array:
    return pc.add(_numbers(values, ">i8"), _EPOCH).cast(arrow_type("timestamp"))


OPTIONAL: dict[str, tuple[str, Callable[[pa.Array], pa.Array]]] = {
    "from_service": ("textsend", _text),
    "to_broker": ("uuid_send", _uuid),
    "conversation_id": ("uuid_send", _uuid),
    "from_initiator": ("boolsend", _boolean),
    "sequence": ("int8send", _bigint),
    "deliver_at": ("timestamptz_send", _moment),
    "expires_at": ("timestamptz_send", _moment),
}
"""In the order of the array: the function that packs the value, and the one that unpacks it."""


def selected(max_bytes: int | None) -> list[str | sql.Composable]:
    """What to select from a log to get `SCHEMA`'s columns; a body over ``max_bytes`` is NULL."""
    some = [sql.SQL("{} IS NOT NULL").format(sql.Identifier(name)) for name in OPTIONAL]
    values = [
        sql.SQL("{}({})").format(sql.Identifier(send), sql.Identifier(name))
        for name, (send, _) in OPTIONAL.items()
    ]
    packed = sql.SQL("CASE WHEN {} THEN ARRAY[{}] END AS packed").format(
        sql.SQL(" OR ").join(some), sql.SQL(", ").join(values)
    )
    if max_bytes is None:
        return [*PLAIN, packed]
    body = sql.SQL("CASE WHEN octet_length(body) <= {} THEN body END AS body").format(
        sql.Literal(max_bytes)
    )
    return [*(body if name == "body" else name for name in PLAIN), packed]


def as_spark(rows: pa.RecordBatch) -> pa.RecordBatch:
    """What PostgreSQL sent, in types that Spark knows: uuid as binary, jsonb as text."""
    return pa.RecordBatch.from_arrays([_storage(c) for c in rows.columns], names=rows.schema.names)


def _storage(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    return column


def unpack(rows: pa.Table) -> pa.Table:
    """The table with each of `OPTIONAL` as a column of its own, instead of ``packed``."""
    for name, column in _unpacked(rows["packed"].combine_chunks()).items():
        rows = rows.append_column(name, column)
    return rows.drop_columns(["packed"])


def _unpacked(packed: pa.ListArray) -> dict[str, pa.Array]:
    if packed.null_count == len(packed):
        return {name: pa.nulls(len(packed)) for name in OPTIONAL}
    there = packed.is_valid().to_numpy(zero_copy_only=False)
    row = pa.array(np.cumsum(there) - 1, mask=~there)
    flat = packed.flatten()
    return {
        name: read(flat.take(pa.array(range(place, len(flat), len(OPTIONAL))))).take(row)
        for place, (name, (_, read)) in enumerate(OPTIONAL.items())
    }
