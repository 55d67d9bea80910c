"""PgQueuer: a job queue, whose job stores the message. It does less: no stores, no order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from benchmarks.peers import BODY
from benchmarks.peers.by_id import in_batches

if TYPE_CHECKING:
    import psycopg

NAME, VERSION = "PgQueuer", "1.6.0"
REQUIRES = ("pgqueuer[asyncpg]==1.6.0", "psycopg[binary]==3.2.13")
LACKS = "stores, routes, fencing, exactly once: a job queue"
CANNOT: dict[str, str] = {}
SHARE, RELAYS, WARM_UP = 0.03, 2, 0
TABLES = ("public.pgqueuer%",)
BATCH, CONCURRENCY, POLL_SECONDS = 100, 20, 1

SEND = """
WITH job AS (
    INSERT INTO pgqueuer (priority, entrypoint, payload, status)
    VALUES (0, 'move', '\\x7b22616d6f756e74223a3130307d', 'queued')
    RETURNING id, entrypoint, priority
)
INSERT INTO pgqueuer_log (job_id, status, entrypoint, priority)
SELECT id, 'queued', entrypoint, priority FROM job
"""
FILL = f"""
INSERT INTO pgqueuer (priority, entrypoint, payload, status)
SELECT 0, 'move', convert_to('order ' || i %% 5000 || '|' || {BODY}, 'UTF8'), 'queued'
FROM generate_series(1, %s) AS i
"""
MARK = """
WITH deleted AS (
    DELETE FROM pgqueuer WHERE id = ANY (%s) RETURNING id, entrypoint, priority
)
INSERT INTO pgqueuer_log (job_id, status, entrypoint, priority)
SELECT id, 'successful', entrypoint, priority FROM deleted
"""
STORE = "INSERT INTO arrived (id, key, body) VALUES ($1, $2, $3)"


def prepare(app: str) -> None:
    import asyncpg
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.queries import Queries

    async def install() -> None:
        connection = await asyncpg.connect(**_arguments(app))
        if await connection.fetchval("SELECT to_regclass('pgqueuer')") is None:
            await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    asyncio.run(install())


def empty(connection: psycopg.Connection) -> None:
    connection.execute("TRUNCATE pgqueuer, pgqueuer_log")


def add(connection: psycopg.Connection, count: int, size: int) -> None:
    connection.execute(FILL.encode(), [size, count])


def mark(connection: psycopg.Connection) -> Callable[[], None]:
    """By what it deletes and logs a batch of jobs with."""
    return in_batches(connection, "SELECT id FROM pgqueuer ORDER BY id", MARK, BATCH)


def relay(app: str, mom: str, number: int, go_on: Callable[[], bool]) -> None:
    import asyncpg
    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.types import QueueExecutionMode

    async def run() -> None:
        connection = await asyncpg.connect(**_arguments(app))
        pool = await asyncpg.create_pool(
            **_arguments(mom), min_size=CONCURRENCY, max_size=CONCURRENCY
        )
        queue = PgQueuer(AsyncpgDriver(connection))

        @queue.entrypoint("move")  # type: ignore[untyped-decorator]
        async def move(job: Any) -> None:
            key, _, body = job.payload.partition(b"|")
            await pool.execute(STORE, number * 10**9, key.decode(), body)

        stays = go_on()
        mode = QueueExecutionMode.continuous if stays else QueueExecutionMode.drain
        wait = timedelta(seconds=POLL_SECONDS)
        work = asyncio.create_task(queue.run(dequeue_timeout=wait, batch_size=BATCH, mode=mode))
        while stays:
            stays = await asyncio.to_thread(go_on)
            if not stays:
                queue.shutdown.set()
        await work
        await pool.close()
        await connection.close()

    asyncio.run(run())


def _arguments(dsn: str) -> dict[str, Any]:
    """What asyncpg calls what libpq's conninfo says."""
    from psycopg.conninfo import conninfo_to_dict

    given = conninfo_to_dict(dsn)
    names = {"host": "host", "port": "port", "user": "user", "dbname": "database"}
    return {names[name]: value for name, value in given.items() if name in names}
