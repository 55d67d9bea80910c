"""A stream of a NATS server: exactly once, killed, cut off, set back, limited, compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from saf.destinations.nats import Nats
from tests.nats_server import NatsServer, nats_server
from tests.queue_suite import QueueSuite


class TestNats(QueueSuite):
    """What every queue has to keep."""

    request = b"Nats-Batch-Commit"

    @pytest.fixture
    def queue(self, tmp_path: Path) -> Iterator[NatsServer]:
        with nats_server(tmp_path / "nats") as server:
            yield server

    def at(self, port: int) -> Nats:
        return Nats(server=f"nats://127.0.0.1:{port}", step_rows=100)
