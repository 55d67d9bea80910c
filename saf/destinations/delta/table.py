"""A Delta table, to which chunks are appended, each in one commit, exactly once.

A chunk becomes one file of Parquet for each partition, which no reader knows of. Then one commit
makes them rows of the table and, as application transactions, moves the marks: both, or neither. A
process that is killed before it leaves files that nobody reads; `saf lake optimize` removes them.

A commit is a new file of the table's log, whose name another process may have taken; deltalake then
looks at what that one has done, and takes the next name. If that one was about the same shards, it
gives up instead, because both give a number to the same transactions
(`saf.destinations.delta.marks`). The marks are then read again: this process is fenced, or the
messages are stored, or it goes on from there. Tasks with other shards, and readers that compact or
delete, are in nobody's way.

On this machine, files are durable before the commit, and the commit is before it is acknowledged.
If a machine loses its power within the commit, which is not acknowledged yet, the file of the log
may be empty, which is an empty version, or torn, which deltalake refuses until it is removed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from saf.destinations import Chunk, Stored
from saf.destinations.delta.columns import BY, parts, rows_of, statistics
from saf.destinations.delta.files import Files
from saf.destinations.delta.link import Link
from saf.destinations.delta.log import Log, checkpoint_of, file_of
from saf.destinations.delta.making import ready
from saf.destinations.delta.marks import State, state_of, transactions
from saf.destinations.delta.names import DAY, DESTINATION
from saf.destinations.marks import NOTHING, Mark, Place
from saf.destinations.places import Verdict, guarded, judged, refuse
from saf.errors import Unavailable
from saf.failpoints import fail_point

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

ATTEMPTS = 20
"""How often a commit is tried, if others change the same table meanwhile."""

RECENT = 20
"""So many versions are made durable when the table is opened, whoever has written them."""


@dataclass(kw_only=True)
class Opened:
    """The table, as far as this process has read it."""

    table: DeltaTable
    files: Files
    log: Log
    identity: UUID


class Table:
    """A table as a `saf.destinations.Destination`."""

    def __init__(self, name: str, settings: Delta) -> None:
        self.what = f"destination {name!r}"
        self._link = Link(name, settings)
        self._opened: Opened | None = None

    @property
    def settings(self) -> Delta:
        """Its settings."""
        return self._link.settings

    def identity(self) -> UUID:
        """Return the identity of the table, which is made if it is not there."""
        return self._open().identity

    def connect(self) -> None:
        """Make sure that the table is there, and has all columns."""
        self._open()

    def close(self) -> None:
        """Forget what was read."""
        self._opened = None

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored:
        """Store a chunk; see `saf.destinations.Destination`."""
        given = chunk.rows.num_rows
        for _ in range(ATTEMPTS):
            with self._current() as opened:
                epochs, marks = self._places(opened, chunk)
                verdict = judged(
                    self.what, opened.identity, chunk, epochs, marks, exactly_once=exactly_once
                )
                if self._committed(opened, chunk, verdict, epochs, marks):
                    break
        else:
            raise Unavailable(self.what, "others change the same table again and again")
        fail_point("mom_commit")
        if verdict.wrong:
            raise verdict.wrong
        stored = verdict.rows.num_rows
        return Stored(messages=stored, dropped=given - stored, marks=verdict.moved)

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:
        """Return how far the lanes and shards of a chunk are stored; see `Destination.marks`."""
        with self._current() as opened:
            epochs, marks = self._places(opened, chunk)
        refuse(self.what, chunk, epochs, marks)
        return marks

    def _places(self, opened: Opened, chunk: Chunk) -> tuple[dict[Place, int], dict[Place, Mark]]:
        state: State = state_of(chunk.source, opened.log.at(opened.table.version()))
        places = guarded(chunk)
        return (
            {place: state.epochs.get(place[1], 0) for place in places},
            {place: state.marks.get(place, NOTHING) for place in places},
        )

    def _committed(
        self,
        opened: Opened,
        chunk: Chunk,
        verdict: Verdict,
        epochs: Mapping[Place, int],
        marks: Mapping[Place, Mark],
    ) -> bool:
        """Store what a verdict says, in one commit; False if another one has come before it."""
        mine = dict(chunk.batch.epochs)
        epoch_of = {shard: mine[shard] for _, shard in epochs}
        moved = {place: mark for place, mark in verdict.moved.items() if mark != marks[place]}
        rows = verdict.rows if verdict.wrong is None else verdict.rows.slice(0, 0)
        same = all(epoch == mine[shard] for (_, shard), epoch in epochs.items())
        if not rows.num_rows and not moved and same:
            return True
        added = self._write(opened, rows, chunk.source)
        fail_point("mom_insert")
        numbers = transactions(chunk.source, moved, epoch_of)
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
        if self._opened is None:
            table = ready(self._link)
            settings = self.settings
            files = Files(settings.table, settings.folder, settings.options)
            self._opened = Opened(
                table=table,
                files=files,
                log=Log(files),
                identity=UUID(table.metadata().configuration[DESTINATION]),
            )
            with self._link.errors():  # a process may have been killed before it did this
                _sync(self._opened, max(table.version() - RECENT, -1))
        return self._opened

    @contextmanager
    def _current(self) -> Iterator[Opened]:
        """Give the newest version; forget the table after an error, which is translated."""
        opened = self._open()
        try:
            with self._link.errors():
                if not opened.files.there(file_of(opened.table.version())):
                    self.close()  # it was set back while this process had it
                    opened = self._open()
                opened.table.update_incremental()
                yield opened
        except Unavailable:
            self.close()
            raise


def _sync(opened: Opened, before: int) -> None:
    """Make the versions after one durable, whoever has written them."""
    versions = range(before + 1, opened.table.version() + 1)
    opened.files.sync(path for one in versions for path in (file_of(one), checkpoint_of(one)))
