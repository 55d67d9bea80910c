"""Transactions of a Kafka cluster: topics, filled a step at a time, exactly once.

`saf.destinations.stepwise` explains steps. Here, a step is a transaction, which ends with the marks
of its places: readers of committed messages see all of it, or nothing.

Before a step, this process has ensured that no other process can end a transaction with messages of
its shards (`saf.destinations.kafka.server`), and has read the marks after that. So the marks stay
as they are until this transaction ends, or until another process fences it. Then nothing of the
step is stored, and the marks are read again.

A process that begins transactions with a name again ends the open one, by aborting it; if its end
had begun, by waiting for the end. So nothing is repaired here: after an error, the client is thrown
away, and the next one begins again and reads the marks. The marks also replace an answer that got
lost.

Python makes one call per message, which copies its headers: librdkafka's call for many messages
takes no headers. On one core, with 200 bytes and eight headers, the call takes 3.1 µs (2.4 without
headers, and 5 or more if headers are bytes or a dict); making the lists of headers adds 0.6 µs. A
header that all messages share is made once.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from saf.destinations import Chunk, Reading
from saf.destinations.kafka import topic_name
from saf.destinations.kafka.client import FENCED, HARMLESS, UNDECIDED, settings_of
from saf.destinations.kafka.server import OPEN, Link, mark_key, owner_key, topic_key
from saf.destinations.mapping import Mapped, held_of, mapped, said_of, source_of, texts_of
from saf.destinations.marks import Mark, Place, known_of, shards_of
from saf.destinations.marks import read as read_mark
from saf.destinations.places import guarded
from saf.destinations.stepwise import Cut, Step, Stepwise
from saf.destinations.tables import Held, TableReading
from saf.errors import CannotReadBack, Rejected, Unavailable

if TYPE_CHECKING:
    from saf.destinations.kafka import Kafka
    from saf.destinations.kafka.encoding import Encoding

NOT_KNOWN_YET = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})
"""Codes for a new topic that some brokers do not know yet."""
TOO_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})

BATCH_BYTES = 1_000_000
LINGER_MS = 20
PATIENCE_SECONDS = 1.0
"""Wait for the end of the marks before fencing processes that may keep it back."""
TURNS = 20
PAUSE_SECONDS = 0.05
"""A fenced process pauses so that the other can end first, longer each time."""

LONGEST = 249
"""Longest name of a topic."""
EVENTS = "ce_"
"""Prefix of CloudEvents attributes, as the binding for Kafka defines it."""
BATCH_FRAME, MESSAGE_FRAME, HEADER_FRAME = 61, 30, 10
"""Most bytes that Kafka's format adds to a batch, a message and a header."""

Record = tuple[str, bytes, str | None, list[tuple[str, str]]]
"""Topic, body, key and headers of a message."""

AT_ONCE = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Transaction:
    """Contents of one transaction."""

    source: UUID
    marks: Mapping[Place, str] = field(default_factory=dict)
    what: Mapped | None = None
    claims: Sequence[int] = ()
    """Shards to claim."""
    topics: Sequence[str] = ()
    """Topics that are new to messages of this source."""


