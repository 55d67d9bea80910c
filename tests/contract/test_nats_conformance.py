"""NATS keeps what every kind of destination has to keep, with a real server that is killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import UUID

import pytest
from nats.aio.msg import Msg
from pydantic import SecretStr

from saf.destinations.mapping import HEADERS, names
from saf.destinations.nats import Nats
from saf.testing.conformance import DestinationConformance, Read, Row, WhileUnavailable
from tests.nats_server import NatsServer, nats_server
from tests.whole_events import Found, LimitedWholeEventsSuite

pytestmark = [pytest.mark.full, pytest.mark.slow]

CANARY = "hunter2-canary"
UUIDS, MOMENTS = (
    ("message_id", "to_broker", "conversation_id"),
    ("created_at", "deliver_at", "expires_at"),
)
COLUMNS = [*(one.column for one in HEADERS if one.column not in ("source", "shard")), "body"]


def message(one: Msg, form: Any) -> Row:
    """The columns of a message, from one of a stream."""
    headers = one.headers or {}
    of = names(form, "ce-")
    said: dict[str, Any] = {
        column: unquote(headers[name]) for column, name in of.items() if name in headers
    }
    said |= {name: UUID(said[name]) for name in UUIDS if name in said}
    said |= {name: datetime.fromisoformat(said[name]) for name in MOMENTS if name in said}
    return dict.fromkeys(COLUMNS) | said | {"body": one.data}


class TestNats(DestinationConformance):
    columns: Sequence[str] = COLUMNS

    @pytest.fixture
    def queue(self, tmp_path: Path) -> Iterator[NatsServer]:
        with nats_server(tmp_path / "nats") as server:
            yield server

    @pytest.fixture
    def settings(self, queue: NatsServer) -> Nats:
        return Nats(server=queue.address)

    @pytest.fixture
    def stored(self, settings: Nats, queue: NatsServer) -> Read:
        return lambda: [message(one, settings.format) for one in queue.messages()]

    @pytest.fixture
    def unavailable(self, queue: NatsServer) -> WhileUnavailable:
        return queue.down

    @pytest.fixture
    def refused(self, tmp_path: Path) -> Iterator[Nats]:
        login = f"{{ user: saf, password: {CANARY}-other }}"
        with nats_server(tmp_path / "refusing", authorization=login) as server:
            yield Nats(server=server.address, username="saf", password=SecretStr(CANARY))

    @pytest.fixture
    def rejected(self) -> Row:
        return {"headers": '{"Nats-Rollup": "all"}'}


@pytest.mark.full
class TestNatsInCloudEvents(TestNats):
    """The same, with the headers of CloudEvents, in batches that end within a key."""

    columns: Sequence[str] = [
        name for name in COLUMNS if name != "message_type"
    ]  # its service, if it has none

    @pytest.fixture
    def settings(self, queue: NatsServer) -> Nats:
        return Nats(server=queue.address, format="cloudevents", step_rows=3)


class TestNatsInWholeEvents(LimitedWholeEventsSuite):
    @pytest.fixture
    def queue(self, tmp_path: Path) -> Iterator[NatsServer]:
        with nats_server(tmp_path / "nats") as server:
            yield server

    @pytest.fixture
    def settings(self, queue: NatsServer) -> Nats:
        return Nats(server=queue.address, format="cloudevents-structured", step_rows=3)

    @pytest.fixture
    def found(self, queue: NatsServer) -> Found:
        def read() -> list[tuple[Mapping[str, str], bytes]]:
            return [
                ({name: unquote(value) for name, value in (one.headers or {}).items()}, one.data)
                for one in queue.messages()
            ]

        return read

    @pytest.fixture
    def too_large(self) -> int:
        return 28 << 20
