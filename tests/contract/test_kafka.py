"""Topics of a Kafka cluster: exactly once, killed, cut off, claimed, lost, limited, compared."""

from __future__ import annotations

import pytest

from saf.destinations.kafka import Kafka
from tests.kafka_server import ENDS, KafkaQueue, KafkaServer, LossyKafka
from tests.queue_suite import QueueSuite


@pytest.fixture
def queue(running_kafka: KafkaServer) -> KafkaQueue:
    return KafkaQueue(server=running_kafka)


@pytest.fixture
def events(queue: KafkaQueue) -> Kafka:
    return queue.settings()


class TestKafka(QueueSuite):
    """What every queue has to keep."""

    request = ENDS
    insistent = True

    @pytest.fixture
    def queue(self, running_kafka: KafkaServer) -> KafkaQueue:
        self.there = KafkaQueue(server=running_kafka)
        return self.there

    def at(self, port: int) -> Kafka:
        return self.there.settings(brokers=f"127.0.0.1:{port}", step_rows=100)

    def proxy(self, port: int) -> LossyKafka:
        return LossyKafka(port)
