"""Journal of a source: a stream of its marks, and the publishing ids by which repeats are dropped.

The marks are read before messages and written after them. An entry of the stream is JSON, with some
of these members:

    done      for each place, its epoch and mark, in the form of `saf.destinations.marks.written`
    begun     for each place, the same for the batch that begins now, with the batch's streams
    streams   all streams that messages of the source went to
    all       this entry, with the entries just before it, contains everything that is known
    read      a unique word; its writer reads up to it

Marks only rise. So the journal's value for a place is the highest mark, in whatever order several
processes have written, and an entry that is written twice changes nothing.

``begun`` is written before the first message of a batch. It tells the batch from one with the same
number in an earlier life of a source that was set back. It counts as the mark, without a position,
if messages of the batch exist, which the last publishing ids of its publishers show (`is_of`).

A process that reads to the end, and has read much, writes all that it knows again. It stores
beside the stream the number of the entry from which everything is known. Others read from there.
Earlier entries are deleted by the server when the stream gets too large (``max-length-bytes``).

The server keeps the last publishing id of each publisher of a stream, and drops messages that are
not above it. So the id is a function of the message's place, batch and row id only: every process,
with any chunk and any epoch, gives a message the same publisher and the same id. If an old and
a new owner both send first, they number their messages alike.

Row ids do not rise across batches, so the batch has the higher bits of the id:

    publisher   SOURCE/SHARD/LANE/GENERATION      the generation is the batch / 2**15
    id          the batch % 2**15, and in the 48 bits below it the row's id

The journal fences no writer: see `saf.destinations.rabbitmq_stream.streams`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import numpy.typing as npt

from saf.destinations.marks import NOTHING, Known, Mark, Place, read, written
from saf.destinations.rabbitmq_stream.connection import (
    FIRST,
    NO_STREAM,
    Connection,
    StreamError,
    at,
    text_of,
)
from saf.destinations.settings import readable

KEPT_BYTES, SEGMENT_BYTES = 32 << 20, 4 << 20
"""Size limits of the stream and of its segments."""
ENOUGH_BYTES = 256 << 10
"""Write everything again after reading this many bytes, or the size of everything if larger."""
AT_ONCE = 2_000
"""Places per entry."""
CURE = (
    "only saf may write there: choose other marks in saf.toml, and saf rebase sends missing "
    "messages"
)
CARRIED = "saf"
"""Name under which the number of the entry to read from is stored."""
NOBODY = 255
"""Number of the publisher of entries. It has no name, so the server drops no entry."""

ROW_BITS, BATCH_BITS = 48, 15
"""Bits of a publishing id for the row's id and for the batch."""
LONGEST = 255
"""Longest name of a publisher that a server accepts, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A batch of a place that may have messages in its streams."""

    epoch: int
    mark: Mark
    """Mark of the batch, without a position."""
    streams: tuple[str, ...]


