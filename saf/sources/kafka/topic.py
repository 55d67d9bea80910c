"""A topic of a Kafka cluster as a source.

A position is ``(0, offset + 1)``, with the offset of the next record. Some offsets have no record
for readers: ends of transactions, aborted and compacted records. So `saf.sources.judging` counts
offsets instead of records. Each partition has a consumer of its own, which continues where it
stopped: another assignment would discard the records that it has fetched.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from saf.destinations.kafka.client import HARMLESS, Voices, settings_of, translated
from saf.destinations.mapping import CONTENT_TYPE
from saf.destinations.settings import client_needed
from saf.errors import Unavailable
from saf.sources import GONE, MOST_BYTES, Extent, Position, Record, Records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from saf.sources.kafka import Kafka
    from saf.sources.kafka.bodies import Bodies

AT_ONCE = 1_000
"""Most records to take from a consumer in one call."""
CONSUMERS = 16
"""Consumers to keep; with more partitions, they take turns."""
ID_SECONDS = 1.0
"""Time after which to ask for the topic's id again, in seconds."""
AT_END_SECONDS = 0.2
"""Time to wait for a record at an end that was reported before, in seconds."""
QUEUED_KILOBYTES = 32_768
"""Most data that a consumer fetches ahead."""
UNKNOWN = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC,
                     KafkaError._UNKNOWN_PARTITION})  # fmt: skip
OUT_OF_RANGE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})


