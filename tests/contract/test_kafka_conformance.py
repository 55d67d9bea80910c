"""Kafka keeps what every kind of destination has to keep, with a real broker that is killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import Message
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined] # public
from pydantic import SecretStr

from saf.destinations.kafka import Kafka
from saf.destinations.mapping import HEADERS, names
from saf.testing.conformance import DestinationConformance, Read, Row, WhileUnavailable
from saf.testing.forwarder import Forwarder
from tests.kafka_server import LARGEST, PASSWORD, KafkaQueue, KafkaServer, headers
from tests.whole_events import Found, LimitedWholeEventsSuite

pytestmark = [pytest.mark.full, pytest.mark.slow]

UUIDS, MOMENTS = (
    ("message_id", "to_broker", "conversation_id"),
    ("created_at", "deliver_at", "expires_at"),
)
COLUMNS = [*(one.column for one in HEADERS if one.column not in ("source", "shard")), "body"]


def message(one: Message, form: Any) -> Row:
    """The columns of a message, from one of a topic."""
    given, body = headers(one), one.value() or b""
    of = names(form, "ce_")
    said: dict[str, Any] = {column: given[name] for column, name in of.items() if name in given}
    key = one.key()
    assert said.get("key") == (key and key.decode())
    said |= {name: UUID(said[name]) for name in UUIDS if name in said}
    said |= {name: datetime.fromisoformat(said[name]) for name in MOMENTS if name in said}
    return dict.fromkeys(COLUMNS) | said | {"body": body}


class TestKafka(DestinationConformance):
    columns: Sequence[str] = COLUMNS

    @pytest.fixture
    def queue(self, running_kafka: KafkaServer) -> KafkaQueue:
        return KafkaQueue(server=running_kafka)

    @pytest.fixture
    def settings(self, queue: KafkaQueue) -> Kafka:
        return queue.settings()

    @pytest.fixture
    def stored(self, settings: Kafka, queue: KafkaQueue) -> Read:
        return lambda: [message(one, settings.format) for one in queue.messages(*queue.topics())]

    @pytest.fixture
    def unavailable(self, queue: KafkaQueue) -> WhileUnavailable:
        return queue.down

    @pytest.fixture
    def refused(self, queue: KafkaQueue) -> Kafka:
        return queue.settings(
            brokers=f"127.0.0.1:{queue.server.sasl}",
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="PLAIN",
            username="saf",
            password=SecretStr(f"{PASSWORD}-other"),
        )

    @pytest.fixture
    def rejected(self) -> Row:
        return {"body": b"x" * LARGEST}


def suite() -> DestinationConformance:
    """The suite, without the column that is a message's service if it has no type."""
    made = DestinationConformance()
    made.columns = [name for name in COLUMNS if name != "message_type"]
    return made


class TestKafkaInCloudEvents:
    """What depends on how headers are named, in transactions that end within a key."""

    @pytest.fixture
    def queue(self, running_kafka: KafkaServer) -> KafkaQueue:
        return KafkaQueue(server=running_kafka)

    @pytest.fixture
    def settings(self, queue: KafkaQueue) -> Kafka:
        return queue.settings(format="cloudevents", step_rows=3)

    def test_every_column_arrives_as_it_was_sent(self, queue: KafkaQueue, settings: Kafka) -> None:
        with closing(settings.open("conformance")) as destination:
            suite().test_every_column_arrives_as_it_was_sent(
                settings,
                destination,
                Forwarder(),
                lambda: [message(one, settings.format) for one in queue.messages(*queue.topics())],
            )

    def test_what_it_holds_can_be_compared(self, settings: Kafka) -> None:
        suite().test_what_it_holds_can_be_compared(settings, Forwarder())


class TestKafkaInWholeEvents(LimitedWholeEventsSuite):
    @pytest.fixture
    def queue(self, running_kafka: KafkaServer) -> KafkaQueue:
        return KafkaQueue(server=running_kafka)

    @pytest.fixture
    def settings(self, queue: KafkaQueue) -> Kafka:
        return queue.settings(format="cloudevents-structured", step_rows=3)

    @pytest.fixture
    def found(self, queue: KafkaQueue) -> Found:
        def read() -> list[tuple[Mapping[str, str], bytes]]:
            there = queue.messages(*queue.topics())
            return [(headers(one), one.value() or b"") for one in there]

        return read

    @pytest.fixture
    def too_large(self, queue: KafkaQueue) -> int:
        topic = NewTopic(f"{queue.prefix}.billing", 1, config={"max.message.bytes": "1000000"})
        admin = queue.server.admin()
        for made in admin.create_topics([topic]).values():
            made.result()
        return 900_000
