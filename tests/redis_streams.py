"""What is in the streams of a Redis server, and what forwarding there says, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from uuid import UUID

from saf.database import Dsn
from saf.destinations.redis import Redis
from tests.pipeline import connect, forward, send
from tests.redis_server import RedisServer


def entries(
    queue: RedisServer, topic: str = "billing", tag: str = "saf"
) -> list[Mapping[str, str]]:
    """The fields of a stream's entries, in their order."""
    with closing(queue.client(decode_responses=True)) as client:
        return [fields for _, fields in client.xrange(f"{{{tag}}}:{topic}")]


def texts(queue: RedisServer, topic: str = "billing") -> list[str]:
    return [fields["body"] for fields in entries(queue, topic)]


def ids(queue: RedisServer) -> list[UUID]:
    return [UUID(fields["saf-id"]) for fields in entries(queue)]


def errors(app: Dsn, events: Redis) -> list[str]:
    """What forwarding there complains of."""
    return [one.error for one in forward(app, chunk_rows=3, events=events) if one.error]


def send_numbers(app: Dsn, *numbers: int) -> None:
    with connect(app) as connection:
        for number in numbers:
            send(connection, str(number), key="k")
