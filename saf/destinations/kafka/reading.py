"""Reading back: all committed messages of a source's topics, provided that none was removed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from saf.destinations.kafka.client import HARMLESS, settings_of
from saf.destinations.kafka.server import Link
from saf.destinations.kafka.transactions import EVENTS
from saf.destinations.mapping import held_of, said_of, source_of, texts_of
from saf.destinations.marks import known_of
from saf.destinations.reading import Reading
from saf.destinations.tables import Held, TableReading
from saf.errors import CannotReadBack

if TYPE_CHECKING:
    from saf.destinations.kafka import Kafka

AT_ONCE = 10_000


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
