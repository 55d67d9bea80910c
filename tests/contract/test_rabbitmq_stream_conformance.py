"""Streams of RabbitMQ keep what every kind of destination has to keep, with a real server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest
from pydantic import SecretStr

from saf.destinations.mapping import HEADERS, names
from saf.destinations.rabbitmq_stream import RabbitmqStream, amqp
from saf.testing.conformance import DestinationConformance, Read, Row, WhileUnavailable
from tests.rabbitmq_server import RabbitmqServer

pytestmark = pytest.mark.slow

CANARY = "hunter2-canary"
UUIDS, MOMENTS = (
    ("message_id", "to_broker", "conversation_id"),
    ("created_at", "deliver_at", "expires_at"),
)
COLUMNS = [*(one.column for one in HEADERS if one.column not in ("source", "shard")), "body"]


def message(headers: Mapping[str, str], body: bytes, form: Any) -> Row:
    """The columns of a message of a stream."""
    of = names(form, amqp.EVENTS)
    said: dict[str, Any] = {column: headers[name] for column, name in of.items() if name in headers}
    said |= {name: UUID(said[name]) for name in UUIDS if name in said}
    said |= {name: datetime.fromisoformat(said[name]) for name in MOMENTS if name in said}
    return dict.fromkeys(COLUMNS) | said | {"body": body}


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
