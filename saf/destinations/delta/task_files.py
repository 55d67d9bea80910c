"""Files that tasks of a query write for a table, unknown to readers, and the tasks' reports.

A task that runs again writes new files; a vacuum removes files that no task has reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from deltalake.transaction import AddAction

from saf.destinations.delta import Delta
from saf.destinations.delta.appending import gathered, write
from saf.destinations.delta.files import Files
from saf.destinations.delta.link import Link
from saf.errors import ConfigurationError

WRITTEN = "path string, bytes bigint, partition string, modified bigint, statistics string"
"""Columns of a task's report about its files, with Spark's types."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TaskFiles:
    """Instructions for a task: what to write, and where."""

    settings: Delta
    columns: pa.Schema
    by: Sequence[str]
    counted: Sequence[str]

    def write(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write rows to files that no reader knows; report each file in the columns `WRITTEN`."""
        settings = self.settings
        files = Files(settings.table, settings.folder, settings.options)
        with link_of(settings).errors():
            for rows in gathered(batches):
                rows = rows.select(self.columns.names).cast(self.columns)  # noqa: PLW2901
                for name in self.by:
                    if "" in rows[name].unique().to_pylist():
                        raise ConfigurationError(
                            f"the column {name!r} has an empty text, which Delta takes for NULL in "
                            "a column that its table is partitioned by: partition by another one"
                        )
                yield told(write(files, rows, self.by, self.counted))


def told(files: Iterable[AddAction]) -> pa.RecordBatch:
    """Return a task's report about its files, in the columns `WRITTEN`."""
    rows = [
        (row.path, row.size, json.dumps(row.partition_values), row.modification_time, row.stats)
        for row in files
    ]
    text, number = pa.string(), pa.int64()
    types = zip(zip(*rows, strict=True), (text, number, text, number, text), strict=True)
    names = [part.split()[0] for part in WRITTEN.split(",")]
    return pa.RecordBatch.from_arrays([pa.array(*row) for row in types], names=names)


def heard(rows: Iterable[Sequence[Any]]) -> list[AddAction]:
    """Return the files that tasks have reported."""
    return [
        AddAction(path, size, json.loads(partition), modified, True, statistics)
        for path, size, partition, modified, statistics in rows
    ]


def link_of(settings: Delta) -> Link:
    """Return the table for deltalake."""
    return Link(settings.table, settings, f"the table {settings.table!r}")