class Transactions(Stepwise[Link, "Kafka"]):
    """Topics as a `saf.destinations.Destination`."""

    def __init__(self, name: str, settings: Kafka) -> None:
        super().__init__(name, settings)
        self._producer: Producer | None = None
        self._id = ""
        self._batch_bytes = BATCH_BYTES
        self._fenced = 0
        self._encodes: Encoding | None = None

    def _prepare(self, link: Link) -> UUID:
        return link.make_identity()

    def close(self) -> None:
        """Close the connection, if one is open."""
        self._producer = None
        encoding, self._encodes = self._encodes, None
        if encoding is not None:
            encoding.close()
        super().close()

    # Marks

    def _marks(
        self, link: Link, chunk: Chunk
    ) -> tuple[dict[Place, str], dict[Place, int], dict[Place, Mark]]:
        """Return the marks of a chunk's places, once no other process can move them."""
        source, own = chunk.source, dict(chunk.batch.epochs)
        owner, shards = min(own), shards_of(guarded(chunk))
        until = time.monotonic() + self.settings.bounds.statement_seconds
        log, turn, reached = link.marks, 0, False
        while True:
            result = super()._marks(link, chunk)
            if any(epoch > own[shard] for (_, shard), epoch in result[1].items()):
                return result  # the caller refuses the chunk
            missing = log.not_owned(source, shards, owner)
            if reached and not missing and not log.others(source, shards, owner):
                return result
            if time.monotonic() > until:
                raise Unavailable(
                    self.what, f"others claim its shards, or {self.settings.marks_topic} {OPEN}"
                )
            _pause(turn // 2)
            turn += 1
            self._begin_as(link, source, owner)
            if missing and not self._claim(link, source, missing):
                continue
            for rival in sorted(log.others(source, shards, owner)):
                link.producer(self._name(source, rival))
                log.fenced(source, rival)
            reached = log.read(PATIENCE_SECONDS)

    def _begin_as(self, link: Link, source: UUID, owner: int) -> None:
        """Open a client with transactions of a name, which fences earlier clients of the name."""
        name = self._name(source, owner)
        if self._producer is not None and self._id == name:
            return
        self._producer, self._id = None, name
        self._producer = link.producer(
            name,
            **{
                "partitioner": "murmur2_random",
                "compression.type": self.settings.compression,
                "linger.ms": LINGER_MS,
                "batch.size": self._batch_bytes,
                "message.max.bytes": 1_000_000_000,
                "queue.buffering.max.messages": self.settings.step_rows + 100_000,
                "queue.buffering.max.kbytes": 2_000_000,
            },
        )

    def _name(self, source: UUID, owner: int) -> str:
        return transactional_id(self.identity(), source, owner)

    def _claim(self, link: Link, source: UUID, shards: Sequence[int]) -> bool:
        """Write claims on shards; return False if this process was fenced."""
        return self._ended(link, Transaction(source=source, claims=shards))

    def _read(self, link: Link, source: UUID, places: Sequence[Place]) -> list[str]:
        return [link.marks.text(source, place) for place in places]

    # Messages

    def _mapped(self, rows: pa.Table, source: UUID) -> Mapped:
        link = self._link
        assert link is not None  # noqa: S101 - connected before
        messages = mapped(self.what, rows, source, self.settings, prefix=EVENTS)
        if self.settings.encodes and messages.count:
            messages = self._encoding().encoded(messages)
        limits = link.limits(topics(self.what, messages, self.settings.marks_topic))
        if messages.count:
            check(self.what, messages, limits)
        if (least := min([BATCH_BYTES, *limits.values()])) < self._batch_bytes:
            self._batch_bytes, self._producer = least, None  # small enough for all topics
        return messages

    def _encoding(self) -> Encoding:
        if self._encodes is None:
            self._encodes = self.settings.encoding(self.name)
        return self._encodes

    def _cuts(self, chunk: Chunk, rows: pa.Table) -> Iterator[Cut]:
        places, at_once = guarded(chunk), self.settings.step_rows
        for first in range(0, max(rows.num_rows, 1), at_once):
            yield Cut(first=first, count=min(at_once, rows.num_rows - first), places=places)

    def _send(self, link: Link, source: UUID, steps: Iterator[Step]) -> list[tuple[int, bool]]:
        answers: list[tuple[int, bool]] = []
        proceed = True
        for step in steps:
            success = False
            if proceed:
                moved = {p: text for p, text in step.after.items() if text != step.before[p]}
                new = [] if step.what is None else self._new_topics(link, source, step.what)
                success = self._ended(
                    link,
                    Transaction(source=source, marks=moved, what=step.what, topics=new),
                )
                proceed = success
                if not success:
                    success = self._is_there(link, source, step)
            answers.append((step.count, success))
        if answers[-1][1]:
            self._fenced = 0
        else:
            _pause(self._fenced)
            self._fenced += 1
        return answers

    def _is_there(self, link: Link, source: UUID, step: Step) -> bool:
        """Return True if a step is stored after all, because it ended before it was fenced.

        Otherwise messages sent at most once would be sent again. The marks decide. A newer owner's
        marks prove nothing: then this owner is refused.
        """
        after = {place: read_mark(text) for place, text in step.after.items()}
        places = [
            p for p, (_, m) in after.items() if m.number > read_mark(step.before[p])[1].number
        ]
        if step.what is None or not places or not self._id:
            return False
        self._begin_as(link, source, int(self._id.rpartition("-")[2]))
        link.read()
        stored = {place: read_mark(link.marks.text(source, place)) for place in places}
        return all(
            epoch == after[p][0] and mark.number >= after[p][1].number
            for p, (epoch, mark) in stored.items()
        )

    def _new_topics(self, link: Link, source: UUID, messages: Mapped) -> list[str]:
        used = map(topic_name, messages.topics)
        return sorted({*used} - link.marks.topics[source])

    def _ended(self, link: Link, transaction: Transaction) -> bool:
        """Store messages and marks in one transaction; return True if they are known to be stored.

        Raises:
            KafkaException: it is unknown whether they were stored.
        """
        if transaction.what is None and not (transaction.marks or transaction.claims):
            return True
        producer = self._producer
        if producer is None:
            return False  # begin again, and read the marks
        topic = self.settings.marks_topic
        try:
            producer.begin_transaction()
            if transaction.what is not None:
                self._produce(producer, transaction.what)
            for name in transaction.topics:
                producer.produce(topic, b"1", topic_key(transaction.source, name), partition=0)
            for shard in transaction.claims:
                owner = self._id.rpartition("-")[2]
                producer.produce(topic, owner, owner_key(transaction.source, shard), partition=0)
            for place, text in transaction.marks.items():
                producer.produce(topic, text, mark_key(transaction.source, place), partition=0)
            link.commit(producer)
        except KafkaException as error:
            self._producer = None
            code = error.args[0].code()
            if code in TOO_LARGE:
                raise Rejected(self.what, self.settings.redact(error.args[0].str())) from None
            if code in FENCED | NOT_KNOWN_YET | UNDECIDED:
                return False
            raise
        except BaseException:
            self._producer = None
            raise
        return True

    def _produce(self, producer: Producer, messages: Mapped) -> None:
        """Pass messages to the client. It sends them in the background; commit reports failures."""
        give: Any = producer.produce
        for topic, body, key, headers in records(messages):
            while True:
                try:
                    give(topic, body, key, headers=headers)
                except BufferError:
                    producer.poll(0.1)
                else:
                    break


def _pause(turn: int) -> None:
    if turn:
        time.sleep(random.uniform(0, PAUSE_SECONDS * min(turn, TURNS)))  # noqa: S311 - no secret


def check(where: str, what: Mapped, limits: Mapping[str, int]) -> None:
    """Raise if a topic does not accept one of these messages.

    Raises:
        Rejected: a message is larger than its topic's limit.
    """
    sizes = _lengths(what.body)
    if (keys := what.each("key")) is not None:
        sizes = sizes + _lengths(keys)
    fixed = 0
    for name, values in what.headers.items():
        if isinstance(values, str):
            fixed += len(name.encode()) + len(values.encode()) + HEADER_FRAME
        else:
            sizes = sizes + _lengths(values) + len(name.encode()) + HEADER_FRAME
    own = [
        sum(
            len(name.encode()) + len(value.encode()) + HEADER_FRAME
            for name, value in headers.items()
        )
        for headers in what.own
    ]
    sizes = sizes + np.array(own, np.int64)[what.which] + fixed + BATCH_FRAME + MESSAGE_FRAME
    largest = np.array([limits[topic_name(topic)] for topic in what.topics], np.int64)[what.topic]
    if (over := np.flatnonzero(sizes > largest)).size:
        size, limit = int(sizes[over[0]]), int(largest[over[0]])
        raise Rejected(where, f"it has {size:,} bytes, more than its topic takes ({limit:,})")


def topics(where: str, what: Mapped, marks_topic: str) -> list[str]:
    """Return the messages' topics, as valid names in Kafka.

    Raises:
        Rejected: a topic cannot be used.
    """
    names = [topic_name(topic) for topic in what.topics]
    for topic in names:
        if reason := wrong_topic(topic):
            raise Rejected(where, reason)
        if topic == marks_topic:
            raise Rejected(where, f"its topic would be {topic!r}, which is that of the marks")
    return names


def records(what: Mapped) -> Iterator[Record]:
    """Yield messages one by one."""
    keys = what.each("key")
    key = repeat(None, what.count) if keys is None else keys.to_pylist()
    constant, columns, nulls = _headers(what)
    own = [[*one.items(), *constant] for one in what.own]
    called = [topic_name(topic) for topic in what.topics]
    topic = map(called.__getitem__, what.topic.tolist())
    sets = map(own.__getitem__, what.which.tolist())
    rows = zip(*columns, strict=True) if columns else repeat((), what.count)
    bodies = what.body.to_pylist()
    for name, body, of, own_headers, row in zip(topic, bodies, key, sets, rows, strict=True):
        headers = [*own_headers, *row]
        if nulls:
            headers = [one for one in headers if one[1] is not None]
        yield name, body, of, headers


def _lengths(values: pa.Array) -> npt.NDArray[np.int64]:
    """Return the size of each value in bytes; 0 for null."""
    return np.asarray(pc.fill_null(pc.binary_length(values), 0)).astype(np.int64)


def _headers(
    messages: Mapped,
) -> tuple[list[tuple[str, str]], list[Iterator[tuple[str, Any]]], bool]:
    """Return headers that all messages share, columns of the rest, and True if some lack one.

    A column is created only when it is read, to save work for the garbage collector.
    """
    constant: list[tuple[str, str]] = []
    columns: list[Iterator[tuple[str, Any]]] = []
    nulls = False
    for name, values in messages.headers.items():
        if isinstance(values, str):
            constant.append((name, values))
        elif not values.null_count and pc.all(pc.equal(values, values[0])).as_py():
            constant.append((name, values[0].as_py()))
        else:
            nulls |= values.null_count > 0
            columns.append(zip(repeat(name), values.to_pylist(), strict=False))
    return constant, columns, nulls


def wrong_topic(topic: str) -> str | None:
    """Return why a topic's name cannot be used; None if it can.

    >>> wrong_topic("orders"), wrong_topic("__consumer_offsets")
    (None, "its topic would be '__consumer_offsets', which is the cluster's own")
    """
    if topic in ("", ".", ".."):
        return f"its topic would be {topic!r}, which is not a topic's name"
    if len(topic) > LONGEST:
        return f"its topic has {len(topic):,} characters, more than {LONGEST}"
    if topic in ("__consumer_offsets", "__transaction_state", "__share_group_state"):
        return f"its topic would be {topic!r}, which is the cluster's own"
    return None


def transactional_id(identity: UUID, source: UUID, shard: int) -> str:
    """Return the name of an owner's transactions; ``shard``: the lowest that it has in hand."""
    return f"saf-{identity}-{source}-{shard}"


@contextmanager
def read(name: str, settings: Kafka) -> Iterator[Reading]:
    """Open all topics of all sources for reading.

    Raises:
        CannotReadBack: messages were removed.
    """
    with settings.connected(name) as link:
        identity = link.identity()
        if link.look():
            link.read()
        marks = {source: dict(texts) for source, texts in link.marks.texts.items()}
        messages = _held(name, link)
        yield TableReading(
            name=name,
            is_=identity,
            read=lambda source: messages[source].table(),
            knows=lambda source: known_of(identity, marks.get(source, {})),
        )


def _held(name: str, link: Link) -> dict[UUID, Held]:
    """Return the messages of each source."""
    result = defaultdict[UUID, Held](Held)
    topics = {topic for group in link.marks.topics.values() for topic in group}
    existing = link.topics()
    if gone := sorted(topics - {*existing}):
        raise CannotReadBack(name, f"its topic {gone[0]} is gone")
    consumer = Consumer(
        settings_of(link.settings, link.voices)
        | {
            "group.id": "saf",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
        }
    )
    try:
        ends = {}
        for topic in sorted(topics):
            for number in existing[topic].partitions:
                first, end = _range(link, consumer, TopicPartition(topic, number))
                if first:
                    raise CannotReadBack(name, f"{first:,} offsets of its topic {topic} are gone")
                if end:
                    ends[topic, number] = end
            if "compact" in ((link.config(topic) or {}).get("cleanup.policy") or ""):
                raise CannotReadBack(name, f"its topic {topic} is compacted")
        for message in _messages(link, consumer, ends):
            if (source := source_of(message, EVENTS)) is not None:
                result[source].add(held_of(message, EVENTS))
    finally:
        consumer.close()
    return result


def _range(link: Link, consumer: Consumer, place: TopicPartition) -> tuple[int, int]:
    """Return the start of a partition, and the end of its committed messages."""
    seconds = link.settings.bounds.statement_seconds

    def ask(_: float) -> Any:
        return consumer.get_watermark_offsets(place, timeout=seconds)

    first, end = link.voices.patiently(consumer, ask, seconds)
    return int(first), int(end)


def _messages(
    link: Link, consumer: Consumer, ends: dict[tuple[str, int], int]
) -> Iterator[Mapping[str, str]]:
    """Yield saf's headers of all messages up to the ends of their partitions."""
    ends = dict(ends)
    consumer.assign([TopicPartition(topic, number, 0) for topic, number in ends])
    last_answer = time.monotonic()
    while ends:
        for message in consumer.consume(AT_ONCE, 0.05):
            last_answer = time.monotonic()
            place, offset = (
                (str(message.topic()), int(message.partition() or 0)),
                int(message.offset() or 0),
            )
            error = message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                if error.code() in HARMLESS:
                    continue
                raise KafkaException(error)
            if offset >= ends.get(place, 0) - (error is None):
                last = ends.pop(place, None)
                if last is None or offset >= last:
                    continue
            if error is None:
                yield _said(message)
        if time.monotonic() - last_answer > link.settings.bounds.statement_seconds:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "its topics do not answer"))


def _said(message: Any) -> Mapping[str, str]:
    """Return saf's headers of a message."""
    return said_of(texts_of(message.headers() or ()), message.value() or b"", EVENTS)
