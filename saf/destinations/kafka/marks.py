"""The topic of the marks: a log that all storing processes read, so they agree on owners of shards.

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
the request: so everything that was committed before is read.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined] # public API

from saf.destinations.kafka import names
from saf.destinations.kafka.client import HARMLESS, SLICE_SECONDS, Voices, settings_of
from saf.destinations.marks import Place
from saf.destinations.queues import readable
from saf.destinations.written import ABSENT

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

    from saf.destinations.kafka import Kafka

SETTINGS = {
    "cleanup.policy": "compact",
    "segment.bytes": str(16 << 20),
    "min.cleanable.dirty.ratio": "0.05",
    "min.compaction.lag.ms": "3600000",
}
"""Settings of a new topic of marks: little to read, and claims stay until all have read them."""
AT_ONCE = 10_000
CURE = "only saf may write there: choose another marks_topic, and saf rebase sends missing messages"


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
        if key == names.IDENTITY:
            self.identity = UUID(text)
            return
        source, kind, name = key.split("/", 2)
        if kind == names.TOPIC:
            self.topics[UUID(source)].add(name)
            return
        broker_id = UUID(source)
        if kind == names.OWNER:
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
