"""A Delta table, to which chunks are appended, each in one commit, exactly once.

A chunk becomes one file of Parquet for each partition, and one commit makes them rows of the table
and, as application transactions, moves the marks (`saf.destinations.delta.appending`). A process
that is killed before it leaves files that nobody reads; `saf lake optimize` removes them.

If another process has committed the same shards meanwhile, the commit fails, because both give a
number to the same transactions (`saf.destinations.delta.marks`). The marks are then read again:
this process is fenced, or the messages are stored, or it goes on from there. Tasks with other
shards, and readers that compact or delete, are in nobody's way.

If a machine loses its power within the commit, which is not acknowledged yet, the file of the log
may be empty, which is an empty version, or torn, which deltalake refuses until it is removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from saf.destinations import Chunk, Stored
from saf.destinations.delta.appending import commit, sync, write
from saf.destinations.delta.columns import BY, COUNTED, rows_of
from saf.destinations.delta.files import Files
from saf.destinations.delta.link import Link
from saf.destinations.delta.log import Log, file_of
from saf.destinations.delta.making import ready
from saf.destinations.delta.marks import State, state_of, transactions
from saf.destinations.delta.names import DESTINATION
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
        by = BY[self.settings.partition_by]
        numbers = transactions(chunk.source, moved, epoch_of)
        if commit(self.what, opened.table, opened.files, added, by=by, numbers=numbers):
            return True
        opened.files.remove(one.path for one in added)
        return False

    def _write(self, opened: Opened, messages: pa.Table, source: UUID) -> list[AddAction]:
        """Write the files of a chunk; return what the log says of them."""
        if not messages.num_rows:
            return []
        rows = rows_of(messages, source, self.settings)
        return [*write(opened.files, rows, BY[self.settings.partition_by], COUNTED)]

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
                sync(table, files, max(table.version() - RECENT, -1))
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
