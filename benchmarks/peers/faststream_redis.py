"""faststream-outbox to a Redis server, as its page shows it: a subscriber that is a publisher too.

It is measured beside the kinds of destinations (`benchmarks.brokers`), as tuned as in
`benchmarks.peers.faststream_outbox`. In the place of a database's dsn, it is told the server's URL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks.peers import faststream_outbox
from benchmarks.peers.faststream_outbox import BATCH, FLUSH, WORKERS, add, empty, prepare

__all__ = ["REQUIRES", "add", "empty", "prepare", "relay"]

REQUIRES = (*faststream_outbox.REQUIRES, "faststream[redis]==0.7.8", "redis==8.1.0")
STREAM = "peer"


def relay(app: str, server: str, _: int, go_on: Callable[[], bool]) -> None:
    from faststream.redis import RedisBroker
    from faststream_outbox import OutboxBroker
    from sqlalchemy.ext.asyncio import create_async_engine

    async def run() -> None:
        engine = create_async_engine(faststream_outbox._url(app), pool_size=WORKERS + 5)
        broker = OutboxBroker(engine, outbox_table=faststream_outbox._table(), logger=None)
        there = RedisBroker(server, logger=None)

        @there.publisher(stream=STREAM)  # type: ignore[untyped-decorator] # its package is not here
        @broker.subscriber(
            "peer", max_workers=WORKERS, fetch_batch_size=BATCH, min_fetch_interval=0.01,
            terminal_flush_batch_size=FLUSH,
        )  # type: ignore[untyped-decorator] # fmt: skip
        async def move(body: str) -> str:
            return body

        await there.connect()
        await faststream_outbox.until_empty(engine, broker, go_on)
        await there.stop()

    asyncio.run(run())
