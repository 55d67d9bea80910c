"""A Delta table: chunks are appended to it, the rows are read back, and its files are maintained.

*Appending* (`Table`) follows `saf.destinations.lake.table`. A chunk becomes one Parquet file per
partition, and the commit moves the marks as application transactions
(`saf.destinations.delta.appending`). The commit fails if another process has committed for the same
shards since the table was read, because both set the numbers of the same transactions
(`saf.destinations.delta.log`). Tasks with other shards, and processes that compact or delete, do
not conflict. `saf lake optimize` removes the files that a killed process leaves.

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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from saf.destinations.delta.appending import commit, sync, write
from saf.destinations.delta.files import Files, sizes_of
from saf.destinations.delta.link import Link, removed
from saf.destinations.delta.log import Log, checkpoint_of, file_of, state_of, transactions
from saf.destinations.delta.making import BY, COUNTED, ready, rows_of
from saf.destinations.lake.state import DESTINATION, State
from saf.destinations.lake.table import COLUMNS, Change, LakeTable, reading
from saf.destinations.marks import Known
from saf.destinations.reading import Reading
from saf.errors import Unavailable, UsageError
from saf.failpoints import fail_point

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

RECENT = 20
"""Latest versions to make durable when the table is opened, whichever process wrote them."""
LEAST_HOURS = 1
"""Least hours to keep; longer than any commit takes."""


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
    identity = link.identity()

    def known(source: UUID) -> Known:
        if table is None:
            return State().known(identity)
        with link.errors():
            return state_of(source, link.log().at(table.version())).known(identity)

    def rows(source: UUID) -> pa.Table:
        assert table is not None  # noqa: S101 - not called without a table
        with link.errors():
            of_source = ds.field("source") == str(source)
            return table.to_pyarrow_dataset().to_table(columns=[*COLUMNS], filter=of_source)

    with link.errors():
        gone = table is not None and removed(table)
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
