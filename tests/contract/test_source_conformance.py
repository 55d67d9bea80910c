"""Each kind of source passes the conformance suite of sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from saf.database.bounds import Bounds
from saf.errors import RetentionPassed
from saf.sources import BEGINNING, Progress, Source
from saf.sources.judging import judge
from saf.sources.kafka import Kafka
from saf.sources.kafka.topic import Topic
from saf.sources.nats import Nats
from saf.sources.rabbitmq import Rabbitmq
from saf.sources.rabbitmq_stream import RabbitmqStream
from saf.sources.redis import Redis
from saf.testing.source_conformance import QueueConformance, SourceConformance, Written
from tests.kafka_server import KafkaServer, make
from tests.nats_server import NatsServer, nats_server
from tests.rabbitmq_server import Queues, RabbitmqServer
from tests.redis_server import RedisServer, redis_server
from tests.topics import TOPIC, add_to_nats, amqp_of, nats_source, queue_source, stream_source
from tests.waits import until


class TestRedis(SourceConformance):
    """Streams of a Redis server."""

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[RedisServer]:
        with redis_server(tmp_path / "redis", appendonly="yes", appendfsync="always") as server:
            yield server

    @pytest.fixture
    def settings(self, server: RedisServer) -> Redis:
        return Redis(server=server.address, topic="payments", service="billing")

    @pytest.fixture
    def add(self, server: RedisServer) -> Callable[[Sequence[Written]], None]:
        def added(records: Sequence[Written]) -> None:
            for one in records:
                server.client().xadd("payments", {**dict(one.headers), "body": one.body})

        return added

    @pytest.fixture
    def remove(self, server: RedisServer) -> Callable[[int], None]:
        return lambda kept: server.client().xtrim("payments", maxlen=kept, approximate=False)

    @pytest.fixture
    def delete(self, server: RedisServer) -> Callable[[], None]:
        return lambda: server.client().delete("payments")

    @pytest.fixture
    def unavailable(self, server: RedisServer) -> object:
        return server.down


class TestNats(SourceConformance):
    """Streams of a NATS server."""

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[NatsServer]:
        with nats_server(tmp_path / "nats") as server:
            yield server

    @pytest.fixture
    def settings(self, server: NatsServer) -> Nats:
        return nats_source(server, topic="payments.eu")

    @pytest.fixture
    def add(self, server: NatsServer) -> Callable[[Sequence[Written]], None]:
        return lambda records: add_to_nats(server, records)

    @pytest.fixture
    def remove(self, server: NatsServer) -> Callable[[int], None]:
        def removed(kept: int) -> None:
            server.ask("$JS.API.STREAM.PURGE.PAYMENTS", keep=kept)

        return removed

    @pytest.fixture
    def delete(self, server: NatsServer) -> Callable[[], None]:
        def deleted() -> None:
            server.ask("$JS.API.STREAM.DELETE.PAYMENTS")

        return deleted

    @pytest.fixture
    def unavailable(self, server: NatsServer) -> object:
        return server.down


@pytest.mark.slow
class TestRabbitmqStream(SourceConformance):
    """Streams of a RabbitMQ server."""

    @pytest.fixture
    def settings(self, rabbitmq: RabbitmqServer) -> RabbitmqStream:
        return stream_source(rabbitmq)

    @pytest.fixture
    def limits(self) -> dict[str, str]:
        """A stream that keeps about 20 messages of 1,000 bytes."""
        return {"max_length_bytes": "20000", "stream_max_segment_size_bytes": "5000"}

    @pytest.fixture
    def add(
        self, rabbitmq: RabbitmqServer, limits: dict[str, str]
    ) -> Callable[[Sequence[Written]], None]:
        def added(records: Sequence[Written]) -> None:
            for one in records:
                rabbitmq.publish(TOPIC, [amqp_of(one)], **limits)

        return added

    @pytest.fixture
    def delete(self, rabbitmq: RabbitmqServer) -> Callable[[], None]:
        return lambda: rabbitmq.delete(TOPIC)

    @pytest.fixture
    def unavailable(self, rabbitmq: RabbitmqServer) -> object:
        return rabbitmq.down

    # Only the server removes messages, and whole segments of them

    def test_messages_that_were_read_may_be_removed(  # type: ignore[override]
        self, source: Source, add: Callable[[Sequence[Written]], None]
    ) -> None:
        add([Written(body=b"x" * 1000)] * 5)
        after = BEGINNING
        for _ in range(50):
            read = source.read(0, after, 10)
            progress = Progress(shard=0, position=after, added=after[1])
            assert judge("s", "t", progress, read.extent) is None
            after = read.end or after
            add([Written(body=b"x" * 1000)])
        assert after == (0, 54)
        until(lambda: source.extent(0).removed > 10)

    def test_messages_that_are_removed_before_they_are_read_are_counted(  # type: ignore[override]
        self, source: Source, add: Callable[[Sequence[Written]], None]
    ) -> None:
        add([Written(body=b"x" * 1000)] * 5)
        assert len(source.read(0, BEGINNING, 10).records) == 5
        add([Written(body=b"x" * 1000)] * 60)
        until(lambda: source.extent(0).removed > 5)
        extent = source.extent(0)
        error = judge("s", "t", Progress(shard=0, position=(0, 5), added=5), extent)
        assert isinstance(error, RetentionPassed)
        assert error.messages == extent.removed - 5


@pytest.mark.slow
class TestRabbitmq(QueueConformance):
    """Queues of a RabbitMQ server."""

    properties = frozenset({"message-id"})

    @pytest.fixture
    def settings(self, rabbitmq_queues: Queues) -> Rabbitmq:
        rabbitmq_queues.delete(TOPIC)
        return queue_source(rabbitmq_queues)

    @pytest.fixture
    def add(self, rabbitmq_queues: Queues) -> Callable[[Sequence[Written]], None]:
        return lambda records: rabbitmq_queues.publish(TOPIC, records)

    @pytest.fixture
    def delete(self, rabbitmq_queues: Queues) -> Callable[[], None]:
        return lambda: rabbitmq_queues.delete(TOPIC)

    @pytest.fixture
    def unavailable(self, rabbitmq_queues: Queues) -> object:
        return rabbitmq_queues.down


@pytest.mark.slow
class TestKafka(SourceConformance):
    """Topics of a Kafka cluster."""

    @pytest.fixture
    def topic(self) -> str:
        return f"t{uuid4().hex[:8]}"

    @pytest.fixture
    def settings(self, running_kafka: KafkaServer, topic: str) -> Kafka:
        return Kafka(brokers=running_kafka.address, topic=topic, service="billing").bounded(
            Bounds(statement_seconds=20, chunk_seconds=20)
        )

    @pytest.fixture
    def add(self, running_kafka: KafkaServer, topic: str) -> Callable[[Sequence[Written]], None]:
        def added(records: Sequence[Written]) -> None:
            make(running_kafka, topic)
            producer = Producer(running_kafka.client())
            for one in records:
                producer.produce(topic, one.body, one.key, headers=[*one.headers])
            producer.flush(30)

        return added

    @pytest.fixture
    def remove(self, running_kafka: KafkaServer, topic: str) -> Callable[[int], None]:
        def removed(kept: int) -> None:
            admin = running_kafka.admin()
            for number in range(2):
                end = _end(running_kafka, topic, number)
                if end:
                    place = TopicPartition(topic, number, end - kept)
                    for answer in admin.delete_records([place]).values():
                        answer.result()

        return removed

    @pytest.fixture
    def delete(self, running_kafka: KafkaServer, topic: str) -> Callable[[], None]:
        def deleted() -> None:
            admin = running_kafka.admin()
            for answer in admin.delete_topics([topic]).values():
                answer.result()
            until(lambda: topic not in admin.list_topics(timeout=30).topics)

        return deleted

    @pytest.fixture
    def unavailable(self, running_kafka: KafkaServer) -> object:
        return running_kafka.down


class Hesitating:
    """A consumer whose first question about a partition's offsets takes too long."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._has_answered = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def get_watermark_offsets(self, *given: Any, **options: Any) -> Any:
        """Time out at the first call."""
        if not self._has_answered:
            self._has_answered = True
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return self._consumer.get_watermark_offsets(*given, **options)