class Topic:
    """A topic as a `saf.sources.Source`."""

    prefix = "ce_"

    def __init__(self, name: str, settings: Kafka) -> None:
        self.what = f"source {name!r}"
        self.settings = settings
        self._destination = settings.as_destination()
        self._voices = Voices()
        self._bodies: Bodies | None = None
        """Decodes bodies, if the settings name a schema registry."""
        self._known_id: tuple[str | None, float] = (None, float("-inf"))
        """The topic's id, and until when it need not be asked for again."""
        self._admin: AdminClient | None = None
        self._consumers: dict[int, Consumer] = {}
        self._next: dict[int, Position] = {}
        """Position at which each consumer continues."""
        self._ended: set[int] = set()
        """Partitions at whose end the consumer is. It reports an end only once."""

    def connect(self) -> None:
        """Connect, if not connected yet."""
        if self._admin is None:
            with self._errors():
                self._admin = AdminClient(settings_of(self._destination, self._voices))
                self.partitions()

    def _topic_id(self) -> str | None:
        """Return the topic's id; None before Kafka 3.1, and if the topic does not exist."""
        from confluent_kafka import TopicCollection

        known, until = self._known_id
        if time.monotonic() < until:
            return known
        self.connect()
        admin: Any = self._admin
        topics = TopicCollection([self.settings.topic])
        seconds = self.settings.bounds.statement_seconds
        try:
            (answer,) = admin.describe_topics(topics, request_timeout=seconds).values()
            topic_id = str(answer.result().topic_id)
        except KafkaException as error:
            if error.args[0].code() in UNKNOWN:
                return None
            raise self._translated(error) from None
        known = topic_id if topic_id.strip("A") else None
        self._known_id = known, time.monotonic() + ID_SECONDS
        return known

    def partitions(self) -> int:
        """Return the number of partitions; 0 if the topic does not exist."""
        admin = self._admin
        assert admin is not None  # noqa: S101 - connected
        topic = self.settings.topic
        with self._errors():
            found = self._voices.patiently(
                admin,
                lambda seconds: admin.list_topics(topic, timeout=seconds),
                self.settings.bounds.statement_seconds,
            ).topics[topic]
        if found.error is not None:
            if found.error.code() in UNKNOWN:
                return 0
            raise translated(self.what, self._destination, found.error)
        return len(found.partitions)

    def extent(self, shard: int) -> Extent:
        """Return what a partition has."""
        place = TopicPartition(self.settings.topic, shard)
        consumer = self._consumer(shard)
        seconds = self.settings.bounds.statement_seconds

        def ask(_: float) -> tuple[int, int]:
            try:
                return consumer.get_watermark_offsets(place, timeout=seconds)
            except KafkaException:
                self._next.pop(shard, None)  # waiting for the next attempt may discard a record
                raise

        try:
            low, high = self._voices.patiently(consumer, ask, seconds)
        except KafkaException as error:
            # a client that has lost its cluster does not know the partition either: the cluster
            # decides whether it exists
            if error.args[0].code() in UNKNOWN and shard >= self.partitions():
                return GONE
            raise self._translated(error) from None
        return _extent(int(low), int(high), self._topic_id())

    def read(self, shard: int, after: Position, limit: int, size: int = MOST_BYTES) -> Records:
        """Return committed records of a partition after a position."""
        extent = self.extent(shard)
        consumer = self._consumer(shard)
        if self._next.get(shard) != after:
            self._ended.discard(shard)
            with self._errors():
                consumer.assign([TopicPartition(self.settings.topic, shard, after[1])])
        self._next.pop(shard, None)
        records: list[Record] = []
        at = after
        with self._errors():
            for page, end in self._pages(consumer, limit, size, shard):
                records += page
                at = max(at, end)
        if self._destination.encodes:
            records = [self._decoded(record) for record in records]
        self._next[shard] = at
        return Records(extent=extent, records=records, added=at[1], end=at)

    def _decoded(self, record: Record) -> Record:
        """Return a record whose body is JSON, or that says why it cannot be."""
        if self._bodies is None:
            with client_needed(self.what, "kafka-schemas"):
                module = import_module("saf.sources.kafka.bodies")
            self._bodies = module.Bodies(self.what, self._destination)
        body = self._bodies.decoded(record.body)
        if not isinstance(body, bytes):
            return record._replace(problem=body.why)
        headers = {**record.headers, CONTENT_TYPE: b"application/json"}
        return record._replace(body=body, headers=headers)

    def close(self) -> None:
        """Close the clients."""
        bodies, self._bodies = self._bodies, None
        if bodies is not None:
            bodies.close()
        consumers, self._consumers = self._consumers, {}
        self._next = {}
        self._ended.clear()
        for consumer in consumers.values():
            with suppress(KafkaException):
                consumer.close()
        self._admin = None

    def _pages(
        self, consumer: Consumer, limit: int, size: int, shard: int
    ) -> Iterator[tuple[list[Record], Position]]:
        """Yield records up to a limit or to the readable end, and where they end."""
        self._voices.said = None
        left, last_answer = limit, time.monotonic()
        bound = self.settings.bounds.statement_seconds
        while left > 0 and size > 0:
            found = consumer.consume(min(left, AT_ONCE), 0.05)
            if found:
                last_answer = time.monotonic()
            page = [_record(message) for message in found if message.error() is None]
            if page:
                left -= len(page)
                size -= sum(len(record.body) for record in page)
                self._ended.discard(shard)
                yield page, page[-1].position
            events = [(error, one) for one in found if (error := one.error()) is not None]
            for error, event in events:
                if error.code() == KafkaError._PARTITION_EOF:
                    end = 0, int(event.offset() or 0)
                    if page and page[-1].position > end:
                        continue  # there were more by now
                    self._ended.add(shard)
                    yield [], end
                    left = 0
                elif error.code() in OUT_OF_RANGE:
                    return  # the next look at the partition's extent tells why
                elif error.code() not in HARMLESS:
                    raise KafkaException(error)
            if self._voices.said is not None:
                raise KafkaException(self._voices.said)
            silent = time.monotonic() - last_answer
            if shard in self._ended and silent > AT_END_SECONDS:
                return
            if silent > bound:
                reason = f"topic {self.settings.topic} does not answer"
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, reason))

    def _consumer(self, shard: int) -> Consumer:
        if shard not in self._consumers:
            self.connect()
            while len(self._consumers) >= CONSUMERS:
                oldest = next(iter(self._consumers))
                self._consumers.pop(oldest).close()
                self._next.pop(oldest, None)
            with self._errors():
                self._consumers[shard] = Consumer(
                    settings_of(self._destination, self._voices)
                    | {
                        "group.id": "saf",
                        "enable.auto.commit": False,
                        "enable.auto.offset.store": False,
                        "enable.partition.eof": True,
                        "isolation.level": "read_committed",
                        "auto.offset.reset": "error",
                        "fetch.wait.max.ms": 20,
                        "queued.max.messages.kbytes": QUEUED_KILOBYTES,
                    }
                )
        return self._consumers[shard]

    def _translated(self, error: KafkaException) -> Exception:
        self.close()
        return translated(self.what, self._destination, error.args[0])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise self._translated(error) from None
        except Unavailable:
            self.close()
            raise


def _extent(low: int, high: int, topic_id: str | None) -> Extent:
    return Extent(
        last=(0, high),
        first=(0, low + 1) if low < high else None,
        added=high,
        removed=low,
        topic_id=topic_id,
    )


def _record(message: Any) -> Record:
    _, milliseconds = message.timestamp()
    headers: dict[str, bytes] = dict(message.headers() or ())
    if None in headers.values():
        headers = {name: value or b"" for name, value in headers.items()}
    return Record(
        (0, message.offset() + 1),
        headers,
        message.value() or b"",
        message.key(),
        _moment(milliseconds),
    )


@lru_cache(maxsize=1)
def _moment(milliseconds: int) -> datetime | None:
    """Return a time, or None if it is unknown or far off; many records in a row have the same."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds > 0 else None
    except (ValueError, OverflowError, OSError):
        return None  # some writers give microseconds
