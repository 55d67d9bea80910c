"""A Delta table: made, appended to chunk by chunk, read back, and maintained.

*Making* (`ready`) creates a missing table. A table that saf did not create is used as it is, if it
can have saf's columns. Missing columns are added: Delta changes no files for this, and older rows
are NULL there. If another task changes the table at the same time, `ready` tries again, `ATTEMPTS`
times at most. A table is refused, with a cure, if saf's rows do not fit: if its partitions or its
types differ, or if it requires values, constraints or features that saf does not provide. An
archive of logs is refused, too. No existing column is changed.

*Appending* (`Table`) follows `saf.destinations.lake.table`. A chunk becomes one Parquet file per
partition, and the commit moves the marks as application transactions
(`saf.destinations.delta.files`). The commit fails if another process has committed for the same
shards since the table was read, because both set the numbers of the same transactions. Tasks with
other shards, and processes that compact or delete, do not conflict. `saf lake optimize` removes the
files that a killed process leaves.

If a machine loses power during the commit, which is not acknowledged yet, the file of the log may
be empty, which is an empty version, or torn, which deltalake refuses until the file is removed.

*Reading back* (`read`) opens one version of the table, and returns the rows of a source in it.

*Maintenance* (`optimize`) merges small files into large ones, and removes files that are not
needed. Compaction is a commit of its own: it changes no row, and forwarders can append at the same
time. Afterwards, the order of rows in files is meaningless: ``id`` gives a key's order.

A file is removed when it is older than ``keep_hours`` and either was replaced that long ago, or was
left by a process that was killed before its commit. Until then, readers of older versions find
their files, and so do commits that are under way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable, Field, Schema
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction

from saf.destinations import Reading
from saf.destinations.delta.files import (
    Files,
    Log,
    checkpoint_of,
    commit,
    file_of,
    sizes_of,
    sync,
    transactions,
    write,
)
from saf.destinations.delta.link import Link, removed
from saf.destinations.lake import ARCHIVE, DAY, DESTINATION, State
from saf.destinations.lake.table import COLUMNS, Change, LakeTable, reading, rows_of, schema
from saf.destinations.settings import unusable
from saf.errors import Unavailable, UsageError
from saf.failpoints import fail_point

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

RECENT = 20
"""Latest versions to make durable when the table is opened, whichever process wrote them."""
LEAST_HOURS = 1
"""Least hours to keep; longer than any commit takes."""

BY: Mapping[str, tuple[str, ...]] = {"day": (DAY,), "service": ("to_service",), "nothing": ()}
"""Columns that a table is partitioned by, by the setting."""
COUNTED = ("id", "created_at")
"""Columns whose minimum and maximum are recorded for each file."""
PROPERTIES = {
    # readers may skip files only by these columns, because only these are counted
    "delta.dataSkippingStatsColumns": ",".join(COUNTED),
    # a task first reads the log since the last checkpoint
    "delta.checkpointInterval": "20",
}
NOT_KEPT = {
    "columnMapping": "columns have other names in its files (column mapping)",
    "generatedColumns": "it has columns that are computed",
    "identityColumns": "it has columns that number themselves",
    "rowTracking": "it numbers its rows (row tracking)",
    "icebergCompatV1": "its files are read as Iceberg, too",
    "icebergCompatV2": "its files are read as Iceberg, too",
}
"""Table features that require more of a writer, each with the reason why saf refuses it."""
ATTEMPTS = 5


@dataclass(kw_only=True)
class Opened:
    """The table as read by this process."""

    table: DeltaTable
    files: Files
    log: Log
    identity: UUID
    shape: object
    """Shape of the table when it was checked; see `_shape`."""


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """Result of optimizing a table."""

    table: str
    version: int
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    removed: int
    """Number of unneeded files that were removed."""


class Table(LakeTable[Opened]):
    """A table as a `saf.destinations.Destination`."""

    def __init__(self, name: str, settings: Delta) -> None:
        super().__init__(name)
        self._link = Link(name, settings)

    @property
    def settings(self) -> Delta:
        """Settings of the table."""
        return self._link.settings

    def _identity(self, opened: Opened) -> UUID:
        return opened.identity

    def _state(self, opened: Opened, source: UUID) -> State:
        return self._link.state(opened.log, opened.table.version(), source)

    def _commit(self, opened: Opened, change: Change) -> bool:
        added = self._write(opened, change.rows, change.source)
        fail_point("mom_insert")
        by = BY[self.settings.partition_by]
        numbers = transactions(change.source, change.moved, change.epochs)
        if commit(self.what, opened.table, opened.files, added, by=by, numbers=numbers):
            return True
        opened.files.remove(file.path for file in added)
        return False

    def _write(self, opened: Opened, messages: pa.Table, source: UUID) -> list[AddAction]:
        """Write the files of a chunk; return their entries for the log."""
        if not messages.num_rows:
            return []
        rows = rows_of(messages, source, self.settings)
        return [*write(opened.files, rows, BY[self.settings.partition_by], COUNTED)]

    def _open(self) -> Opened:
        table = ready(self._link)
        settings = self.settings
        files = Files(settings.table, settings.folder, settings.options)
        opened = Opened(
            table=table,
            files=files,
            log=Log(files),
            identity=UUID(table.metadata().configuration[DESTINATION]),
            shape=_shape(table),
        )
        with self._link.errors():  # a killed process may not have done this
            sync(table, files, max(table.version() - RECENT, -1))
        return opened

    @contextmanager
    def _current(self) -> Iterator[Opened]:
        opened = self._ready()
        try:
            with self._link.errors():
                if not opened.files.there(file_of(opened.table.version())):
                    self.close()  # set back while open here
                    opened = self._ready()
                opened.table.update_incremental()
                if _shape(opened.table) != opened.shape:
                    self.close()  # altered while open here
                    opened = self._ready()
                yield opened
        except Unavailable:
            self.close()
            raise


def _shape(table: DeltaTable) -> object:
    """Return a value that changes with the table itself, its columns or its partitions."""
    metadata = table.metadata()
    return metadata.id, table.schema(), metadata.partition_columns


@contextmanager
def read(name: str, settings: Delta) -> Iterator[Reading]:
    """Open the newest version of the table for reading."""
    link = Link(name, settings)
    table = link.load()

    def rows(source: UUID) -> pa.Table:
        assert table is not None  # noqa: S101 - not called without a table
        with link.errors():
            of_source = ds.field("source") == str(source)
            return table.to_pyarrow_dataset().to_table(columns=[*COLUMNS], filter=of_source)

    with link.errors():
        gone = table is not None and removed(table)
    known, identity = partial(link.known_of, table), link.identity_of(table)
    yield reading(name, identity, rows if table else None, known, removed=gone)


def optimize(name: str, settings: Delta, *, keep_hours: int, dry_run: bool) -> Optimized:
    """Compact a table, and remove files that are not needed; ``dry_run``: change nothing.

    Raises:
        UsageError: the table does not exist yet, or ``keep_hours`` is too low.
        Unavailable: the table cannot be read or changed.
    """
    if keep_hours < LEAST_HOURS:
        raise UsageError(
            f"{keep_hours} hours is too short: a forwarder may be writing files that are not in "
            f"the table yet. Keep {LEAST_HOURS} or more"
        )
    link = Link(name, settings)
    table = link.load()
    if table is None:
        raise UsageError(f"{link.what} has no table yet: nothing was forwarded there")
    with link.errors():
        version, old_sizes = table.version(), sizes_of(table)
        if not dry_run:
            table.optimize.compact()
        removed_files = table.vacuum(
            retention_hours=keep_hours,
            dry_run=dry_run,
            enforce_retention_duration=False,
            full=True,
        )
        table.update_incremental()
        files = Files(settings.table, settings.folder, settings.options)
        versions = range(version + 1, table.version() + 1)
        files.sync(path for one in versions for path in (file_of(one), checkpoint_of(one)))
        new_sizes = sizes_of(table)
    return Optimized(
        table=settings.table,
        version=table.version(),
        files_before=len(old_sizes),
        files_after=len(new_sizes),
        bytes_before=sum(old_sizes),
        bytes_after=sum(new_sizes),
        removed=len(removed_files),
    )


def ready(link: Link) -> DeltaTable:
    """Return the table with all columns; create it if it does not exist.

    Raises:
        Refused: saf's messages cannot be appended to the table.
        Unavailable: the table cannot be created or changed now.
    """
    for _ in range(ATTEMPTS):
        table = link.load()
        with link.errors():
            try:
                if table is None:
                    _make(link)
                    continue
                check(link, table)
                if not _complete(link, table):
                    return table
            except DeltaError as error:
                last = error  # another task may have done the same
    raise Unavailable(link.what, f"the table cannot be made ready: {link.said(last)}")


def _make(link: Link) -> None:
    settings = link.settings
    DeltaTable.create(
        settings.table,
        schema(settings),
        partition_by=[*BY[settings.partition_by]],
        description="messages, appended by saf",
        configuration={DESTINATION: str(link.first_identity()), **PROPERTIES},
        storage_options=settings.options,
        raise_if_key_not_exists=False,
    )


def _complete(link: Link, table: DeltaTable) -> bool:
    """Add missing columns or the identity; return True if the table has changed."""
    existing = {field.name for field in table.schema().fields}
    missing = [
        field
        for field in Schema.from_arrow(schema(link.settings)).fields
        if field.name not in existing
    ]
    if missing:
        table.alter.add_columns(missing)
    elif DESTINATION not in table.metadata().configuration:
        identity = {DESTINATION: str(link.first_identity())}
        table.alter.set_table_properties(identity, raise_if_not_exists=False)
    else:
        return False
    return True


def check(link: Link, table: DeltaTable) -> None:
    """Check that rows can be appended to a table as they are.

    Raises:
        Refused: they cannot.
    """
    settings, target = link.settings, schema(link.settings)
    if ARCHIVE in table.metadata().configuration:
        raise unusable(
            link.what,
            "its table is an archive of logs, where messages are that `saf purge` took",
            "name another table",
        )
    partitions = tuple(table.metadata().partition_columns)
    if partitions != BY[settings.partition_by]:
        names = {columns: name for name, columns in BY.items()}
        raise unusable(
            link.what,
            f"its table is partitioned by {', '.join(partitions) or 'nothing'}, not by "
            f"{settings.partition_by}",
            f'set partition_by = "{names[partitions]}" in saf.toml'
            if partitions in names
            else "name another table: it is one that saf has not made",
        )
    existing = {field.name.lower(): field for field in table.schema().fields}
    for field in Schema.from_arrow(target).fields:
        column = existing.pop(field.name.lower(), field)
        if column.type != field.type or column.name != field.name:
            raise unusable(
                link.what,
                f"the column {column.name!r} of its table is {type_of(column)}, and "
                f"{field.name!r} is to be {type_of(field)}",
                "promote it by another name, or with its own type"
                if field.name in settings.promote
                else "name another table",
            )
    check_others(link.what, table, [*existing.values()])


def check_others(what: str, table: DeltaTable, others: Collection[Field]) -> None:
    """Check that rows need only their own columns; ``others`` are the table's remaining columns.

    Raises:
        Refused: rows need more.
    """
    required = [field.name for field in others if not field.nullable]
    if required:
        raise unusable(
            what,
            f"the column {required[0]!r} of its table must have a value",
            "ALTER TABLE … ALTER COLUMN … DROP NOT NULL, or name another table",
        )
    properties = table.metadata().configuration
    features = {*(table.protocol().writer_features or ())}
    if properties.get("delta.columnMapping.mode", "none") != "none":
        features.add("columnMapping")
    if any("delta.generationExpression" in (field.metadata or {}) for field in others):
        features.add("generatedColumns")
    for feature, why in NOT_KEPT.items():
        if feature in features:
            raise unusable(what, why, "name another table, which saf makes itself")
    if any(name.startswith("delta.constraints.") for name in properties):
        raise unusable(
            what,
            "its table has constraints, which saf does not check",
            "drop them, or check the messages where they are read",
        )


def type_of(field: object) -> str:
    """Return the type of a column in Delta's words."""
    return str(getattr(field, "type", field)).removeprefix('PrimitiveType("').removesuffix('")')
