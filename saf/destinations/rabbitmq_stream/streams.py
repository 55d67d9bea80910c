"""Streams of a RabbitMQ server: a destination that stores messages exactly once.

The server has no transactions, and compares only publishing ids: it drops a message whose id is not
above the last one of its publisher. So the guarantee rests on two things:

- *The id is a function of the message* (`saf.destinations.rabbitmq_stream.journal.publishing_ids`).
  A batch is immutable and in order, so every process sends the same messages in the same order.
  Each writer of a place sends what follows the mark that it has read, without a gap. So a stream
  always holds the beginning of the same sequence of a place, and the rest follows, whichever
  process sends it. The server drops repeats: after a lost answer, from a task that runs twice, from
  an owner that was stopped and wakes up, and from two owners that both send first.
- *The marks are written after their messages* (`saf.destinations.rabbitmq_stream.journal.Journal`).
  A mark that is too low, because a process died in between, only makes the server drop repeats.
  Parked messages keep their place, batch and id, so they are the same messages from there too.

*It is not fenced.* If the journal shows a newer owner before a chunk, the chunk is refused. An
owner that is stopped after it has read the journal, and wakes up later, still sends that chunk. The
server drops the part that the new owner has stored; the new owner need not send the rest. Only
messages that the new owner has disposed of in another way, such as expired ones, are stored too.

Each message is a frame of its own, in the order of the chunk, so a stream has the order of the
chunk, whatever the shards. The server confirms a message when most of its replicas have it.

A connection has 256 numbers for publishers, two for marks. If a chunk has more publishers, they
take turns (`Publishers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.mapping import Mapped, mapped
from saf.destinations.marks import ONCE, Mark, Place
from saf.destinations.places import guarded, judged, noting, places_of, refuse
from saf.destinations.queues import unusable
from saf.destinations.rabbitmq_stream import amqp
from saf.destinations.rabbitmq_stream.connection import VERSION, Command, Connection
from saf.destinations.rabbitmq_stream.journal import (
    BATCH_BITS,
    ROW_BITS,
    Begun,
    publisher,
    publishing_ids,
)
from saf.destinations.rabbitmq_stream.server import Link, errors, open_link
from saf.destinations.texts import BYTES, fixed
from saf.errors import Refused, Rejected, Unavailable
from saf.failpoints import fail_point

if TYPE_CHECKING:
    from saf.destinations.rabbitmq_stream import RabbitmqStream

MOST = 254
"""Most numbers for publishers of messages; the other two are for marks."""
LONGEST = 255
"""Longest name of a stream, in bytes."""
HEAD = np.dtype([
    ("size", ">u4"), ("command", ">u2"), ("version", ">u2"), ("publisher", "u1"),
    ("count", ">u4"), ("id", ">u8"), ("bytes", ">u4"),
])  # fmt: skip
"""Header of a message's frame."""


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """Messages with their publishers and publishing ids."""

    what: Mapped
    bodies: pa.Array
    """Messages in the form that streams hold."""
    publishers: list[tuple[str, str]]
    """Name and stream of each publisher; the server drops nothing from one without a name."""
    which: npt.NDArray[np.int64]
    """For each message, the index of its publisher in ``publishers``."""
    ids: npt.NDArray[np.int64]
    begun: Mapping[Place, Begun]


