"""Processors: messages a second through an instance per key, beside handlers that have no state.

One process each, which does nothing for each message of a backlog of 10,000 keys.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import saf
from benchmarks.receive import READ_AGAIN
from benchmarks.stage import Stage, execute, per_second
from saf.broker.services import create_service
from saf.receiving.loop import Loop

KEYS, MESSAGES, ROUNDS = 10_000, 30_000, 2

FILL = """
INSERT INTO saf.inbox (to_service, key, message_type, headers, body)
SELECT 'billing', 'order ' || i %% %s, 'OrderPlaced', '{"content-type": "application/json"}',
       convert_to(rpad('{"order": ' || i, 200, 'x'), 'UTF8')
FROM generate_series(1, %s) AS i
"""


class Nothing(saf.Processor):
    """Counts in memory, and writes nothing."""

    def activate(self, connection: Any) -> None:  # noqa: ARG002 - nothing is known
        self.count = 0

    @saf.handles()
    def handle(self, message: saf.Received, connection: Any) -> None:  # noqa: ARG002
        self.count += 1


def run(stage: Stage) -> None:
    """Notes processors_per_second, and what a worker's handlers do beside it."""
    with stage.mom.connect(role="bench", autocommit=True) as connection:
        connection.execute("TRUNCATE saf.inbox")
        create_service(connection, "billing")
        connection.execute(FILL, [KEYS, MESSAGES])
        connection.execute("VACUUM ANALYZE saf.inbox")
    gc.freeze()  # as `saf worker` does at its start
    loops = {"processors": _processors, "handler": _handler, "batch_handler": _batch_handler}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, make in loops.items():
            execute(stage.mom, READ_AGAIN, "VACUUM saf.cursor", "CHECKPOINT")
            loop = make(stage)
            started = time.monotonic()
            handled = loop.drain()
            seconds[name].append(time.monotonic() - started)
            assert handled == MESSAGES
    for name, took in seconds.items():
        stage.note(f"{name}_per_second_10000_keys", per_second(MESSAGES, took), "1/s no-op")


def _processors(stage: Stage) -> Loop:
    return saf.Processors(stage.mom, "billing", Nothing, max_messages=1000)


def _handler(stage: Stage) -> Loop:
    worker = saf.Worker(stage.mom, "billing", max_messages=1000)

    @worker.handler()
    def handle(message: saf.Received, connection: Any) -> None: ...

    return worker


def _batch_handler(stage: Stage) -> Loop:
    worker = saf.Worker(stage.mom, "billing", max_messages=1000)

    @worker.batch_handler()
    def handle(messages: Sequence[saf.Received], connection: Any) -> None: ...

    return worker
