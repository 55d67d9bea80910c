"""A table of a lakehouse, to which chunks are appended, each in one commit, exactly once.

A chunk becomes files that no reader knows of. Then one commit makes them rows of the table and
moves the marks: both, or neither. A process that is killed before it leaves files that nobody
reads.

Another commit may come first. Then the marks are read again: this process is fenced, or the
messages are stored, or it goes on from there.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar
from uuid import UUID

import pyarrow as pa

from saf.destinations import Chunk, Stored
from saf.destinations.lake.state import State
from saf.destinations.marks import NOTHING, Mark, Place
from saf.destinations.places import Verdict, guarded, judged, refuse
from saf.errors import Unavailable
from saf.failpoints import fail_point

ATTEMPTS = 100
"""How often a commit is tried, if others change the same table meanwhile."""
PAUSE_SECONDS = 0.005
"""The first attempts wait for half as long on average, and the later ones up to ten times that."""

Opened = TypeVar("Opened")


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one commit does."""

    source: UUID
    rows: pa.Table
    """The messages that become rows, as the engine reads them."""
    moved: Mapping[Place, Mark]
    """The marks that change."""
    epochs: Mapping[int, int]
    """The epoch of each shard that the commit is about, whether it changes or not."""


class LakeTable(ABC, Generic[Opened]):
    """A `saf.destinations.Destination`; a kind says how its table is opened and committed to."""

    def __init__(self, name: str) -> None:
        self.what = f"destination {name!r}"
        self._opened: Opened | None = None

    # A kind's own

    @abstractmethod
    def _open(self) -> Opened:
        """Open the table, made if it is not there, with all columns."""

    @abstractmethod
    def _identity(self, opened: Opened) -> UUID:
        """Return the table's identity."""

    @abstractmethod
    def _current(self) -> AbstractContextManager[Opened]:
        """Give the newest version; forget the table after an error, which is translated."""

    @abstractmethod
    def _state(self, opened: Opened, source: UUID) -> State:
        """Return what a version of the table knows of a source."""

    @abstractmethod
    def _commit(self, opened: Opened, change: Change) -> bool:
        """Make a change, durably; False, and no file left, if another commit has come before it.

        It calls ``fail_point("mom_insert")`` before the commit.
        """

    # A destination

    def identity(self) -> UUID:
        """Return the identity of the table, which is made if it is not there."""
        return self._identity(self._ready())

    def connect(self) -> None:
        """Make sure that the table is there, and has all columns."""
        self._ready()

    def close(self) -> None:
        """Forget what was read."""
        self._opened = None

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored:
        """Store a chunk; see `saf.destinations.Destination`."""
        given = chunk.rows.num_rows
        for attempt in range(ATTEMPTS):
            with self._current() as opened:
                epochs, marks = self._places(opened, chunk)
                identity = self._identity(opened)
                verdict = judged(
                    self.what, identity, chunk, epochs, marks, exactly_once=exactly_once
                )
                change = _change(chunk, verdict, epochs, marks)
                if change is None or self._commit(opened, change):
                    break
            time.sleep(random.uniform(0, PAUSE_SECONDS * min(attempt + 1, 10)))  # noqa: S311
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

    def _ready(self) -> Opened:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _places(self, opened: Opened, chunk: Chunk) -> tuple[dict[Place, int], dict[Place, Mark]]:
        state = self._state(opened, chunk.source)
        places = guarded(chunk)
        return (
            {place: state.epochs.get(place[1], 0) for place in places},
            {place: state.marks.get(place, NOTHING) for place in places},
        )


def _change(
    chunk: Chunk, verdict: Verdict, epochs: Mapping[Place, int], marks: Mapping[Place, Mark]
) -> Change | None:
    """Return what a verdict changes; None if it changes nothing."""
    mine = dict(chunk.batch.epochs)
    moved = {place: mark for place, mark in verdict.moved.items() if mark != marks[place]}
    rows = verdict.rows if verdict.wrong is None else verdict.rows.slice(0, 0)
    same = all(epoch == mine[shard] for (_, shard), epoch in epochs.items())
    if not rows.num_rows and not moved and same:
        return None
    return Change(
        source=chunk.source,
        rows=rows,
        moved=moved,
        epochs={shard: mine[shard] for _, shard in epochs},
    )