class Streams:
    """Streams as a `saf.destinations.Destination`."""

    def __init__(self, name: str, settings: RabbitmqStream) -> None:
        self.name = name
        self.what = f"destination {name!r}"
        self.settings = settings
        self._link: Link | None = None
        self._publishers: Publishers | None = None
        self._identity: UUID | None = None

    def identity(self) -> UUID:
        """Return the server's identity; a server without one becomes a destination."""
        self.connect()
        assert self._identity is not None  # noqa: S101 - set by connect()
        return self._identity

    def connect(self) -> None:
        """Connect, and ensure that the server keeps its messages."""
        if self._link is not None:
            return
        self._link = open_link(self.name, self.settings)
        self._publishers = Publishers(self._link.connection)
        try:
            with self._connected() as link:
                link.look()
                self._identity = link.make_identity()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, if one is open."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        """Store a chunk; see `saf.destinations.Destination`."""
        identity, own = self.identity(), dict(chunk.batch.epochs)
        with self._connected() as link:
            journal = link.journal(chunk.source, make=True)
            journal.follow()
            epochs, marks = journal.marks(guarded(chunk))
            verdict = judged(self.what, identity, chunk, epochs, marks, exactly_once=exactly_once)
            numbered = self._numbered(link, chunk, verdict.rows, exactly_once=exactly_once)
            fail_point("mom_insert")
            stored = 0
            if numbered is not None and not verdict.wrong:
                link.make(numbered.what.topics)
                notes = noting(replace(chunk, rows=verdict.rows), marks)
                if notes:
                    journal.move({place: (own[place[1]], mark) for place, mark in notes.items()})
                journal.begin(numbered.begun)
                stored = self._publish(numbered)
            marks |= verdict.moved
            journal.move({place: (own[place[1]], mark) for place, mark in marks.items()})
        fail_point("mom_commit")
        if verdict.wrong:
            return verdict.wrong
        dropped = chunk.rows.num_rows - stored
        return Stored(messages=stored, dropped=dropped, marks=verdict.moved)

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:
        """Return how far the lanes and shards of a chunk are stored; see `Destination.marks`."""
        self.connect()
        with self._connected() as link:
            journal = link.journal(chunk.source)
            journal.follow()
            epochs, marks = journal.marks(guarded(chunk))
        refuse(self.what, chunk, epochs, marks)
        return marks

    def _numbered(
        self, link: Link, chunk: Chunk, rows: pa.Table, *, exactly_once: bool
    ) -> Numbered | None:
        """Return numbered messages in the form that streams hold; None for no messages.

        Raises:
            Rejected: the streams do not accept a message.
        """
        if not rows.num_rows:
            return None
        messages = self._mapped(rows, chunk.source)
        bodies = amqp.messages(messages)
        largest = (pc.max(pc.binary_length(bodies)).as_py() or 0) + Publishers.head
        if largest > link.connection.largest:
            raise Rejected(
                self.what,
                f"it has {largest:,} bytes, more than its server's stream.frame_max "
                f"({link.connection.largest:,})",
            )
        places, place = places_of(rows, chunk.prefix)
        batches = np.full(rows.num_rows, chunk.batch.number, np.int64)
        if "batch" in rows.column_names:
            batches = rows["batch"].to_numpy()
        ids = rows["id"].to_numpy()
        if ids.max() >> ROW_BITS:
            raise unusable(self.what, f"a row's id, {ids.max():,}, is too large", "tell us")
        parts = np.stack([place, batches >> BATCH_BITS, messages.topic])
        streams: dict[Place, set[str]] = {key: set() for key in places}
        for index, topic in np.unique(parts[[0, 2]], axis=1).T.tolist():
            streams[places[index]].add(messages.topics[topic])
        if not exactly_once:  # one publisher per topic, without a name
            parts[:2] = 0
        codes, indices = np.unique(parts, axis=1, return_inverse=True)
        publishers = [
            (
                publisher(chunk.source, places[index], generation) if exactly_once else "",
                messages.topics[topic],
            )
            for index, generation, topic in codes.T.tolist()
        ]
        return Numbered(
            what=messages,
            bodies=bodies,
            publishers=publishers,
            which=indices.reshape(-1),
            ids=publishing_ids(batches, ids),
            begun=self._begun(chunk, rows, place, places, streams),
        )

    def _begun(
        self,
        chunk: Chunk,
        rows: pa.Table,
        place: npt.NDArray[np.int64],
        places: list[Place],
        streams: Mapping[Place, set[str]],
    ) -> dict[Place, Begun]:
        """Return the batch of each place's first message."""
        epochs = dict(chunk.batch.epochs)
        _, first = np.unique(place, return_index=True)
        parked = [name for name in ("batch", "opened_at") if name in rows.column_names]
        batches = {}
        for key, row in zip(
            places, rows.select(["id", *parked]).take(first).to_pylist(), strict=True
        ):
            mark = Mark(
                batch=row.get("batch", chunk.batch.number),
                opened_at=row.get("opened_at", chunk.batch.opened_at),
                acknowledged=chunk.prefix != ONCE,
            )
            batches[key] = Begun(
                epoch=epochs[key[1]], mark=mark, streams=tuple(sorted(streams[key]))
            )
        return batches

    def _mapped(self, rows: pa.Table, source: UUID) -> Mapped:
        messages = mapped(self.what, rows, source, self.settings, prefix=amqp.EVENTS)
        for topic in messages.topics:
            if len(topic.encode()) > LONGEST:
                raise Rejected(self.what, f"its stream's name has more than {LONGEST} bytes")
        return messages

    def _publish(self, numbered: Numbered) -> int:
        """Send messages, and wait until all are confirmed; return the number of new ones."""
        assert self._publishers is not None  # noqa: S101 - connected before
        return self._publishers.publish(
            numbered.publishers,
            numbered.which,
            numbered.ids,
            numbered.bodies,
            self.settings.step_rows,
        )

    @contextmanager
    def _connected(self) -> Iterator[Link]:
        """Yield the link; after an error, translate the error and close the link."""
        link = self._link
        assert link is not None  # noqa: S101 - connected before
        try:
            with errors(self.what, self.settings):
                yield link
        except (Unavailable, Refused):
            self.close()  # its declared publishers are unknown now
            raise


