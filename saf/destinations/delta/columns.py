"""A row of a Delta table: `saf.destinations.lake.columns`, by the partitions of its files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
"""The columns that a table is partitioned by, by the setting."""
COUNTED = ("id", "created_at")
"""The columns whose least and greatest value is written beside each file."""


def schema(settings: Delta) -> pa.Schema:
    """Return the columns that a table must have."""
    return columns.schema(settings.promote, day=settings.partition_by == "day")


def rows_of(messages: pa.Table, source: UUID, settings: Delta) -> pa.Table:
    """Return the rows that messages become."""
    day = settings.partition_by == "day"
    return columns.rows_of(messages, source, settings.promote, day=day)


def parts(rows: pa.Table, partition_by: str) -> Iterator[tuple[dict[str, str], pa.Table]]:
    """Give the rows of each partition without the columns that it is named by, and these."""
    if partition_by == "nothing":
        yield {}, rows
        return
    (column,) = BY[partition_by]
    values = rows[column].cast(pa.string())
    for value in pc.unique(values).to_pylist():
        yield {column: value}, rows.filter(pc.equal(values, value)).drop_columns([column])


def statistics(rows: pa.Table) -> str:
    """Return what readers are told of a file, by which they leave out files that they do not need.

    These are the columns that the table's property `delta.dataSkippingStatsColumns` names: some
    readers take a value that is missing for one that says that nothing is there.
    """
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    for name in COUNTED:
        column = rows[name]
        ends = pa.array(pc.min_max(column).values(), column.type)
        ends = moments(ends) if pa.types.is_timestamp(column.type) else ends
        least[name], most[name] = ends.to_pylist()
    return json.dumps(
        {
            "numRecords": rows.num_rows,
            "minValues": least,
            "maxValues": most,
            "nullCount": dict.fromkeys(COUNTED, 0),
        }
    )
