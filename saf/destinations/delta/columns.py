"""A row of a Delta table: `saf.destinations.lake.columns`, split by the partitions of its files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations.lake import columns
from saf.destinations.lake.names import DAY
from saf.destinations.texts import moments

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

BY: Mapping[str, tuple[str, ...]] = {"day": (DAY,), "service": ("to_service",), "nothing": ()}
"""Columns that a table is partitioned by, by the setting."""
COUNTED = ("id", "created_at")
"""Columns whose minimum and maximum are recorded for each file."""


def schema(settings: Delta) -> pa.Schema:
    """Return the columns that a table must have."""
    return columns.schema(settings.promote, day=settings.partition_by == "day")


def rows_of(messages: pa.Table, source: UUID, settings: Delta) -> pa.Table:
    """Return messages as rows."""
    day = settings.partition_by == "day"
    return columns.rows_of(messages, source, settings.promote, day=day)


def parts(rows: pa.Table, by: Sequence[str]) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    """Yield the partition's values, and its rows without these columns, for each partition.

    >>> rows = pa.table({"day": [7, None, 7], "id": [1, 2, 3]})
    >>> [(values, part["id"].to_pylist()) for values, part in parts(rows, ["day"])]
    [({'day': '7'}, [1, 3]), ({'day': None}, [2])]
    """
    if not by:
        yield {}, rows
        return
    column, *rest = by
    values = rows[column].cast(pa.string())
    for value in pc.unique(values).to_pylist():
        mask = pc.is_null(values) if value is None else pc.equal(values, value)
        for values_of_rest, part in parts(rows.filter(mask).drop_columns([column]), rest):
            yield {column: value, **values_of_rest}, part


def statistics(rows: pa.Table, counted: Sequence[str]) -> str:
    """Return the statistics of a file, by which readers skip files that they do not need.

    They cover the columns in the table's property `delta.dataSkippingStatsColumns`: some readers
    take a missing value to mean that a file has none.
    """
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    for name in counted:
        column = rows[name]
        if column.null_count == rows.num_rows:
            continue
        ends = _written(pa.array(pc.min_max(column).values(), column.type))
        least[name], greatest[name] = ends.to_pylist()
    return json.dumps(
        {
            "numRecords": rows.num_rows,
            "minValues": least,
            "maxValues": greatest,
            "nullCount": {name: rows[name].null_count for name in counted},
        }
    )


def _written(ends: pa.Array) -> pa.Array:
    """Return dates and times in the format of a table's log.

    >>> _written(pa.array([7], pa.timestamp("us"))).to_pylist()
    ['1970-01-01T00:00:00.000007']
    >>> _written(pa.array([7], pa.date32())).to_pylist(), _written(pa.array([7])).to_pylist()
    (['1970-01-08'], [7])
    """
    if pa.types.is_timestamp(ends.type):
        texts = moments(ends)
        return texts if ends.type.tz else pc.utf8_rtrim(texts, "Z")
    return ends.cast(pa.string()) if pa.types.is_date(ends.type) else ends
