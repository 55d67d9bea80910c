"""The topic of the marks: a log that all who store read to its end, and so agree on who owns what.

A record says the mark of a place, and the shard after whose transactions the owner is named
(`saf.destinations.kafka.names.transactional_id`): ``SHARD EPOCH BATCH POSITION …``. Kafka compares
nothing when it stores. It only fences: of two processes that begin transactions of one name, the
older one can end none any more. So whoever stores for a shard first makes sure of this:

1. It has begun transactions of its own name, that of the lowest shard that it has in hand. Work
   that is done at the same time has other shards in hand, and so another name; the same work, done
   again, has the same.
2. The last record of each of its shards names it. If not, it writes one that does: a claim.
3. It has read past that, and fenced everybody whom the log has ever named beside it, by beginning
   transactions of their names; and then has read the log again.

Of two who claim a shard, the one whose claim is the later in the log has read the other's, and
fences it before it reads what counts; the other one either sees that it is fenced when it ends its
transaction, or ended it before. The order of the log decides, so nobody has to compare and set. Who
has been fenced though it owns its shards still, because the other one has taken only some of them,
begins anew, and reads the marks again before it stores.

A reader of committed records does not get past a transaction that is open. So "the end" is the end
of the log with open transactions, at the moment of asking: what was committed before is read.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined] # it is public

from saf.destinations.kafka import names
from saf.destinations.kafka.client import GONE, NOT_YET, SLICE_SECONDS, Voices, settings_of
from saf.destinations.marks import MAIN, Place
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
"""Of a topic of marks that is made: little to read, and no claim goes before all have read it."""
AT_ONCE = 10_000


class MarksTopic:
    """What the topic says, as far as it was read."""

    def __init__(self, settings: Kafka, voices: Voices, admin: AdminClient) -> None:
        self.settings = settings
        self._voices = voices
        self._admin = admin
        self._consumer: Consumer | None = None
        self._reached = 0
        self.identity: UUID | None = None
        self.texts: dict[UUID, dict[Place, str]] = defaultdict(dict)
        """The written marks, by their sources."""
        self.topics: dict[UUID, set[str]] = defaultdict(set)
        """The topics that messages of a source went to."""
        self.owners: dict[tuple[UUID, int], int] = {}
        """The owner of a source's shard that was named last."""
        self.named: dict[tuple[UUID, int], set[int]] = defaultdict(set)
        """All owners of it that were named."""

    def read(self) -> None:
        """Read to the end.

        Raises:
            KafkaException: there is no such topic, or its end is not reached in time.
        """
        topic, bounds = self.settings.marks_topic, self.settings.bounds
        until = time.monotonic() + bounds.statement_seconds
        end = self._end()
        if self._consumer is None:
            self._consumer = Consumer(
                settings_of(self.settings, self._voices)
                | {
                    "group.id": "saf",
                    "enable.auto.commit": False,
                    "enable.auto.offset.store": False,
                    "enable.partition.eof": True,
                    "isolation.level": "read_committed",
                    "fetch.wait.max.ms": 10,
                }
            )
            self._consumer.assign([TopicPartition(topic, 0, 0)])
        self._voices.said = None
        while self._reached < end:
            for one in self._consumer.consume(AT_ONCE, 0.005 if self._reached else 0.02):
                if (error := one.error()) is None:
                    self._learn((one.key() or b"").decode(), one.value())
                    self._reached = int(one.offset() or 0) + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    self._reached = max(self._reached, int(one.offset() or 0))
                elif error.code() not in NOT_YET | GONE:
                    raise KafkaException(error)
            if self._voices.said is not None:
                raise KafkaException(self._voices.said)
            if time.monotonic() > until:
                raise KafkaException(
                    KafkaError(KafkaError._TIMED_OUT, f"{topic} has a transaction that is open")
                )

    def _end(self) -> int:
        """Return where the topic ends, open transactions and all."""
        place = TopicPartition(self.settings.marks_topic, 0)

        def ask(_: float) -> int:
            asked: Any = self._admin.list_offsets(
                {place: OffsetSpec.latest()},  # type: ignore[no-untyped-call]
                isolation_level=IsolationLevel.READ_UNCOMMITTED,
                request_timeout=SLICE_SECONDS * 4,
            )
            (answer,) = asked.values()
            return int(answer.result().offset)

        return self._voices.patiently(self._admin, ask, self.settings.bounds.statement_seconds)

    def _learn(self, key: str, value: bytes | None) -> None:
        said = "" if value is None else value.decode()
        if key == names.IDENTITY:
            self.identity = UUID(said)
            return
        source, which, what = key.split("/", 2)
        if which == names.TOPIC:
            self.topics[UUID(source)].add(what)
            return
        owner, _, text = said.partition(" ")
        of, shard = UUID(source), int(which)
        self.texts[of][what, shard] = text
        if what == MAIN and owner:
            self.owners[of, shard] = int(owner)
            self.named[of, shard].add(int(owner))

    def text(self, source: UUID, place: Place) -> str:
        """Return the written mark of a place."""
        return self.texts[source].get(place, ABSENT)

    def not_owned(self, source: UUID, shards: Iterable[int], owner: int) -> list[int]:
        """Return those of some shards whose last record names another owner, or none."""
        return [shard for shard in shards if self.owners.get((source, shard)) != owner]

    def others(self, source: UUID, shards: Iterable[int], owner: int) -> set[int]:
        """Return whom the log has named for some shards, beside an owner, and nobody has fenced."""
        return {one for shard in shards for one in self.named[source, shard]} - {owner}

    def fenced(self, source: UUID, owner: int) -> None:
        """Note that an owner was fenced, of what was read until now."""
        for (of, _), owners in self.named.items():
            if of == source:
                owners.discard(owner)

    def close(self) -> None:
        """Give up the consumer."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