class Publishers:
    """Publishers of one connection, which send messages as frames; at most `MOST` at a time."""

    head = HEAD.itemsize

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers: dict[tuple[str, str], int] = {}
        self._last: dict[tuple[str, str], int] = {}

    def publish(
        self,
        publishers: Sequence[tuple[str, str]],
        which: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        bodies: pa.Array,
        at_once: int,
    ) -> int:
        """Send messages, and wait until all are confirmed; return the number of new ones.

        Args:
            publishers: the name and stream of each publisher.
            which: for each message, the index of its publisher.
            ids: the publishing ids.
            bodies: the messages.
            at_once: messages to send before waiting for those sent earlier.
        """
        new = 0
        for first in range(0, len(publishers), MOST):
            batch = publishers[first : first + MOST]
            numbers, last = self._declared(batch)
            index = which - first
            if len(publishers) > MOST:
                mask = (index >= 0) & (index < len(batch))
                index = np.where(mask, index, 0)
            else:
                mask = np.ones(len(ids), bool)
            mask &= (ids > last[index]) | ~np.array([bool(name) for name, _ in batch])[index]
            new += self._send(numbers[index], ids, bodies, mask, at_once)
            for place, declared in enumerate(batch):
                sent = ids[mask & (index == place)] if declared[0] else ids[:0]
                if len(sent):
                    self._last[declared] = int(sent[-1])
        return new

    def _declared(
        self, publishers: Sequence[tuple[str, str]]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the numbers of publishers, and their last publishing ids."""
        new = [publisher for publisher in publishers if publisher not in self._numbers]
        if len(self._numbers) + len(new) > MOST:
            self._connection.forget([*self._numbers.values()])
            self._numbers, self._last = {}, {}
            new = [*publishers]
        free = iter(sorted({*range(MOST)} - {*self._numbers.values()}))
        declared = dict(zip(free, new, strict=False))
        for number, last in self._connection.declare(declared).items():
            self._numbers[declared[number]] = number
            self._last[declared[number]] = last
        return (
            np.array([self._numbers[publisher] for publisher in publishers], np.int64),
            np.array([self._last[publisher] for publisher in publishers], np.int64),
        )

    def _send(
        self,
        numbers: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        bodies: pa.Array,
        mask: npt.NDArray[np.bool_],
        at_once: int,
    ) -> int:
        """Send the messages that ``mask`` selects as frames."""
        if not mask.all():
            numbers, ids, bodies = numbers[mask], ids[mask], bodies.filter(pa.array(mask))
        count = len(ids)
        if not count:
            return 0
        sizes = np.asarray(pc.binary_length(bodies))
        heads = np.zeros(count, HEAD)
        heads["size"] = sizes + HEAD.itemsize - 4
        heads["command"], heads["version"], heads["count"] = Command.PUBLISH, VERSION, 1
        heads["publisher"], heads["id"], heads["bytes"] = numbers, ids, sizes
        frames = pc.binary_join_element_wise(fixed(heads), bodies, pa.scalar(b"", BYTES))
        ends = np.frombuffer(frames.buffers()[1], np.int64)[frames.offset :][: count + 1]
        data = memoryview(frames.buffers()[2])
        start = target = self._connection.confirmed
        for first in range(0, count, at_once):
            last = min(first + at_once, count)
            self._connection.send(data[ends[first] : ends[last]])
            self._connection.confirm(target)
            target = start + last
        self._connection.confirm(start + count)
        return count