@pytest.mark.slow
def test_a_second_question_about_a_partition_of_kafka_loses_no_record(
    running_kafka: KafkaServer,
) -> None:
    topic = f"t{uuid4().hex[:8]}"
    make(running_kafka, topic, partitions=1)
    producer = Producer(running_kafka.client())
    for number in range(10):
        producer.produce(topic, str(number).encode())
    producer.flush(30)
    source = Topic("t", Kafka(brokers=running_kafka.address, topic=topic, service="billing"))
    with closing(source):
        source.connect()
        first = source.read(0, BEGINNING, 1).records
        source._consumers[0] = cast("Consumer", Hesitating(source._consumers[0]))
        rest = source.read(0, first[-1].position, 20).records
    assert [int(one.body) for one in (*first, *rest)] == [*range(10)]


def _end(server: KafkaServer, topic: str, partition: int) -> int:
    consumer = Consumer(server.client() | {"group.id": "test"})
    try:
        _, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=30)
        return int(end)
    finally:
        consumer.close()


def test_a_record_of_kafka_may_have_a_time_far_off(running_kafka: KafkaServer) -> None:
    topic = f"t{uuid4().hex[:8]}"
    make(running_kafka, topic, 1, **{"message.timestamp.after.max.ms": str(2**63 - 1)})
    producer = Producer(running_kafka.client())
    producer.produce(topic, b"1", timestamp=1_700_000_000_000_000)
    producer.flush(30)
    settings = Kafka(brokers=running_kafka.address, topic=topic, service="billing")
    with closing(settings.bounded(Bounds(statement_seconds=20)).open("t")) as source:
        source.connect()
        (record,) = source.read(0, BEGINNING, 10).records
    assert (record.body, record.created_at) == (b"1", None)
