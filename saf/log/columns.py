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

from saf import columns
from saf.columns import SELDOM
from saf.limits import HEADERS_READABLE, KEPT, LONG_NAMES, NAMES_READABLE, body_readable
from saf.log.arrow import TYPES
from saf.message import MAX_BODY

COLUMNS = ("id", "shard", *columns.COLUMNS)

UNCOMMON = {name: TYPES[name] for name in SELDOM}

MORE = "more"
"""True for a row that has any of them, else NULL."""
MORE_THAN_COMMON = sql.SQL("CASE WHEN {} THEN NULL ELSE true END AS {}").format(
    sql.SQL(" AND ").join(sql.SQL("{} IS NULL").format(sql.Identifier(name)) for name in UNCOMMON),
    sql.Identifier(MORE),
)


def selected(max_bytes: int | None, log: str | None = None) -> list[str | sql.Composable]:
    """What to select to get `COLUMNS`; a body over ``max_bytes`` is NULL.

    From a ``log``, or from the parked messages.
    """
    return [bounded(name, max_bytes, log) for name in COLUMNS]


def common(columns: Iterable[str | sql.Composable]) -> list[str | sql.Composable]:
    """Without those that most messages do not have; instead, `MORE` says whether a row does."""
    named = zip(COLUMNS, columns, strict=True)
    return [*(column for name, column in named if name not in UNCOMMON), MORE_THAN_COMMON]


def completed(rows: pa.RecordBatch) -> pa.RecordBatch | None:
    """What was read as `common`, with all columns; None if a row has one that was not read."""
    if rows[MORE].null_count < rows.num_rows:
        return None
    lacking = {name: pa.nulls(rows.num_rows, kind) for name, kind in UNCOMMON.items()}
    return pa.RecordBatch.from_arrays(
        [lacking[name] if name in lacking else rows[name] for name in COLUMNS], names=[*COLUMNS]
    )


def bounded(
    name: str, max_bytes: int | None = None, log: str | None = None
) -> str | sql.Composable:
    """A column, or NULL where it is too large; the body too where anything of the row is."""
    kept = KEPT.format(log=log) if log else "false"
    if name in ("to_service", "key"):
        return _where(f"{kept} OR octet_length({name}) <= {LONG_NAMES}", name)
    if name in ("from_service", "message_type"):
        return _where(f"octet_length({name}) <= {LONG_NAMES}", name)
    if name == "headers":
        return _where(f"{kept} OR {HEADERS_READABLE}", name)
    if name == "body":
        rest = f"{kept} OR ({HEADERS_READABLE})"
        fits = f"{body_readable(max_bytes or MAX_BODY)} AND {NAMES_READABLE} AND ({rest})"
        return _where(fits, name)
    return name


def _where(condition: str, name: str) -> sql.Composable:
    return sql.SQL(f"CASE WHEN {condition} THEN {name} END AS {name}")


def plain(rows: pa.RecordBatch) -> pa.RecordBatch:
    """What PostgreSQL sent, in types that Arrow computes with: uuid as binary, jsonb as text."""
    return pa.RecordBatch.from_arrays([_storage(c) for c in rows.columns], names=rows.schema.names)


def _storage(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    return column
