"""A destination's link to a Kafka cluster, and the state that saf keeps there: marks and owners.

One topic contains the destination's identity, the marks, and the claims on shards. It is a log that
all storing processes read, so they agree on owners of shards:

    TOPIC                            messages; see `saf.destinations.kafka.topic_name`
    saf.marks                        one partition, compacted: the last record of a key counts
        SOURCE/SHARD/LANE            the mark of a place
        SOURCE/owner/SHARD           a shard's owner: the shard that names the owner's transactions
        SOURCE/topic/TOPIC           a topic that messages of a source went to
        identity                     the destination's identity
    saf-IDENTITY-SOURCE-SHARD        transactions of the owner whose lowest shard in hand is SHARD

Kafka compares nothing when it stores. It only fences: if two processes begin transactions with the
same name, the older process cannot end its transactions any more. So a process that stores for a
shard ensures the following:

1. It has begun transactions with its own name, that of the lowest shard that it has in hand. Work
   done at the same time has other shards in hand, and so another name. Repeated work has the same
   name.
2. The last claim in the log on each of its shards is its own. If not, it writes one.
3. After that, it has fenced all others that a claim has ever named, by beginning transactions with
   their names. Then it has read the marks, to the end of the log.

If two processes claim a shard, the process with the later claim in the log reads the earlier claim,
and fences the other process before it reads the marks. That process may have ended its transaction
earlier: then its messages are in the marks. Otherwise it fails to end the transaction, begins
again, and reads the later claim. So the order of the log decides, and no compare-and-set is needed.
A process may be fenced while it still owns its shards, because the other process has claimed only
some. It begins again, reads the marks again, and continues.

A claim moves no mark, so it may be written before the marks are read. This matters because a reader
of committed records does not pass an open transaction, and only fencing ends the transaction of an
owner that was killed. "The end" is the end of the log including open transactions, at the moment of
the request: so everything that was committed before is read. `MarksTopic` reads the log;
`saf.destinations.kafka.transactions` claims shards, fences other owners, and stores.

`Link.guarantee` returns the promise of the cluster's settings: what a crash or a failover may take
back. A transaction is acknowledged by all in-sync replicas (``acks=all``), so their least number
decides. Brokers do not sync their files. Messages and marks are in different partitions. Lost marks
are noticed at the next contact. If only a topic loses messages, only `saf reconcile` finds them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import NAMESPACE_URL, UUID, uuid5

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public API
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from saf.destinations.kafka.client import (
    FENCED,
    HARMLESS,
    SLICE_SECONDS,
    UNDECIDED,
    Voices,
    milliseconds,
    passing,
    settings_of,
    translated,
)
from saf.destinations.marks import ABSENT, Known, Place, known_of
from saf.destinations.queues import ENOUGH
from saf.destinations.settings import Guarantee, readable, unusable

if TYPE_CHECKING:
    from saf.destinations.kafka import Kafka

SETTINGS = {
    "cleanup.policy": "compact",
    "segment.bytes": str(16 << 20),
    "min.cleanable.dirty.ratio": "0.05",
    "min.compaction.lag.ms": "3600000",
}
"""Settings of a new topic of marks: little to read, and claims stay until all have read them."""
AT_ONCE = 10_000
"""Most records to read in one call."""
CURE = "only saf may write there: choose another marks_topic, and saf rebase sends missing messages"
"""Cure of a record that saf cannot have written."""
LARGEST = 1_048_588
"""Most bytes that a topic accepts in one batch by default."""
OPEN = "has a transaction that does not end"
MAY_NOT_ASK = frozenset({
    KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED,
})  # fmt: skip
LONGEST_SECONDS = 60.0
"""Longest that a transaction may stay open, and so longest that its readers wait after a crash."""
STATE = "__transaction_state"
"""Kafka's own topic of transactions."""
IDENTITY = "identity"
TOPIC, OWNER = "topic", "owner"

T = TypeVar("T")


@contextmanager
def errors(what: str, settings: Kafka) -> Iterator[None]:
    """Translate the errors of clients."""
    try:
        yield
    except KafkaException as error:
        raise translated(what, settings, error.args[0]) from None


