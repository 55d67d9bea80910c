"""Streams of RabbitMQ keep what every kind of destination has to keep, with a real server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pydantic import SecretStr

from saf.destinations.rabbitmq_stream import RabbitmqStream
from saf.testing.conformance import DestinationConformance, Read, Row, WhileUnavailable
from tests.rabbitmq_rows import CANARY, COLUMNS, message
from tests.rabbitmq_server import RabbitmqServer
from tests.whole_events import Found, WholeEventsSuite, by_amqp

pytestmark = [pytest.mark.full, pytest.mark.slow]


class TestRabbitmqStream(DestinationConformance):
    """All messages are in one stream, whose order is that of the chunks."""

    columns: Sequence[str] = COLUMNS

    @pytest.fixture
    def settings(self, rabbitmq: RabbitmqServer) -> RabbitmqStream:
        return RabbitmqStream(server=rabbitmq.address, topic="all")

    @pytest.fixture
    def stored(self, settings: RabbitmqStream, rabbitmq: RabbitmqServer) -> Read:
        return lambda: [message(*one, settings.format) for one in rabbitmq.messages("all")]

    @pytest.fixture
    def unavailable(self, rabbitmq: RabbitmqServer) -> WhileUnavailable:
        return rabbitmq.down

    @pytest.fixture
    def refused(self, rabbitmq: RabbitmqServer) -> RabbitmqStream:
        return RabbitmqStream(
            server=rabbitmq.address, username="nobody", password=SecretStr(CANARY)
        )

    @pytest.fixture
    def rejected(self) -> Row:
        return {"headers": '{"saf-id": "x", "cloudEvents_id": "x"}'}


@pytest.mark.full
class TestRabbitmqStreamInCloudEvents(TestRabbitmqStream):
    """The same, with the headers of CloudEvents, a few messages at a time."""

    columns: Sequence[str] = [
        name for name in COLUMNS if name != "message_type"
    ]  # its service, if it has none

    @pytest.fixture
    def settings(self, rabbitmq: RabbitmqServer) -> RabbitmqStream:
        return RabbitmqStream(
            server=rabbitmq.address, topic="all", format="cloudevents", step_rows=3
        )


class TestRabbitmqStreamInWholeEvents(WholeEventsSuite):
    binding = staticmethod(by_amqp)

    @pytest.fixture
    def settings(self, rabbitmq: RabbitmqServer) -> RabbitmqStream:
        return RabbitmqStream(
            server=rabbitmq.address, topic="all", format="cloudevents-structured", step_rows=3
        )

    @pytest.fixture
    def found(self, rabbitmq: RabbitmqServer) -> Found:
        return lambda: rabbitmq.messages("all") if "all" in rabbitmq.streams() else []
