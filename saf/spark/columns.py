"""The columns that are read of a log: ``id`` and ``shard`` at the source, and the message's.

To read that there is nothing takes as long as to read a number. So of a deep backlog, what most
messages do not have is read only where some have it.

Of a row that is too large to be read (see `saf.limits`), what is too large is NULL, and so is the
body, which tells it from others.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from psycopg import sql

from saf import message
from saf.limits import HEADERS_READABLE, LONG_NAMES, NAMES_READABLE, body_readable
from saf.message import MAX_BODY

COLUMNS = ("id", "shard", *message.COLUMNS)

UNCOMMON = {
    "from_service": pa.string(),
    "to_broker": pa.binary(),
    "conversation_id": pa.binary(),
    "from_initiator": pa.bool_(),
    "sequence": pa.int64(),
    "deliver_at": pa.timestamp("us", "UTC"),
    "expires_at": pa.timestamp("us", "UTC"),
}
"""What a message outside of dialogs, for any time, does not have."""

LONG = ("from_service", "to_service", "key", "message_type")
"""The texts of a message."""
BOUNDED: dict[str, sql.Composable] = {
    name: sql.SQL("CASE WHEN octet_length({0}) <= {1} THEN {0} END AS {0}").format(
        sql.Identifier(name), sql.Literal(LONG_NAMES)
    )
    for name in LONG
}
BOUNDED["headers"] = sql.SQL(f"CASE WHEN {HEADERS_READABLE} THEN headers END AS headers")

MORE = "more"
"""True for a row that has any of them, else NULL."""
MORE_THAN_COMMON = sql.SQL("CASE WHEN {} THEN NULL ELSE true END AS {}").format(
    sql.SQL(" AND ").join(sql.SQL("{} IS NULL").format(sql.Identifier(name)) for name in UNCOMMON),
    sql.Identifier(MORE),
)


def selected(max_bytes: int | None) -> list[str | sql.Composable]:
    """What to select from a log to get `COLUMNS`; a body over ``max_bytes`` is NULL."""
    columns = {**BOUNDED, "body": body_within(max_bytes or MAX_BODY)}
    return [columns.get(name, name) for name in COLUMNS]


def common(columns: Iterable[str | sql.Composable]) -> list[str | sql.Composable]:
    """Without those that most messages do not have; instead, `MORE` says whether a row does."""
    uncommon = [BOUNDED.get(name, name) for name in UNCOMMON]
    return [*(name for name in columns if name not in uncommon), MORE_THAN_COMMON]


def completed(rows: pa.RecordBatch) -> pa.RecordBatch | None:
    """What was read as `common`, with all columns; None if a row has one that was not read."""
    if rows[MORE].null_count < rows.num_rows:
        return None
    lacking = {name: pa.nulls(rows.num_rows, kind) for name, kind in UNCOMMON.items()}
    return pa.RecordBatch.from_arrays(
        [lacking[name] if name in lacking else rows[name] for name in COLUMNS], names=[*COLUMNS]
    )


def body_within(max_bytes: int) -> sql.Composable:
    """The body; NULL if it is larger, or something else of the row cannot be read."""
    fits = f"({NAMES_READABLE}) AND ({HEADERS_READABLE}) AND {body_readable(max_bytes)}"
    return sql.SQL(f"CASE WHEN {fits} THEN body END AS body")


def plain(rows: pa.RecordBatch) -> pa.RecordBatch:
    """What PostgreSQL sent, in types that Arrow computes with: uuid as binary, jsonb as text."""
    return pa.RecordBatch.from_arrays([_storage(c) for c in rows.columns], names=rows.schema.names)


def _storage(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    return column