class Link:
    """A destination's connected clients."""

    def __init__(self, name: str, settings: Kafka) -> None:
        self.what = f"destination {name!r}"
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
                producer = self.producer(f"saf-{topic}-{IDENTITY}")
                self.read()
                if self.marks.identity is None:
                    producer.begin_transaction()
                    producer.produce(topic, str(identity), IDENTITY, partition=0)
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

    def guarantee(self) -> Guarantee:
        """Return the cluster's promise with its current settings."""
        settings = self.settings
        topics = self.topics()
        server = self.says()
        quality = settings.quality.replace("_", " ")
        if not self.look():
            server += f", topic {settings.marks_topic}, which is made at the first message"
            return Guarantee(server=server, promise=f"{quality}, with acks=all")
        self.read()
        used = sorted(
            {topic for group in self.marks.topics.values() for topic in group} & {*topics}
        )
        findings: list[tuple[str, str]] = []
        fewest = 1 << 10
        for topic in [settings.marks_topic, *used, STATE]:
            if topic not in topics:
                continue
            replicas = min(
                len(partition.replicas) for partition in topics[topic].partitions.values()
            )
            config = self.config(topic)
            if config is None:
                findings.append(
                    (
                        f"how topic {topic} is kept is not known, because this user may not ask",
                        f"kafka-acls.sh --add --operation DescribeConfigs --topic {topic}",
                    )
                )
                continue
            least = min(int(config.get("min.insync.replicas") or 1), replicas)
            if topic != STATE:
                fewest = min(fewest, least)
            if replicas < ENOUGH or least < ENOUGH - 1:
                findings.append(
                    (
                        f"topic {topic} has {_brokers(replicas)}, and {least} must have a "
                        "message before it is acknowledged: the loss of that disk, or of power, "
                        "loses messages",
                        _cure(topic),
                    )
                )
            if config.get("unclean.leader.election.enable") == "true":
                findings.append(
                    (
                        f"a failover of topic {topic} may lose acknowledged messages",
                        f"unclean.leader.election.enable = false for topic {topic}",
                    )
                )
            if topic in used and config.get("cleanup.policy") != "delete":
                findings.append(
                    (
                        f"topic {topic} forgets all but the last message of a key",
                        f"cleanup.policy = delete for topic {topic}",
                    )
                )
        kept = (
            "a crash of a broker's process loses nothing that was acknowledged (acks=all)"
            if fewest == 1
            else f"{_brokers(fewest)} at least have each acknowledged message (acks=all)"
        )
        return Guarantee(
            server=server,
            promise=f"{quality}, for who reads with isolation.level=read_committed; {kept}; lost "
            "marks are noticed, and saf rebase sends again; lost messages alone are found by saf "
            "reconcile",
            more=tuple(findings),
        )


