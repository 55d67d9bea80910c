"""PgQueuer: a job queue, whose job stores the message. It does less: no stores, no order."""

from __future__ import annotations

import asyncio
from typing import Any

NAME, VERSION = "PgQueuer", "1.6.0"
REQUIRES = ("pgqueuer[asyncpg]==1.6.0", "psycopg[binary]==3.2.13")
LACKS = "stores, routes, fencing, exactly once: a job queue"
SHARE = 0.03
BATCH, CONCURRENCY = 100, 20

SEND = """
WITH job AS (
    INSERT INTO pgqueuer (priority, entrypoint, payload, status)
    VALUES (0, 'move', '\\x7b22616d6f756e74223a3130307d', 'queued')
    RETURNING id, entrypoint, priority
)
INSERT INTO pgqueuer_log (job_id, status, entrypoint, priority)
SELECT id, 'queued', entrypoint, priority FROM job
"""
FILL = """
INSERT INTO pgqueuer (priority, entrypoint, payload, status)
SELECT 0, 'move', convert_to('order ' || i %% 5000 || '|' || rpad('', %s, 'x'), 'UTF8'), 'queued'
FROM generate_series(1, %s) AS i
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


def fill(app: str, count: int, size: int) -> None:
    import psycopg

    with psycopg.connect(app, autocommit=True) as connection:
        connection.execute("TRUNCATE pgqueuer, pgqueuer_log")
        connection.execute(FILL, [size, count])
        connection.execute("VACUUM ANALYZE pgqueuer")


def relay(app: str, mom: str, number: int) -> None:
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

        await queue.run(batch_size=BATCH, mode=QueueExecutionMode.drain)
        await pool.close()
        await connection.close()

    asyncio.run(run())


def _arguments(dsn: str) -> dict[str, Any]:
    """What asyncpg calls what libpq's conninfo says."""
    from psycopg.conninfo import conninfo_to_dict

    given = conninfo_to_dict(dsn)
    names = {"host": "host", "port": "port", "user": "user", "dbname": "database"}
    return {names[name]: value for name, value in given.items() if name in names}
