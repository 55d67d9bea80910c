"""A Delta table, to which chunks are appended as `saf.destinations.lake.table` says.

A chunk becomes one file of Parquet for each partition, and the commit moves the marks as
application transactions.

A commit is a new file of the table's log, whose name another process may have taken; deltalake then
looks at what that one has done, and takes the next name. If that one was about the same shards, it
gives up instead, because both give a number to the same transactions
(`saf.destinations.delta.marks`). Tasks with other shards, and readers that compact or delete, are
in nobody's way.

On this machine, files are durable before the commit, and the commit is before it is acknowledged.
If a machine loses its power within the commit, which is not acknowledged yet, the file of the log
may be empty, which is an empty version, or torn, which deltalake refuses until it is removed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from saf.destinations.delta.columns import BY, parts, rows_of, statistics
from saf.destinations.delta.files import Files
from saf.destinations.delta.link import Link
from saf.destinations.delta.log import Log, checkpoint_of, file_of
from saf.destinations.delta.making import ready
from saf.destinations.delta.marks import state_of, transactions
from saf.destinations.lake.names import DAY, DESTINATION
from saf.destinations.lake.state import State
from saf.destinations.lake.table import Change, LakeTable
from saf.errors import Unavailable
from saf.failpoints import fail_point

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

RECENT = 20
"""So many versions are made durable when the table is opened, whoever has written them."""


@dataclass(kw_only=True)
class Opened:
    """The table, as far as this process has read it."""

    table: DeltaTable
    files: Files
    log: Log
    identity: UUID


class Table(LakeTable[Opened]):
    """A table as a `saf.destinations.Destination`."""

    def __init__(self, name: str, settings: Delta) -> None:
        super().__init__(name)
        self._link = Link(name, settings)

    @property
    def settings(self) -> Delta:
        """Its settings."""
        return self._link.settings

    def _identity(self, opened: Opened) -> UUID:
        return opened.identity

    def _state(self, opened: Opened, source: UUID) -> State:
        return state_of(source, opened.log.at(opened.table.version()))

    def _commit(self, opened: Opened, change: Change) -> bool:
        added = self._write(opened, change.rows, change.source)
        fail_point("mom_insert")
        numbers = transactions(change.source, change.moved, change.epochs)
        before = opened.table.version()
        try:
            opened.table.create_write_transaction(
                [*added],
                "append",
                opened.table.schema(),
                partition_by=[*BY[self.settings.partition_by]],
                commit_properties=CommitProperties(
                    app_transactions=[Transaction(name, number) for name, number in numbers]
                ),
            )
        except CommitFailedError:
            opened.files.remove(one.path for one in added)
            return False
        opened.table.update_incremental()
        after = opened.table.version()
        if after == before or not all(map(opened.files.there, map(file_of, (before, after)))):
            # deltalake makes the folders that it needs, such as where no disk is mounted any more
            raise Unavailable(self.what, "its table was taken away during a commit")
        _sync(opened, before)
        return True

    def _write(self, opened: Opened, messages: pa.Table, source: UUID) -> list[AddAction]:
        """Write the files of a chunk; return what the log says of them."""
        if not messages.num_rows:
            return []
        added = []
        rows = rows_of(messages, source, self.settings)
        for values, part in parts(rows, self.settings.partition_by):
            out = pa.BufferOutputStream()
            pq.write_table(part, out, compression="zstd", store_schema=False)
            content = out.getvalue().to_pybytes()
            # a day is also the name of a folder; a service may have any name
            folder = "".join(f"{name}={value}/" for name, value in values.items() if name == DAY)
            path = f"{folder}{uuid4()}.parquet"
            opened.files.write(path, content)
            now = time.time_ns() // 1_000_000
            added.append(AddAction(path, len(content), values, now, True, statistics(part)))
        return added

    def _open(self) -> Opened:
        table = ready(self._link)
        settings = self.settings
        files = Files(settings.table, settings.folder, settings.options)
        opened = Opened(
            table=table,
            files=files,
            log=Log(files),
            identity=UUID(table.metadata().configuration[DESTINATION]),
        )
        with self._link.errors():  # a process may have been killed before it did this
            _sync(opened, max(table.version() - RECENT, -1))
        return opened

    @contextmanager
    def _current(self) -> Iterator[Opened]:
        opened = self._ready()
        try:
            with self._link.errors():
                if not opened.files.there(file_of(opened.table.version())):
                    self.close()  # it was set back while this process had it
                    opened = self._ready()
                opened.table.update_incremental()
                yield opened
        except Unavailable:
            self.close()
            raise


def _sync(opened: Opened, before: int) -> None:
    """Make the versions after one durable, whoever has written them."""
    versions = range(before + 1, opened.table.version() + 1)
    opened.files.sync(path for one in versions for path in (file_of(one), checkpoint_of(one)))