@dataclass(kw_only=True)
class Journal:
    """One source's marks, as one connection has read and written them."""

    connection: Connection
    stream: str
    source: UUID
    done: dict[Place, tuple[int, Mark]] = field(default_factory=dict)
    begun: dict[Place, Begun] = field(default_factory=dict)
    streams: set[str] = field(default_factory=set)
    """All streams that messages of the source went to."""
    _next: int | None = None
    """Number of the entry after the last one that was read."""
    _bytes: int = 0
    """Bytes read since everything was last written again."""
    _whole: int = field(default_factory=lambda: ENOUGH_BYTES)
    _declared: bool = False

    # Reading

    def follow(self) -> None:
        """Read to the end; a stream that does not exist has nothing to read."""
        word = uuid4().hex
        try:
            self._say({"read": word})
        except StreamError as error:
            if error.code != NO_STREAM:
                raise
            return
        if self._next is None:
            known = self.connection.offset(CARRIED, self.stream)
            start = FIRST if known is None else at(known)
        else:
            start = at(self._next)
        with self.connection.chunks(self.stream, start) as following:
            found, first = False, 0
            while not found and (chunk := following()) is not None:
                first = chunk.first
                for entry in chunk.entries:
                    found = self._learn(entry) == word or found
                self._next = chunk.first + len(chunk.entries)
        if self._bytes > self._whole:
            self._carry(first)

    def marks(self, places: Iterable[Place]) -> tuple[dict[Place, int], dict[Place, Mark]]:
        """Return the epochs and marks of places, including begun batches that have messages."""
        places = list(places)
        stored = self._is_there([place for place in places if self._pending(place)])
        epochs, marks = {}, {}
        for place in places:
            epoch, mark = self.done.get(place, (0, NOTHING))
            batch = self.begun.get(place)
            epochs[place] = max(epoch, batch.epoch) if batch else epoch
            if batch and place in stored:
                mark = replace(batch.mark, set_aside_at=mark.set_aside_at)
            marks[place] = mark
        return epochs, marks

    def known(self, identity: UUID) -> Known:
        """Return all marks of the source."""
        places = sorted({*self.done, *self.begun})
        epochs, marks = self.marks(places)
        of: dict[int, int] = {}
        for (_, shard), epoch in epochs.items():
            of[shard] = max(epoch, of.get(shard, 0))
        marks = {place: mark for place, mark in marks.items() if place in self.done or mark.batch}
        return Known(destination=identity, marks=marks, epochs=of)

    def _pending(self, place: Place) -> bool:
        """Return True if a batch has begun, and its mark has not moved since."""
        batch, (_, done) = self.begun.get(place), self.done.get(place, (0, NOTHING))
        return batch is not None and batch.mark.number > done.number

    def _is_there(self, places: list[Place]) -> set[Place]:
        """Return the places with messages of their begun batch in a stream."""
        pairs = [(place, stream) for place in places for stream in self.begun[place].streams]
        batches = {place: self.begun[place].mark.batch for place in places}
        last = self.connection.sequences(
            (publisher(self.source, place, generation(batches[place])), stream)
            for place, stream in pairs
        )
        return {
            place
            for (place, _), sequence in zip(pairs, last, strict=True)
            if is_of(sequence, batches[place])
        }

    def _learn(self, entry: bytes) -> str | None:
        """Apply an entry; return its word, if it has one."""
        self._bytes += len(entry)
        with readable(f"stream {self.stream!r}", "an entry", CURE):
            content = json.loads(text_of(entry))
            for name, text in content.get("done", {}).items():
                self._have_done(_place(name), *read(text))
            for name, (text, streams) in content.get("begun", {}).items():
                epoch, mark = read(text)
                batch = Begun(epoch=epoch, mark=mark, streams=tuple(streams))
                self._have_begun(_place(name), batch)
            self.streams.update(content.get("streams", ()))
            if "all" in content:
                self._bytes, self._whole = 0, max(ENOUGH_BYTES, content["all"])
            word: str | None = content.get("read")
            return word

    def _have_done(self, place: Place, epoch: int, mark: Mark) -> None:
        before, known = self.done.get(place, (0, NOTHING))
        higher = mark if mark.number >= known.number else known
        asides = [one.set_aside_at for one in (mark, known) if one.set_aside_at]
        higher = replace(higher, set_aside_at=max(asides, default=None))
        self.done[place] = (max(epoch, before), higher)

    def _have_begun(self, place: Place, batch: Begun) -> None:
        known = self.begun.get(place)
        if known is not None and batch.mark == known.mark:
            epoch, streams = max(batch.epoch, known.epoch), {*known.streams, *batch.streams}
            batch = Begun(epoch=epoch, mark=batch.mark, streams=tuple(sorted(streams)))
        if known is None or batch.mark.number >= known.mark.number:
            self.begun[place] = batch
        self.streams.update(batch.streams)

    # Writing

    def begin(self, places: Mapping[Place, Begun]) -> None:
        """Record that batches begin, unless that is known; durable on return."""
        new = {}
        for place, batch in places.items():
            known = self.begun.get(place)
            if known is None or known.mark != batch.mark or {*batch.streams} - {*known.streams}:
                new[place] = batch
                self._have_begun(place, batch)
        for part in _parts(new):
            self._say({
                "begun": {_name(place): _begun(self.begun[place]) for place in part}
            })  # fmt: skip

    def move(self, marks: Mapping[Place, tuple[int, Mark]]) -> None:
        """Move marks; durable on return."""
        moved = {place: pair for place, pair in marks.items() if self.done.get(place) != pair}
        for place, (epoch, mark) in moved.items():
            self._have_done(place, epoch, mark)
        for part in _parts(moved):
            self._say({"done": {_name(place): written(*self.done[place]) for place in part}})

    def _carry(self, first: int) -> None:
        """Write all that is known; from entry ``first``, the stream then contains everything."""
        parts: list[dict[str, Any]] = [
            {"done": {_name(place): written(*self.done[place]) for place in places}}
            for places in _parts(self.done)
        ]
        pending = {place: batch for place, batch in self.begun.items() if self._pending(place)}
        parts += [
            {"begun": {_name(place): _begun(pending[place]) for place in places}}
            for places in _parts(pending)
        ]
        size = sum(len(json.dumps(part)) for part in parts)
        for part in [*parts, {"streams": sorted(self.streams), "all": size}]:
            self._say(part)
        self.connection.keep_offset(CARRIED, self.stream, first)

    def _say(self, fields: Mapping[str, Any]) -> None:
        connection = self.connection
        if not self._declared:
            connection.forget([NOBODY])
            connection.declare({NOBODY: ("", self.stream)})
            self._declared = True
        connection.add(NOBODY, json.dumps(fields, separators=(",", ":")))


