"""The rows of an archive's files, as a task reads them, in no order.

Filters are Arrow's, which skips parts of a file by the file's statistics. If a file was removed
after planning, the read fails; it never returns fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow.fs import FileSystem, LocalFileSystem
from pyspark.sql.datasource import InputPartition

from saf.errors import Unavailable
from saf.log.columns import plain
from saf.spark.table import fields
from saf.spark.table.filters import Condition
from saf.spark.table.part import Query

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

BATCH_BYTES = 4 << 20
MOST_ROWS = 1 << 16
TYPES = {"id": pa.int64(), "shard": pa.int64(), "created_at": pa.timestamp("us", "UTC")}
"""Arrow types of the non-text columns that have filters."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Archived(InputPartition):
    """The files that one task reads."""

    what: str
    """Name of the archive in error messages."""
    broker: str
    """The broker's name, as in `saf.spark.table.part.Part`."""
    table: Delta | None
    """The table; None if the files are in a folder."""
    paths: tuple[str, ...]
    in_log: tuple[tuple[int, int], ...]
    """Archives (slot, number) in the table whose messages are still in the log."""


def read(part: Archived, query: Query) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task's files, in the requested schema.

    Raises:
        Unavailable: a file is unreadable, or gone.
    """
    wanted = expression(query.conditions)
    for slot, number in part.in_log:
        wanted &= ~((ds.field("slot") == slot) & (ds.field("purge") == number))
    with readable(part.what):
        files = _filesystem(part)
        for path in part.paths:
            for rows in _rows(files, path, query.names, wanted):
                if rows.num_rows:
                    yield fields.shaped(plain(rows), query.asked, part.broker)


def expression(conditions: Iterable[Condition]) -> pc.Expression:
    """Translate a database's conditions for Arrow, which compares texts by their bytes, too.

    >>> one = Condition(column="id", operator=">", values=(7,), text="id > 7")
    >>> str(expression([one]))
    '(true and (id > 7))'
    """
    found = pc.scalar(True)
    for condition in conditions:
        found &= _as_arrow(condition)
    return found


def _as_arrow(condition: Condition) -> pc.Expression:
    column, kind = ds.field(condition.column), TYPES.get(condition.column, pa.string())
    if condition.operator in ("null", "not null"):
        return column.is_null() if condition.operator == "null" else column.is_valid()
    if condition.column == "shard":  # a number may not fit into the column's own type
        column = column.cast(kind)
    values = [
        v.astimezone(UTC) if condition.column == "created_at" else v for v in condition.values
    ]
    if condition.operator == "in":
        return column.isin(pa.array(values, kind))
    (value,) = pa.array(values, kind)
    return {
        ">": column > value,
        ">=": column >= value,
        "<": column < value,
        "<=": column <= value,
    }[condition.operator]


def _filesystem(part: Archived) -> FileSystem:
    if part.table is None:
        return LocalFileSystem()
    from saf.destinations.delta.files import Files

    return Files(part.table.table, part.table.folder, part.table.options).filesystem


def _rows(
    files: FileSystem, path: str, names: list[str], wanted: pc.Expression
) -> Iterator[pa.RecordBatch]:
    file = ds.dataset(path, filesystem=files, format="parquet")
    groups = [group for fragment in file.get_fragments() for group in fragment.row_groups]
    size = sum(group.total_byte_size for group in groups)
    count = sum(group.num_rows for group in groups)
    yield from file.to_batches(
        columns=names,
        filter=wanted,
        batch_size=max(1, min(MOST_ROWS, BATCH_BYTES * count // max(1, size))),
        batch_readahead=1,
        fragment_readahead=1,
    )


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Translate errors of the file system, or of Arrow, to `Unavailable`."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Unavailable(what, " ".join(reason.split()) or type(error).__name__) from None
