"""Columns of a log: the expressions that read them, and their Arrow types.

The columns are ``id`` and ``shard`` at the source, and the message's. Two tables give Arrow types:
`READ` for columns as they are read, and `OF_SPARK` for columns as Spark passes them on.

Reading a NULL takes as long as reading a number. So for a deep backlog, the columns that most
messages lack are read only where some message has them: `common` leaves them out, and `completed`
adds them as NULLs, or returns None if a row has one after all.

If a row is too large to be read (see `saf.limits`), its large values are NULL, and so is its body.
The NULL body tells such a row from others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
from psycopg import sql

from saf import columns
from saf.columns import MESSAGE, SELDOM
from saf.limits import HEADERS_READABLE, LONG_NAMES, NAMES_READABLE, body_readable
from saf.message import MAX_BODY

COLUMNS = ("id", "shard", *columns.COLUMNS)

MOMENT = pa.timestamp("us", "UTC")
READ = {
    "uuid": pa.binary(),
    "text": pa.string(),
    "boolean": pa.bool_(),
    "bigint": pa.int64(),
    "jsonb": pa.string(),
    "bytea": pa.binary(),
    "timestamptz": MOMENT,
}
"""Arrow's types by PostgreSQL's, as `plain` returns them."""
TYPES = {column.name: READ[column.type] for column in MESSAGE}

OF_SPARK = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "long": pa.int64(),
    "int": pa.int32(),
    "binary": pa.binary(),
    "timestamp": MOMENT,
}
"""Arrow's types by Spark's names."""

MESSAGES = pa.schema([("id", pa.int64()), ("shard", pa.int16()), *TYPES.items()])
"""The schema of messages as the engine reads them."""

UNCOMMON = {name: TYPES[name] for name in SELDOM}

MORE = "more"
"""SQL: true for a row that has any of the seldom columns, else NULL."""
MORE_THAN_COMMON = sql.SQL("CASE WHEN {} THEN NULL ELSE true END AS {}").format(
    sql.SQL(" AND ").join(sql.SQL("{} IS NULL").format(sql.Identifier(name)) for name in UNCOMMON),
    sql.Identifier(MORE),
)


def selected(max_bytes: int | None, *, kept: bool = False) -> list[str | sql.Composable]:
    """Return the expressions to select for `COLUMNS`; a body over ``max_bytes`` is NULL.

    ``kept`` means that the log's constraint holds for all rows. It makes some conditions
    unnecessary that take the server longer to plan than reading a few rows.
    """
    return [bounded(name, max_bytes, "true" if kept else "false") for name in COLUMNS]


def common(columns: Iterable[str | sql.Composable]) -> list[str | sql.Composable]:
    """Return the expressions without the seldom columns; `MORE` tells if a row has any of these."""
    named = zip(COLUMNS, columns, strict=True)
    return [*(column for name, column in named if name not in UNCOMMON), MORE_THAN_COMMON]


def completed(rows: pa.RecordBatch, names: Sequence[str] = COLUMNS) -> pa.RecordBatch | None:
    """Add the seldom columns to rows read with `common`; None if a row has any of these.

    ``names`` are the columns to return.
    """
    if rows[MORE].null_count < rows.num_rows:
        return None
    lacking = {name: pa.nulls(rows.num_rows, kind) for name, kind in UNCOMMON.items()}
    return pa.RecordBatch.from_arrays(
        [lacking[name] if name in lacking else rows[name] for name in names], names=[*names]
    )


def bounded(name: str, max_bytes: int | None = None, kept: str = "false") -> str | sql.Composable:
    """Return a column, or NULL where it is too large; the body is NULL if any value in the row is.

    ``kept`` is an SQL condition, e.g. `saf.limits.KEPT`: whether a log's constraint holds for all
    rows.
    """
    if name in ("from_service", "message_type"):
        return _where(f"octet_length({name}) <= {LONG_NAMES}", name)
    if name == "body":
        fits = f"{body_readable(max_bytes or MAX_BODY)} AND {NAMES_READABLE}"
        if kept != "true":
            fits += f" AND ({kept} OR ({HEADERS_READABLE}))"
        return _where(fits, name)
    if kept != "true":
        if name in ("to_service", "key"):
            return _where(f"{kept} OR octet_length({name}) <= {LONG_NAMES}", name)
        if name == "headers":
            return _where(f"{kept} OR {HEADERS_READABLE}", name)
    return name


def _where(condition: str, name: str) -> sql.Composable:
    return sql.SQL(f"CASE WHEN {condition} THEN {name} END AS {name}")


def plain(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert columns to types that Arrow computes with: uuid to binary, jsonb to text."""
    return pa.RecordBatch.from_arrays([_storage(c) for c in rows.columns], names=rows.schema.names)


def _storage(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    return column
