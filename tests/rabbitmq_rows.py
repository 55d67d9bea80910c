"""Messages of RabbitMQ as rows of an outbox, for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from saf.destinations.mapping import HEADERS, names
from saf.destinations.rabbitmq_stream import amqp
from saf.testing.conformance import Row

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