class MarksTopic:
    """The topic's contents, as far as they were read."""

    def __init__(self, settings: Kafka, voices: Voices, admin: AdminClient) -> None:
        self.settings = settings
        self._voices = voices
        self._admin = admin
        self._consumer: Consumer | None = None
        self._reached = 0
        self._heard = False
        """True once the end of the readable records was reached."""
        self.identity: UUID | None = None
        self.texts: dict[UUID, dict[Place, str]] = defaultdict(dict)
        """The written marks by source."""
        self.topics: dict[UUID, set[str]] = defaultdict(set)
        """The topics that messages of a source went to."""
        self.owners: dict[tuple[UUID, int], int] = {}
        """The owner named by the last claim on a source's shard."""
        self.named: dict[tuple[UUID, int], set[int]] = defaultdict(set)
        """Owners named by any claim on the shard, and not fenced since."""

    def begin(self) -> None:
        """Read all that is readable without waiting for transactions, unless that was done."""
        if self._consumer is None:
            self.read(0)

    def read(self, patience_seconds: float) -> bool:
        """Read to the end; return False if that takes longer than the patience.

        Raises:
            KafkaException: the topic does not exist, or does not answer.
        """
        bounds, start = self.settings.bounds, time.monotonic()
        end = self._end()
        consumer = self._consumer = self._consumer or self._subscribed()
        self._voices.said = None
        while self._reached < end:
            for message in consumer.consume(AT_ONCE, 0.005):
                if (error := message.error()) is None:
                    with readable(f"topic {self.settings.marks_topic!r}", "a record", CURE):
                        self._learn((message.key() or b"").decode(), message.value())
                    self._reached = int(message.offset() or 0) + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    self._heard = True
                    self._reached = max(self._reached, int(message.offset() or 0))
                elif error.code() not in HARMLESS:
                    raise KafkaException(error)
            if self._voices.said is not None:
                raise KafkaException(self._voices.said)
            elapsed = time.monotonic() - start
            if self._reached < end and elapsed > patience_seconds and self._heard:
                return False
            if elapsed > bounds.statement_seconds:
                raise KafkaException(
                    KafkaError(
                        KafkaError._TIMED_OUT, f"{self.settings.marks_topic} does not answer"
                    )
                )
        return True

    def _subscribed(self) -> Consumer:
        options = settings_of(self.settings, self._voices) | {
            "group.id": "saf",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 10,
        }
        consumer = Consumer(options)
        consumer.assign([TopicPartition(self.settings.marks_topic, 0, 0)])
        return consumer

    def _end(self) -> int:
        """Return the end of the topic, including open transactions."""
        place = TopicPartition(self.settings.marks_topic, 0)

        def ask(_: float) -> int:
            requests: Any = self._admin.list_offsets(
                {place: OffsetSpec.latest()},  # type: ignore[no-untyped-call]
                isolation_level=IsolationLevel.READ_UNCOMMITTED,
                request_timeout=SLICE_SECONDS * 4,
            )
            (answer,) = requests.values()
            return int(answer.result().offset)

        return self._voices.patiently(self._admin, ask, self.settings.bounds.statement_seconds)

    def _learn(self, key: str, value: bytes | None) -> None:
        text = "" if value is None else value.decode()
        if key == IDENTITY:
            self.identity = UUID(text)
            return
        source, kind, name = key.split("/", 2)
        if kind == TOPIC:
            self.topics[UUID(source)].add(name)
            return
        broker_id = UUID(source)
        if kind == OWNER:
            self.owners[broker_id, int(name)] = int(text)
            self.named[broker_id, int(name)].add(int(text))
        else:
            self.texts[broker_id][name, int(kind)] = text

    def text(self, source: UUID, place: Place) -> str:
        """Return the written mark of a place."""
        return self.texts[source].get(place, ABSENT)

    def not_owned(self, source: UUID, shards: Iterable[int], owner: int) -> list[int]:
        """Return the shards whose last claim names another owner, or that have no claim."""
        return [shard for shard in shards if self.owners.get((source, shard)) != owner]

    def others(self, source: UUID, shards: Iterable[int], owner: int) -> set[int]:
        """Return other owners that claims on the shards have named, and that were not fenced."""
        return {number for shard in shards for number in self.named[source, shard]} - {owner}

    def fenced(self, source: UUID, owner: int) -> None:
        """Record that an owner was fenced, after all of its claims that were read so far."""
        for (broker_id, _), owners in self.named.items():
            if broker_id == source:
                owners.discard(owner)

    def close(self) -> None:
        """Close the consumer."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()


def _cure(topic: str) -> str:
    if topic == STATE:
        return "transaction.state.log.replication.factor = 3 and …min.isr = 2 before it is made"
    return f"3 replicas, and min.insync.replicas = 2, for topic {topic}"


def _brokers(count: int) -> str:
    return f"{count} broker{'' if count == 1 else 's'}"


def mark_key(source: UUID | str, place: Place) -> str:
    """Return the key of a place's mark.

    >>> mark_key(UUID(int=7), ("route:a/b", 3))
    '00000000-0000-0000-0000-000000000007/3/route:a/b'
    """
    lane, shard = place
    return f"{source}/{shard}/{lane}"


def owner_key(source: UUID | str, shard: int) -> str:
    """Return the key of a shard's owner."""
    return f"{source}/{OWNER}/{shard}"


def topic_key(source: UUID | str, name: str) -> str:
    """Return the key of a topic that messages of a source went to."""
    return f"{source}/{TOPIC}/{name}"
