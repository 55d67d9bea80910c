"""Stepwise: store a chunk exactly once at a queue that takes only a part of a chunk at a time.

A step is some of a chunk's messages, in order, with the marks after them. The queue stores a step
all or nothing, and only if the marks are still those that this process has read (compare and set).
Each step compares the marks with those that the previous step leaves, so after a step that failed,
none of the following steps is stored either. If another process has moved the marks, they are read
again: that process is the newer owner, or it had the same chunk, and the rest is stored here.

So a chunk whose storing was interrupted is stored up to the marks; the rest follows when the chunk
is given again. Rejected messages are found before the first step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import numpy as np
import pyarrow as pa

from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.mapping import Mapped
from saf.destinations.marks import Mark, Place, read, written
from saf.destinations.places import Verdict, guarded, judged, last_of, refuse
from saf.destinations.queues import Link, Queue, Settings
from saf.destinations.settings import readable
from saf.errors import Unavailable
from saf.failpoints import fail_point

ATTEMPTS = 20
"""Most reads of the marks while other processes move them."""

CURE = "restore their values; or remove them, and saf rebase sends missing messages"
"""Cure for marks that were not written by saf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Some of a chunk's messages, and the marks of the places that they need."""

    what: Mapped | None
    """The messages; None if only marks move."""
    before: Mapping[Place, str]
    """Expected marks, in the form of `saf.destinations.marks.written`."""
    after: Mapping[Place, str]
    """New marks."""

    @property
    def count(self) -> int:
        """Number of messages."""
        return self.what.count if self.what else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Rows of a chunk that form one step, and the places whose marks the step compares and sets."""

    first: int
    count: int
    places: Sequence[Place]


class Stepwise(Queue[Link, Settings]):
    """A `saf.destinations.Destination`; a subclass implements its queue."""

    # For subclasses

    @abstractmethod
    def _read(self, link: Link, source: UUID, places: Sequence[Place]) -> list[str]:
        """Return the written marks of places."""

    @abstractmethod
    def _mapped(self, rows: pa.Table, source: UUID) -> Mapped:
        """Return messages in the queue's form.

        Raises:
            Rejected: the queue does not accept a message.
        """

    @abstractmethod
    def _cuts(self, chunk: Chunk, rows: pa.Table) -> Iterator[Cut]:
        """Cut the remaining rows of a chunk into steps; at least one."""

    @abstractmethod
    def _send(self, link: Link, source: UUID, steps: Iterator[Step]) -> list[tuple[int, bool]]:
        """Send steps; return for each its number of messages, and whether it was stored.

        If a step was not stored but the last one was, another process stored the same messages.
        """

    # For every queue

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        """Store a chunk; see `saf.destinations.Destination`."""
        identity, total = self.identity(), chunk.rows.num_rows
        stored, moved = 0, dict[Place, Mark]()
        with self._connected() as link:
            for _ in range(ATTEMPTS):
                texts, epochs, marks = self._marks(link, chunk)
                verdict = judged(
                    self.what, identity, chunk, epochs, marks, exactly_once=exactly_once
                )
                messages = None if verdict.wrong else self._mapped(verdict.rows, chunk.source)
                fail_point("mom_insert")
                steps = self._steps(chunk, verdict, messages, texts, marks)
                answers = self._send(link, chunk.source, steps)
                stored += sum(count for count, fine in answers if fine)
                moved |= verdict.moved
                if answers[-1][1]:
                    break
                if messages and not exactly_once:  # marks do not drop repeats
                    chunk = replace(chunk, rows=_left(verdict.rows, answers))
            else:
                raise Unavailable(self.what, "others move the same marks again and again")
        fail_point("mom_commit")
        if verdict.wrong:
            return verdict.wrong
        return Stored(messages=stored, dropped=total - stored, marks=moved)

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
        """Return the marks of the places that a chunk needs: as written, as epochs, as marks."""
        places = guarded(chunk)
        with readable(self.what, "its marks", CURE):
            texts = dict(zip(places, self._read(link, chunk.source, places), strict=True))
            states = {place: read(text) for place, text in texts.items()}
        return (
            texts,
            {place: epoch for place, (epoch, _) in states.items()},
            {place: mark for place, (_, mark) in states.items()},
        )

    def _steps(
        self,
        chunk: Chunk,
        verdict: Verdict,
        messages: Mapped | None,
        texts: Mapping[Place, str],
        marks: Mapping[Place, Mark],
    ) -> Iterator[Step]:
        """Yield the steps of a chunk."""
        own = dict(chunk.batch.epochs)
        rows = verdict.rows if messages else verdict.rows.slice(0, 0)
        for cut in self._cuts(chunk, rows):
            last = cut.first + cut.count == rows.num_rows
            part = replace(chunk, rows=rows.slice(cut.first, cut.count))
            marks = {**marks, **(verdict.moved if last else last_of(part, marks))}
            new = {place: written(own[place[1]], marks[place]) for place in cut.places}
            yield Step(
                what=messages.slice(cut.first, cut.count) if messages and cut.count else None,
                before={place: texts[place] for place in cut.places},
                after=new,
            )
            texts = {**texts, **new}


def _left(rows: pa.Table, answers: Sequence[tuple[int, bool]]) -> pa.Table:
    """Return the rows whose steps were not stored."""
    counts, fine = zip(*answers, strict=True)
    return rows.filter(pa.array(~np.repeat(np.array(fine, bool), counts)))
