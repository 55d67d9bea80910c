"""procrastinate: a job queue, whose job stores the message. It does less: no stores, no order."""

from __future__ import annotations

import asyncio
from typing import Any

NAME, VERSION = "procrastinate", "3.10.0"
REQUIRES = ("procrastinate==3.10.0", "psycopg[binary,pool]==3.2.13")
LACKS = "stores, routes, fencing, exactly once: a job queue"
SHARE = 0.005
CONCURRENCY = 20

SEND = """
SELECT procrastinate_defer_jobs_v1(ARRAY[ROW('peer', 'move', 0, NULL, NULL,
    jsonb_build_object('key', :account::text, 'amount', 100), NULL)::procrastinate_job_to_defer_v1])
"""
FILL = """
INSERT INTO procrastinate_jobs (queue_name, task_name, args)
SELECT 'peer', 'move', jsonb_build_object('id', i, 'key', 'order ' || i %% 5000,
                                          'body', rpad('', %s, 'x'))
FROM generate_series(1, %s) AS i
"""
STORE = "INSERT INTO arrived (id, key, body) VALUES (%s, %s, convert_to(%s, 'UTF8'))"


def _app(dsn: str) -> Any:
    import procrastinate

    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))


def prepare(app: str) -> None:
    import psycopg

    async def apply() -> None:
        async with _app(app).open_async() as queue:
            await queue.schema_manager.apply_schema_async()

    with psycopg.connect(app) as connection:
        there = connection.execute("SELECT to_regclass('procrastinate_jobs')").fetchone()
    if there == (None,):
        asyncio.run(apply())


def fill(app: str, count: int, size: int) -> None:
    import psycopg

    with psycopg.connect(app, autocommit=True) as connection:
        connection.execute("TRUNCATE procrastinate_jobs CASCADE")
        connection.execute(FILL, [size, count])
        connection.execute("VACUUM ANALYZE procrastinate_jobs")


def relay(app: str, mom: str, number: int) -> None:  # noqa: ARG001 - they share by the locks
    from psycopg_pool import AsyncConnectionPool

    queue = _app(app)

    async def run() -> None:
        async with (
            AsyncConnectionPool(mom, min_size=CONCURRENCY, max_size=CONCURRENCY) as pool,
            queue.open_async(),
        ):

            @queue.task(name="move", queue="peer")  # type: ignore[untyped-decorator]
            async def move(id: int, key: str, body: str) -> None:  # noqa: A002 - the job's own name
                async with pool.connection() as connection:
                    await connection.execute(STORE, [id, key, body])

            await queue.run_worker_async(
                queues=["peer"], wait=False, concurrency=CONCURRENCY, install_signal_handlers=False,
                delete_jobs="always",
            )  # fmt: skip

    asyncio.run(run())
