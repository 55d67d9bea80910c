"""The columns that are read of a log: ``id`` and ``shard`` at the source, and the message's.

To read a NULL takes as long as to read a number. So of a deep backlog, the columns that most
messages do not have are read only where some message has them.

If a row is too large to be read (see `saf.limits`), its large values are NULL, and so is its body,
which tells it from other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
from psycopg import sql

from saf import columns
from saf.columns import SELDOM
from saf.limits import HEADERS_READABLE, LONG_NAMES, NAMES_READABLE, body_readable
from saf.log.arrow import TYPES
from saf.message import MAX_BODY

COLUMNS = ("id", "shard", *columns.COLUMNS)

UNCOMMON = {name: TYPES[name] for name in SELDOM}

MORE = "more"
"""SQL: true for a row that has any of the seldom columns, else NULL."""
MORE_THAN_COMMON = sql.SQL("CASE WHEN {} THEN NULL ELSE true END AS {}").format(
    sql.SQL(" AND ").join(sql.SQL("{} IS NULL").format(sql.Identifier(name)) for name in UNCOMMON),
    sql.Identifier(MORE),
)


def selected(max_bytes: int | None, *, kept: bool = False) -> list[str | sql.Composable]:
    """The expressions to select for `COLUMNS`; a body over ``max_bytes`` is NULL.

    Of a log, ``kept`` says that its constraint holds for all rows. The conditions that it makes
    needless take the server longer to plan than a few rows to read.
    """
    return [bounded(name, max_bytes, "true" if kept else "false") for name in COLUMNS]


def common(columns: Iterable[str | sql.Composable]) -> list[str | sql.Composable]:
    """The expressions without the seldom columns; `MORE` says whether a row has any of these."""
    named = zip(COLUMNS, columns, strict=True)
    return [*(column for name, column in named if name not in UNCOMMON), MORE_THAN_COMMON]


def completed(rows: pa.RecordBatch, names: Sequence[str] = COLUMNS) -> pa.RecordBatch | None:
    """Add the seldom columns to what `common` has read; None if a row has one of them.

    ``names``: the columns that shall be there then.
    """
    if rows[MORE].null_count < rows.num_rows:
        return None
    lacking = {name: pa.nulls(rows.num_rows, kind) for name, kind in UNCOMMON.items()}
    return pa.RecordBatch.from_arrays(
        [lacking[name] if name in lacking else rows[name] for name in names], names=[*names]
    )


def bounded(name: str, max_bytes: int | None = None, kept: str = "false") -> str | sql.Composable:
    """A column, or NULL where it is too large; the body is NULL where anything in the row is.

    ``kept`` is SQL that says whether a log's constraint holds for all rows, such as `KEPT`.
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
    """Turn what PostgreSQL sent into types for Arrow to compute with: uuid binary, jsonb text."""
    return pa.RecordBatch.from_arrays([_storage(c) for c in rows.columns], names=rows.schema.names)


def _storage(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    return column
