"""A connection to a Kafka cluster, for one destination, and the state that saf keeps there."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import NAMESPACE_URL, UUID, uuid5

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public API
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from saf.destinations.kafka import names
from saf.destinations.kafka.client import (
    FENCED,
    SLICE_SECONDS,
    UNDECIDED,
    Voices,
    errors,
    milliseconds,
    passing,
    settings_of,
)
from saf.destinations.kafka.marks import SETTINGS, MarksTopic
from saf.destinations.marks import Known
from saf.destinations.queues import unusable
from saf.destinations.written import known_of

if TYPE_CHECKING:
    from saf.destinations.kafka import Kafka

LARGEST = 1_048_588
"""Most bytes that a topic accepts in one batch by default."""
OPEN = "has a transaction that does not end"
MAY_NOT_ASK = frozenset({
    KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED,
})  # fmt: skip

LONGEST_SECONDS = 60.0
"""Longest that a transaction may stay open, and so longest that its readers wait after a crash."""

T = TypeVar("T")


class Link:
    """A destination's connected clients."""

    def __init__(self, what: str, settings: Kafka) -> None:
        self.what = what
        self.settings = settings
        self.voices = Voices()
        self.admin = AdminClient(settings_of(settings, self.voices))
        self.marks = MarksTopic(settings, self.voices, self.admin)
        self._limits: dict[str, int] = {}
        self.topics()

    # The cluster

    def topics(self) -> Mapping[str, Any]:
        """Return the cluster's metadata of its topics, by name."""
        return dict(self._cluster().topics)

    def _cluster(self) -> Any:
        return self.voices.patiently(
            self.admin,
            lambda seconds: self.admin.list_topics(timeout=seconds),
            self.settings.bounds.statement_seconds,
        )

    def says(self) -> str:
        """Return a description of the cluster."""
        cluster = self._cluster()
        count = len(cluster.brokers)
        brokers = "1 broker" if count == 1 else f"{count} brokers"
        return f"Kafka cluster {cluster.cluster_id}, {brokers}, {self.settings.brokers}"

    def config(self, topic: str) -> Mapping[str, str | None] | None:
        """Return the settings of a topic; None if this user has no right to read them."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        try:
            entries = self._asked(
                lambda arguments: self.admin.describe_configs([resource], **arguments)
            )
        except KafkaException as error:
            if error.args[0].code() in MAY_NOT_ASK:
                return None
            raise
        return {name: entry.value for name, entry in entries.items()}

    def make(self, topic: str, partitions: int | None, config: Mapping[str, str]) -> None:
        """Create a topic, unless it exists, and wait until it has a leader."""
        new = NewTopic(
            topic,
            num_partitions=partitions or -1,
            replication_factor=self.settings.replicas or -1,
            config=dict(config),
        )
        try:
            self._asked(lambda arguments: self.admin.create_topics([new], **arguments))
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise

        def led(seconds: float) -> None:
            metadata = self.admin.list_topics(topic, timeout=seconds).topics[topic]
            lead = [partition.leader for partition in metadata.partitions.values()]
            if metadata.error is not None or not lead or min(lead) < 0:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{topic} has no leader"))

        self.voices.patiently(self.admin, led, self.settings.bounds.statement_seconds)

    def limits(self, topics: Collection[str]) -> dict[str, int]:
        """Return the most bytes per batch of each topic; create topics that do not exist."""
        if new := [topic for topic in topics if topic not in self._limits]:
            existing = self.topics()
            for topic in new:
                if topic not in existing:
                    self.make(topic, self.settings.partitions, {})
                limit = (self.config(topic) or {}).get("max.message.bytes")
                self._limits[topic] = int(limit or LARGEST)
        return {topic: self._limits[topic] for topic in topics}

    def _asked(self, ask: Callable[[dict[str, float]], Any]) -> Any:
        """Return the only answer to an admin request."""

        def one(_: float) -> Any:
            (answer,) = ask({"request_timeout": SLICE_SECONDS * 8}).values()
            return answer.result()

        return self.voices.patiently(self.admin, one, self.settings.bounds.statement_seconds)

    # The marks

    def look(self) -> bool:
        """Raise if messages must not be stored here; return True if the topic of marks exists.

        Raises:
            Refused: the topic of marks would lose them.
        """
        topic = self.settings.marks_topic
        metadata = self.topics().get(topic)
        if metadata is None or metadata.error is not None:
            return False
        label = f"{self.what}, topic {topic!r},"
        if (count := len(metadata.partitions)) != 1:
            raise unusable(label, f"has {count} partitions", "choose another marks_topic")
        policy = (self.config(topic) or SETTINGS)["cleanup.policy"]
        if policy != "compact":
            raise unusable(
                label,
                f"forgets marks, because its cleanup.policy is {policy}",
                f"kafka-configs.sh --alter --topic {topic} --add-config cleanup.policy=compact",
            )
        return True

    def read(self) -> None:
        """Read the marks to their end.

        Raises:
            KafkaException: a transaction stays open for too long.
        """
        if not self.marks.read(self.settings.bounds.statement_seconds):
            topic = self.settings.marks_topic
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{topic} {OPEN}"))

    def identity(self) -> UUID:
        """Return the destination's identity, or its future one; write nothing.

        Without a stored one, it is computed from the address. So a cluster that has lost everything
        is not taken for a new one: it is the same one, without its acknowledged data.
        """
        if self.look():
            self.marks.begin()
        return self.marks.identity or uuid5(
            NAMESPACE_URL, f"{self.settings.brokers}#{self.settings.marks_topic}"
        )

    def make_identity(self) -> UUID:
        """Return the identity, after storing it; it stays when the cluster's address changes."""
        identity = self.identity()
        if self.marks.identity is not None:
            return identity
        topic = self.settings.marks_topic
        self.make(topic, 1, SETTINGS)
        self.look()
        until = time.monotonic() + self.settings.bounds.statement_seconds
        while self.marks.identity is None:
            # another process may store one at the same time
            with passing(FENCED | UNDECIDED if time.monotonic() < until else ()):
                producer = self.producer(f"saf-{topic}-{names.IDENTITY}")
                self.read()
                if self.marks.identity is None:
                    producer.begin_transaction()
                    producer.produce(topic, str(identity), names.IDENTITY, partition=0)
                    self.commit(producer)
            self.read()
        return self.marks.identity

    def known(self, source: UUID) -> Known:
        """Return all marks of a source."""
        identity = self.identity()
        if self.look():
            self.read()
        return known_of(identity, self.marks.texts[source])

    # Transactions

    def producer(self, name: str, **options: Any) -> Producer:
        """Return a client that has begun transactions of a name, and ended all earlier ones."""
        bounds = self.settings.bounds
        longest = milliseconds(min(bounds.chunk_seconds, LONGEST_SECONDS))
        producer = Producer(
            settings_of(self.settings, self.voices)
            | {
                "transactional.id": name,
                "transaction.timeout.ms": longest,
                "socket.timeout.ms": min(longest, milliseconds(bounds.statement_seconds)),
                **options,
            }
        )
        self.voices.patiently(producer, producer.init_transactions, bounds.statement_seconds)
        return producer

    def commit(self, producer: Producer) -> None:
        """End a transaction."""
        bounds = self.settings.bounds
        self.voices.patiently(producer, producer.commit_transaction, bounds.chunk_seconds)

    def close(self) -> None:
        """Close the clients."""
        self.marks.close()


@contextmanager
def connected(name: str, settings: Kafka) -> Iterator[Link]:
    """Yield a link, and translate its errors."""
    link = open_link(name, settings)
    try:
        with errors(link.what, settings):
            yield link
    finally:
        link.close()


def open_link(name: str, settings: Kafka) -> Link:
    """Return a link that is connected."""
    destination = f"destination {name!r}"
    with errors(destination, settings):
        return Link(destination, settings)
