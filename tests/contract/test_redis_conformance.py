"""Redis keeps what every kind of destination has to keep, with a real server that is killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest
from pydantic import SecretStr

from saf.destinations.mapping import HEADERS, names
from saf.destinations.redis import Redis
from saf.testing.conformance import DestinationConformance, Read, Row, WhileUnavailable
from tests.redis_server import RedisServer
from tests.whole_events import Found, LimitedWholeEventsSuite

pytestmark = [pytest.mark.full, pytest.mark.slow]

CANARY = "hunter2-canary"
UUIDS, MOMENTS = (
    ("message_id", "to_broker", "conversation_id"),
    ("created_at", "deliver_at", "expires_at"),
)
COLUMNS = [*(one.column for one in HEADERS if one.column not in ("source", "shard")), "body"]
LARGEST = 64 << 20


def entries(queue: RedisServer) -> list[Mapping[str, bytes]]:
    """The fields of all entries of all streams, oldest first."""
    with closing(queue.client()) as client:
        found: list[Any] = []
        for key in client.scan_iter(match="{saf}:*"):
            found += client.xrange(key) or []
    ordered = sorted(found, key=lambda one: [int(part) for part in one[0].split(b"-")])
    return [{name.decode(): value for name, value in fields.items()} for _, fields in ordered]


def message(fields: Mapping[str, bytes], of: Mapping[str, str]) -> Row:
    """The columns of a message, from an entry of a stream."""
    said: dict[str, Any] = {
        column: fields[name].decode() for column, name in of.items() if name in fields
    }
    said |= {name: UUID(said[name]) for name in UUIDS if name in said}
    said |= {name: datetime.fromisoformat(said[name]) for name in MOMENTS if name in said}
    return dict.fromkeys(COLUMNS) | said | {"body": fields["body"]}


class TestRedis(DestinationConformance):
    columns: Sequence[str] = COLUMNS

    @pytest.fixture
    def settings(self, queue: RedisServer) -> Redis:
        return Redis(server=queue.address)

    @pytest.fixture
    def stored(self, settings: Redis, queue: RedisServer) -> Read:
        of = names(settings.format, "ce_")
        return lambda: [message(fields, of) for fields in entries(queue)]

    @pytest.fixture
    def unavailable(self, queue: RedisServer) -> WhileUnavailable:
        return queue.down

    @pytest.fixture
    def refused(self, queue: RedisServer) -> Redis:
        given = {"enabled": True, "passwords": [f"+{CANARY}"], "categories": ["-@all"]}
        queue.client().acl_setuser("nobody", **given)
        return Redis(server=queue.address, username="nobody", password=SecretStr(CANARY))

    @pytest.fixture
    def rejected(self) -> Row:
        return {"headers": '{"body": "not the body"}'}


class TestRedisInCloudEvents(TestRedis):
    """The same, with the headers of CloudEvents, in steps that end within a key."""

    columns: Sequence[str] = [
        name for name in COLUMNS if name != "message_type"
    ]  # its service, if it has none

    @pytest.fixture
    def settings(self, queue: RedisServer) -> Redis:
        return Redis(server=queue.address, format="cloudevents", step_rows=3)


class TestRedisInWholeEvents(LimitedWholeEventsSuite):
    @pytest.fixture
    def settings(self, queue: RedisServer) -> Redis:
        return Redis(server=queue.address, format="cloudevents-structured", step_rows=3)

    @pytest.fixture
    def found(self, queue: RedisServer) -> Found:
        def read() -> list[tuple[Mapping[str, str], bytes]]:
            return [
                (
                    {name: value.decode() for name, value in one.items() if name != "body"},
                    one["body"],
                )
                for one in entries(queue)
            ]

        return read

    @pytest.fixture
    def too_large(self, queue: RedisServer) -> Iterator[int]:
        client = queue.client()
        client.config_set("proto-max-bulk-len", "1mb")
        yield 900_000
        client.config_set("proto-max-bulk-len", "512mb")
