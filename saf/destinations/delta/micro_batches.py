"""Micro-batches of a stream, appended to a table, each in one commit together with its number.

1. The query's driver asks for a micro-batch (`MicroBatches.begin`). A missing table is created
   before the first micro-batch. Missing columns are added; older rows are NULL there.
2. Tasks write files that readers do not know (`TaskFiles.write`), and report them (`told`).
3. The driver collects the reports (`heard`), and makes the files rows (`MicroBatches.commit`).

The number of the last micro-batch is an application transaction of the table, as in Delta's own
sink for Spark. So a micro-batch that is repeated, because its query was killed before it knew of
the commit, is recognised. If two queries append the same micro-batch, the second query finds it in
the table.

Spark numbers micro-batches without gaps, and a micro-batch without rows is a commit, too. So a
table that lacks a micro-batch was removed, restored or set back; the query is refused, and never
continued silently.

A task that runs again writes new files; a vacuum removes files that no task has reported. In a
table that is created here, the statistics of a file cover numbers, dates and times, so that readers
can skip files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Field, Schema
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction
from pyarrow import types

from saf.destinations.delta import Delta
from saf.destinations.delta.files import Files, commit, gathered, sync, write
from saf.destinations.delta.link import Link
from saf.destinations.delta.table import check_others, type_of
from saf.destinations.settings import unusable
from saf.errors import ConfigurationError, NotThisStream, Unavailable
from saf.log.disk import make_folder

WRITTEN = "path string, bytes bigint, partition string, modified bigint, statistics string"
"""Columns of a task's report about its files, with Spark's types."""
ATTEMPTS = 20
"""Most attempts at a commit while other processes change the same table."""
RECENT = 3
"""Latest versions to make durable before a micro-batch, or when the table has it already."""
COUNTED = "delta.dataSkippingStatsColumns"
COUNTS = "delta.dataSkippingNumIndexedCols"
COUNTABLE = (types.is_integer, types.is_date, types.is_timestamp)
IN_NAMES = (types.is_string, types.is_integer, types.is_boolean, types.is_date)
PLAIN = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")


class MicroBatches:
    """A table that the driver of a query appends to."""

    def __init__(self, settings: Delta, by: Sequence[str]) -> None:
        self._settings = settings
        self._by = tuple(by)
        self._link = link_of(settings)
        self._files = Files(settings.table, settings.folder, settings.options)

    def begin(self, application: str, number: int, columns: pa.Schema) -> TaskFiles | None:
        """Return what tasks need to write a micro-batch; None if the table has it already.

        The table is created before the first one.

        Raises:
            NotThisStream: the table lacks the previous micro-batch, or has later ones.
            Refused: such rows cannot be appended to the table.
            Unavailable: the table does not answer.
        """
        columns = plain(columns, self._by)
        error: DeltaError | None = None
        for _ in range(ATTEMPTS):
            table = self._table(number, columns)
            if not self._fresh(table, application, number):
                return None
            with self._link.errors():
                if not (missing := lacking(self._link.what, table, columns, self._by)):
                    # the process that made or altered it may have died right after that
                    sync(table, self._files, max(table.version() - RECENT, -1))
                    counted = _counted(table, columns)
                    return TaskFiles(
                        settings=self._settings, columns=columns, by=self._by, counted=counted
                    )
                try:
                    table.alter.add_columns(missing)
                except DeltaError as other:  # another query may have done the same
                    error = other
        raise self._not_ready(error)

    def commit(self, application: str, number: int, written: Sequence[AddAction]) -> bool:
        """Make the tasks' files rows of the table; False if it has this micro-batch already.

        Raises the same errors as `begin`.
        """
        for _ in range(ATTEMPTS):
            table = self._table(number)
            if not self._fresh(table, application, number):
                self._files.remove(file.path for file in written)
                return False
            numbers = [(application, number)]
            with self._link.errors():
                if commit(
                    self._link.what, table, self._files, written, by=self._by, numbers=numbers
                ):
                    return True
        raise Unavailable(self._link.what, "others change the same table again and again")

    def _table(self, number: int, columns: pa.Schema | None = None) -> DeltaTable:
        """Load the table; with columns, create it if the first micro-batch is next."""
        folder, error = self._settings.folder, None
        may_make = columns is not None and number == 0
        if folder and may_make:
            with self._link.errors():
                make_folder(folder)
        for _ in range(ATTEMPTS):
            if table := self._link.load():
                return table
            if not may_make:
                raise self._set_back(number, "is missing")
            with self._link.errors():
                try:
                    self._make(columns)
                except DeltaError as other:
                    error = other
        raise self._not_ready(error)

    def _fresh(self, table: DeltaTable, application: str, number: int) -> bool:
        """Return True if a micro-batch is the next one, False if the table has it."""
        with self._link.errors():
            last = table.transaction_version(application)
        if last == number:
            # its commit may not be durable yet, if the process was killed right after it
            with self._link.errors():
                sync(table, self._files, max(table.version() - RECENT, -1))
            return False
        if last is not None and last > number:
            raise NotThisStream(
                f"{self._link.what} has micro-batch {last:,} of {application!r} already, and the "
                f"query comes with {number:,}: its checkpoint was set back, or is a new one with "
                "the application of another. Begin with a new checkpointLocation, without naming "
                "an application, or naming a new one"
            )
        if number > 0 and last != number - 1:
            count = "none" if last is None else f"no more than {last:,}"
            raise self._set_back(number, f"has {count} of {application!r}")
        return True

    def _set_back(self, number: int, how: str) -> NotThisStream:
        return NotThisStream(
            f"{self._link.what} {how}, and the query comes with micro-batch {number:,}: the table "
            "was removed or restored, or it is another one. Bring it back as it was; or begin with "
            "a new checkpointLocation, where what the query has committed does not come again"
        )

    def _make(self, columns: pa.Schema) -> None:
        names = [name for name in _countable(columns) if name not in self._by]
        # readers may skip files only by these columns, because only these are counted
        counted = {COUNTED: ",".join(names)} if names else {COUNTS: "0"}
        DeltaTable.create(
            self._settings.table,
            columns,
            partition_by=[*self._by],
            configuration=counted,
            storage_options=self._settings.options,
        )

    def _not_ready(self, error: DeltaError | None) -> Unavailable:
        why = self._link.said(error) if error else "others change it again and again"
        return Unavailable(self._link.what, f"the table cannot be made ready: {why}")


def plain(columns: pa.Schema, by: Sequence[str]) -> pa.Schema:
    """Return columns as a table stores them: all are nullable.

    Raises:
        ConfigurationError: Delta lacks a type, or the table cannot be partitioned like this.
    """
    for field in columns:
        try:
            Schema.from_arrow(pa.schema([field]))
        except Exception:
            raise ConfigurationError(
                f"the column {field.name!r} is a {field.type}, which Delta does not have: cast it"
            ) from None
    for name in by:
        if name not in columns.names:
            raise ConfigurationError(
                f"partition_by: no column {name!r}, only {', '.join(columns.names)}"
            )
        if not any(test(columns.field(name).type) for test in IN_NAMES):
            raise ConfigurationError(
                f"partition_by: the column {name!r} is a {columns.field(name).type}; a table is "
                "partitioned by texts, whole numbers, truth values and dates"
            )
    if len({*by}) == len(columns):
        raise ConfigurationError("partition_by names all columns, and no file can be without any")
    return pa.schema([field.with_nullable(True).remove_metadata() for field in columns])


def lacking(what: str, table: DeltaTable, columns: pa.Schema, by: Sequence[str]) -> list[Field]:
    """Return the columns that a table lacks.

    Raises:
        Refused: such rows cannot be appended to the table.
    """
    partitions = table.metadata().partition_columns
    if partitions != [*by]:
        raise unusable(
            what,
            f"it is partitioned by {', '.join(partitions) or 'nothing'}, and not by "
            f"{', '.join(by) or 'nothing'}",
            f"set partition_by={partitions!r}, or name another table",
        )
    existing = {field.name.lower(): field for field in table.schema().fields}
    missing = []
    for field in Schema.from_arrow(columns).fields:
        column = existing.pop(field.name.lower(), None)
        if column is None:
            missing.append(field)
        elif column.type != field.type or column.name != field.name:
            raise unusable(
                what,
                f"its column {column.name!r} is {type_of(column)}, and {field.name!r} comes as "
                f"{type_of(field)}",
                "cast or rename what the query gives, or name another table",
            )
    check_others(what, table, [*existing.values()])
    return missing


def _countable(columns: pa.Schema) -> list[str]:
    return [
        field.name
        for field in columns
        if any(test(field.type) for test in COUNTABLE) and PLAIN.fullmatch(field.name)
    ]


def _counted(table: DeltaTable, columns: pa.Schema) -> list[str]:
    metadata = table.metadata()
    names = [column for column in _countable(columns) if column not in metadata.partition_columns]
    setting = metadata.configuration.get(COUNTED)
    return names if setting is None else [name for name in setting.split(",") if name in names]


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
