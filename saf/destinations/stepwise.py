"""Stepwise: how a chunk is stored at a queue that takes only so much at a time, exactly once.

A step is some of a chunk's messages, in their order, with the marks after them. The queue stores it
whole or not at all, and only if the marks are still what this side has read: it compares and sets.
So each step compares the marks with what the one before leaves, and after a step that was not
stored, none of the following is stored either. If another process has moved the marks meanwhile,
they are read again: then it is the newer owner, or had the same chunk, of which the rest is stored.

So a chunk whose storing was interrupted is stored in part, up to the marks; given again, the rest
follows. A rejected message is found before the first step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar
from uuid import UUID

import numpy as np
import pyarrow as pa

from saf.destinations import Chunk, Stored
from saf.destinations.mapping import Mapped
from saf.destinations.marks import Mark, Place
from saf.destinations.places import Verdict, guarded, judged, last_of, refuse
from saf.destinations.queues import readable
from saf.destinations.written import read, written
from saf.errors import Unavailable
from saf.failpoints import fail_point

ATTEMPTS = 20
"""How often the marks are read anew, if others move them meanwhile."""

CURE = "restore their values; or remove them, and saf rebase sends missing messages"
"""For marks that somebody else has written."""

Link = TypeVar("Link")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Some of a chunk's messages, and the marks of the places that they need."""

    what: Mapped | None
    """The messages; None if only marks move."""
    before: Mapping[Place, str]
    """What the marks must be, as `saf.destinations.written` writes them."""
    after: Mapping[Place, str]
    """What they become."""

    @property
    def count(self) -> int:
        """How many messages there are."""
        return self.what.count if self.what else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Which of a chunk's rows are one step, and the places whose marks it compares and sets."""

    first: int
    count: int
    places: Sequence[Place]


class Stepwise(ABC, Generic[Link]):
    """A `saf.destinations.Destination`; a subclass knows its queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.what = f"destination {name!r}"
        self._link: Link | None = None
        self._identity: UUID | None = None

    # A subclass's

    @abstractmethod
    def _open(self) -> Link:
        """Connect."""

    @abstractmethod
    def _prepare(self, link: Link) -> UUID:
        """Make sure that the queue keeps what it is given; return its identity."""

    @abstractmethod
    def _shut(self, link: Link) -> None:
        """Give up a connection."""

    @abstractmethod
    def _errors(self) -> AbstractContextManager[None]:
        """Translate the errors of the client."""

    @abstractmethod
    def _read(self, link: Link, source: UUID, places: Sequence[Place]) -> list[str]:
        """Return the written marks of some places."""

    @abstractmethod
    def _mapped(self, rows: pa.Table, source: UUID) -> Mapped:
        """Return what the queue gets of messages.

        Raises:
            Rejected: it does not take one of them.
        """

    @abstractmethod
    def _cuts(self, chunk: Chunk, rows: pa.Table) -> Iterator[Cut]:
        """Cut the rows that are left of a chunk into steps; at least one."""

    @abstractmethod
    def _send(self, link: Link, source: UUID, steps: Iterator[Step]) -> list[tuple[int, bool]]:
        """Send steps; return the number of messages of each, and whether it was stored.

        If one was not, but the last one was, another process has stored the same messages.
        """

    # Every queue's

    def identity(self) -> UUID:
        """Return what the server says; one without an identity becomes a destination."""
        self.connect()
        assert self._identity is not None  # noqa: S101 - learnt at the first contact
        return self._identity

    def connect(self) -> None:
        """Connect, and make sure that the server keeps what it is given."""
        if self._link is not None:
            return
        self._link = self._open()
        try:
            with self._connected() as link:
                self._identity = self._prepare(link)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up the connection, if there is one."""
        link, self._link = self._link, None
        if link is not None:
            self._shut(link)

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored:
        """Store a chunk; see `saf.destinations.Destination`."""
        identity, given = self.identity(), chunk.rows.num_rows
        stored, moved = 0, dict[Place, Mark]()
        with self._connected() as link:
            for _ in range(ATTEMPTS):
                said, epochs, marks = self._marks(link, chunk)
                verdict = judged(
                    self.what, identity, chunk, epochs, marks, exactly_once=exactly_once
                )
                what = None if verdict.wrong else self._mapped(verdict.rows, chunk.source)
                fail_point("mom_insert")
                steps = self._steps(chunk, verdict, what, said, marks)
                answers = self._send(link, chunk.source, steps)
                stored += sum(count for count, fine in answers if fine)
                moved |= verdict.moved
                if answers[-1][1]:
                    break
                if what and not exactly_once:  # the marks do not drop what is stored
                    chunk = replace(chunk, rows=_left(verdict.rows, answers))
            else:
                raise Unavailable(self.what, "others move the same marks again and again")
        fail_point("mom_commit")
        if verdict.wrong:
            raise verdict.wrong
        return Stored(messages=stored, dropped=given - stored, marks=moved)

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:
        """Return how far the lanes and shards of a chunk are stored; see `Destination.marks`."""
        self.connect()
        with self._connected() as link:
            _, epochs, marks = self._marks(link, chunk)
        refuse(self.what, chunk, epochs, marks)
        return marks

    def _marks(
        self, link: Link, chunk: Chunk
    ) -> tuple[dict[Place, str], dict[Place, int], dict[Place, Mark]]:
        """Return what the queue has of the places that a chunk needs, also as epochs and marks."""
        places = guarded(chunk)
        with readable(self.what, "its marks", CURE):
            said = dict(zip(places, self._read(link, chunk.source, places), strict=True))
            found = {place: read(text) for place, text in said.items()}
        return (
            said,
            {place: epoch for place, (epoch, _) in found.items()},
            {place: mark for place, (_, mark) in found.items()},
        )

    def _steps(
        self,
        chunk: Chunk,
        verdict: Verdict,
        what: Mapped | None,
        said: Mapping[Place, str],
        marks: Mapping[Place, Mark],
    ) -> Iterator[Step]:
        """Give the steps of a chunk."""
        mine = dict(chunk.batch.epochs)
        rows = verdict.rows if what else verdict.rows.slice(0, 0)
        for cut in self._cuts(chunk, rows):
            last = cut.first + cut.count == rows.num_rows
            done = replace(chunk, rows=rows.slice(cut.first, cut.count))
            marks = {**marks, **(verdict.moved if last else last_of(done, marks))}
            after = {place: written(mine[place[1]], marks[place]) for place in cut.places}
            yield Step(
                what=what.slice(cut.first, cut.count) if what and cut.count else None,
                before={place: said[place] for place in cut.places},
                after=after,
            )
            said = {**said, **after}

    @contextmanager
    def _connected(self) -> Iterator[Link]:
        """Give the connection; give it up after an error, which is translated."""
        link = self._link
        assert link is not None  # noqa: S101 - connected before
        try:
            with self._errors():
                yield link
        except Unavailable:
            self.close()
            raise


def _left(rows: pa.Table, answers: Sequence[tuple[int, bool]]) -> pa.Table:
    """Return those of some rows whose steps were not stored."""
    counts, fine = zip(*answers, strict=True)
    return rows.filter(pa.array(~np.repeat(np.array(fine, bool), counts)))
