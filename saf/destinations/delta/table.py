"""A Delta table to which chunks are appended as in `saf.destinations.lake.table`.

A chunk becomes one Parquet file per partition, and the commit moves the marks as application
transactions (`saf.destinations.delta.appending`). The commit fails if another process has committed
for the same shards since the table was read, because both set the numbers of the same transactions
(`saf.destinations.delta.marks`). Tasks with other shards, and processes that compact or delete, do
not conflict. `saf lake optimize` removes the files that a killed process leaves.

If a machine loses power during the commit, which is not acknowledged yet, the file of the log may
be empty, which is an empty version, or torn, which deltalake refuses until the file is removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from saf.destinations.delta.appending import commit, sync, write
from saf.destinations.delta.columns import BY, COUNTED, rows_of
from saf.destinations.delta.files import Files
from saf.destinations.delta.link import Link
from saf.destinations.delta.log import Log, file_of
from saf.destinations.delta.making import ready
from saf.destinations.delta.marks import transactions
from saf.destinations.lake.names import DESTINATION
from saf.destinations.lake.state import State
from saf.destinations.lake.table import Change, LakeTable
from saf.errors import Unavailable
from saf.failpoints import fail_point

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

RECENT = 20
"""Latest versions to make durable when the table is opened, whichever process wrote them."""


@dataclass(kw_only=True)
class Opened:
    """The table as read by this process."""

    table: DeltaTable
    files: Files
    log: Log
    identity: UUID
    shape: object
    """Shape of the table when it was checked; see `_shape`."""


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