def _begun(batch: Begun) -> list[Any]:
    return [written(batch.epoch, batch.mark), list(batch.streams)]


def _parts(places: Mapping[Place, Any]) -> Iterator[list[Place]]:
    order = sorted(places)
    for first in range(0, len(order), AT_ONCE):
        yield order[first : first + AT_ONCE]


def _name(place: Place) -> str:
    """Return the name of a place.

    >>> _name(("retry", 7))
    '7:retry'
    """
    lane, shard = place
    return f"{shard}:{lane}"


def _place(name: str) -> Place:
    shard, _, lane = name.partition(":")
    return lane, int(shard)


def publisher(source: UUID, place: Place, generation: int) -> str:
    """Return the name of a publisher, with a hash if the lane's name is too long.

    >>> publisher(UUID(int=7), ("retry", 3), 0)
    '00000000-0000-0000-0000-000000000007/3/retry/0'
    >>> len(publisher(UUID(int=7), ("route:" + "ü" * 200, 3), 0))
    106
    """
    lane, shard = place
    name = f"{source}/{shard}/{lane}/{generation}"
    if len(name.encode()) <= LONGEST:
        return name
    return f"{source}/{shard}/#{sha256(lane.encode()).hexdigest()}/{generation}"  # no lane has a #


def generation(batch: int) -> int:
    """Return the generation of a batch."""
    return batch >> BATCH_BITS


def publishing_ids(
    batches: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the id of each message.

    >>> low, high = publishing_ids(np.array([1, 2]), np.array([900, 3]))
    >>> bool(low < high)
    True

    Raises:
        OverflowError: a row's id has more than 48 bits.
    """
    if len(rows) and rows.max() >> ROW_BITS:
        raise OverflowError(f"row {rows.max():,} has more than {ROW_BITS} bits")
    return ((batches & ((1 << BATCH_BITS) - 1)) << ROW_BITS) | rows


def is_of(publishing_id: int, batch: int) -> bool:
    """Return True if ``publishing_id`` belongs to ``batch`` or later, in the same generation.

    >>> last = int(publishing_ids(np.array([5]), np.array([900]))[0])
    >>> is_of(last, 5), is_of(last, 6), is_of(0, 1)
    (True, False, False)
    """
    return publishing_id >> ROW_BITS >= batch & ((1 << BATCH_BITS) - 1) and publishing_id > 0
