"""Queues of RabbitMQ keep what every kind of destination has to keep, with a real server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import SecretStr

from saf.destinations.rabbitmq import Rabbitmq
from saf.testing.conformance import DestinationConformance, Read, Row, WhileUnavailable
from tests.rabbitmq_rows import CANARY, COLUMNS, message
from tests.rabbitmq_server import Queues
from tests.whole_events import Found, WholeEventsSuite, by_amqp

pytestmark = [pytest.mark.full, pytest.mark.slow]


class TestRabbitmq(DestinationConformance):
    """All messages are in one queue."""

    columns: Sequence[str] = COLUMNS

    @pytest.fixture
    def settings(self, rabbitmq_queues: Queues) -> Rabbitmq:
        return Rabbitmq(server=rabbitmq_queues.address, topic="all")

    @pytest.fixture
    def stored(self, settings: Rabbitmq, rabbitmq_queues: Queues) -> Read:
        def read() -> list[Row]:
            found: list[tuple[Any, bytes]] = rabbitmq_queues.messages("all")
            return [message(one.headers, body, settings.format) for one, body in found]

        return read

    @pytest.fixture
    def unavailable(self, rabbitmq_queues: Queues) -> WhileUnavailable:
        return rabbitmq_queues.down

    @pytest.fixture
    def refused(self, rabbitmq_queues: Queues) -> Rabbitmq:
        login = {"username": "nobody", "password": SecretStr(CANARY)}
        return Rabbitmq.model_validate({"server": rabbitmq_queues.address, **login})

    @pytest.fixture
    def rejected(self) -> Row:
        return {"headers": '{"saf-id": "x", "cloudEvents_id": "x"}'}


@pytest.mark.full
class TestRabbitmqInCloudEvents(TestRabbitmq):
    """The same, with the headers of CloudEvents, a few messages at a time."""

    columns: Sequence[str] = [
        name for name in COLUMNS if name != "message_type"
    ]  # its service, if it has none

    @pytest.fixture
    def settings(self, rabbitmq_queues: Queues) -> Rabbitmq:
        server = rabbitmq_queues.address
        return Rabbitmq(server=server, topic="all", format="cloudevents", step_rows=3)


class TestRabbitmqInWholeEvents(WholeEventsSuite):
    binding = staticmethod(by_amqp)

    @pytest.fixture
    def settings(self, rabbitmq_queues: Queues) -> Rabbitmq:
        server = rabbitmq_queues.address
        return Rabbitmq(server=server, topic="all", format="cloudevents-structured", step_rows=3)

    @pytest.fixture
    def found(self, rabbitmq_queues: Queues) -> Found:
        def read() -> list[tuple[dict[str, str], bytes]]:
            there = rabbitmq_queues.messages("all")
            assert all(one.content_type == one.headers["content-type"] for one, _ in there)
            return [(one.headers, body) for one, body in there]

        return read
