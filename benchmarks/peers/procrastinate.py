"""procrastinate: a job queue, whose job stores the message. It does less: no stores, no order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from benchmarks.peers import BODY
from benchmarks.peers.by_id import in_batches

if TYPE_CHECKING:
    import psycopg

NAME, VERSION = "procrastinate", "3.10.0"
REQUIRES = ("procrastinate==3.10.0", "psycopg[binary,pool]==3.2.13")
LACKS = "stores, routes, fencing, exactly once: a job queue"
CANNOT: dict[str, str] = {}
SHARE, RELAYS, WARM_UP = 0.005, 2, 0
TABLES = ("public.procrastinate_jobs", "public.procrastinate_events")
CONCURRENCY = 20

SEND = """
SELECT procrastinate_defer_jobs_v1(ARRAY[ROW('peer', 'move', 0, NULL, NULL,
    jsonb_build_object('key', :account::text, 'amount', 100), NULL)::procrastinate_job_to_defer_v1])
"""
FILL = f"""
INSERT INTO procrastinate_jobs (queue_name, task_name, args)
SELECT 'peer', 'move', jsonb_build_object('id', i, 'key', 'order ' || i %% 5000,
                                          'body', {BODY})
FROM generate_series(1, %s) AS i
"""
MARK = """
SELECT procrastinate_finish_job_v1(id, 'succeeded', true) FROM unnest(%s::bigint[]) AS id
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


def empty(connection: psycopg.Connection) -> None:
    connection.execute("TRUNCATE procrastinate_jobs CASCADE")


def add(connection: psycopg.Connection, count: int, size: int) -> None:
    connection.execute(FILL.encode(), [size, count])


def mark(connection: psycopg.Connection) -> Callable[[], None]:
    """One by one, as it does."""
    return in_batches(connection, "SELECT id FROM procrastinate_jobs ORDER BY id", MARK, 1)


def relay(app: str, mom: str, number: int, go_on: Callable[[], bool]) -> None:  # noqa: ARG001 - they share by the locks
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

            stays = go_on()
            worker = queue.run_worker_async(
                queues=["peer"], wait=stays, concurrency=CONCURRENCY, install_signal_handlers=False,
                delete_jobs="always",
            )  # fmt: skip
            work = asyncio.create_task(worker)
            while stays:
                stays = await asyncio.to_thread(go_on)
                if not stays:
                    work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    asyncio.run(run())
