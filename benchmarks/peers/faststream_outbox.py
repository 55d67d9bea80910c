"""faststream-outbox: the nearest product, tuned: wide batches, many workers, both flushed together.

Its table is the queue, and its subscriber relays to where it likes: here, to a table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.peers import BODY
from benchmarks.peers.by_id import in_batches

if TYPE_CHECKING:
    import psycopg

NAME, VERSION = "faststream-outbox", "0.19.0"
REQUIRES = ("faststream-outbox[asyncpg]==0.19.0", "psycopg[binary]==3.2.13")
LACKS = "order per key, fencing at the destination, exactly once"
CANNOT: dict[str, str] = {}
SHARE, RELAYS, WARM_UP = 0.03, 2, 0
TABLES = ("public.peer_outbox",)
WORKERS, BATCH, FLUSH = 20, 500, 100

SEND = """
INSERT INTO peer_outbox (queue, payload, headers)
VALUES ('peer', '\\x7b22616d6f756e74223a3130307d', '{"content-type": "application/json"}')
RETURNING id, pg_notify('outbox_peer_outbox', queue)
"""
FILL = f"""
INSERT INTO peer_outbox (queue, payload, headers)
SELECT 'peer', convert_to('"' || 'order ' || i %% 5000 || '|' || {BODY} || '"', 'UTF8'),
       '{{"content-type": "application/json"}}'
FROM generate_series(1, %s) AS i
"""
STORE = "INSERT INTO arrived (id, key, body) VALUES ($1, $2, $3)"
LEASE = """
UPDATE peer_outbox SET acquired_token = gen_random_uuid(), acquired_at = now() RETURNING id
"""
MARK = """
DELETE FROM peer_outbox AS o USING unnest(%s::bigint[]) AS wanted (id)
WHERE o.id = wanted.id AND o.acquired_token IS NOT NULL RETURNING o.id, o.acquired_token
"""
LEFT = "SELECT EXISTS (SELECT FROM peer_outbox)"
LOOK_SECONDS = 0.05


def _table() -> Any:
    from faststream_outbox import make_outbox_table
    from sqlalchemy import MetaData

    return make_outbox_table(MetaData(), table_name="peer_outbox")


def _url(dsn: str) -> Any:
    from psycopg.conninfo import conninfo_to_dict
    from sqlalchemy import URL

    given: dict[str, Any] = conninfo_to_dict(dsn)
    query = {"host": given["host"], "port": str(given.get("port", 5432))}
    return URL.create(
        "postgresql+asyncpg", given.get("user"), database=given["dbname"], query=query
    )


def prepare(app: str) -> None:
    import psycopg
    from sqlalchemy.dialects import postgresql
    from sqlalchemy.schema import CreateIndex, CreateTable

    table: Any = _table()
    dialect: Any = postgresql.dialect  # the type checker knows neither of an untyped table
    with psycopg.connect(app, autocommit=True) as connection:
        if connection.execute("SELECT to_regclass('peer_outbox')").fetchone() == (None,):
            statements: list[Any] = [CreateTable(table), *map(CreateIndex, table.indexes)]
            for one in statements:
                connection.execute(str(one.compile(dialect=dialect())).encode())


def empty(connection: psycopg.Connection) -> None:
    connection.execute("TRUNCATE peer_outbox")


def add(connection: psycopg.Connection, count: int, size: int) -> None:
    connection.execute(FILL.encode(), [size, count])
    connection.execute("SELECT pg_notify('outbox_peer_outbox', 'peer')")


def mark(connection: psycopg.Connection) -> Callable[[], None]:
    """By what it deletes delivered messages with, whose leases it holds."""
    return in_batches(connection, LEASE, MARK, FLUSH)


def relay(app: str, mom: str, number: int, go_on: Callable[[], bool]) -> None:
    import asyncpg
    from faststream_outbox import OutboxBroker
    from psycopg.conninfo import conninfo_to_dict
    from sqlalchemy.ext.asyncio import create_async_engine

    async def run() -> None:
        engine = create_async_engine(_url(app), pool_size=WORKERS + 5)
        broker = OutboxBroker(engine, outbox_table=_table(), logger=None)
        given = conninfo_to_dict(mom)
        pool = await asyncpg.create_pool(
            host=given["host"], port=given.get("port"), user=given.get("user"),
            database=given["dbname"], min_size=WORKERS, max_size=WORKERS,
        )  # fmt: skip
        moved = 0

        @broker.subscriber(
            "peer", max_workers=WORKERS, fetch_batch_size=BATCH, min_fetch_interval=0.01,
            terminal_flush_batch_size=FLUSH,
        )  # type: ignore[untyped-decorator] # fmt: skip
        async def move(body: str) -> None:
            nonlocal moved
            key, _, rest = body.partition("|")
            await pool.execute(STORE, number * 10**9 + moved, key, rest.encode())
            moved += 1

        await until_empty(engine, broker, go_on)
        await pool.close()

    asyncio.run(run())


async def until_empty(engine: Any, broker: Any, go_on: Callable[[], bool]) -> None:
    """Let a broker work until it is told to stop, and nothing is left."""
    await broker.start()
    while await asyncio.to_thread(go_on):
        pass
    async with engine.connect() as connection:
        look = await connection.execution_options(isolation_level="AUTOCOMMIT")
        while (await look.exec_driver_sql(LEFT)).scalar():
            await asyncio.sleep(LOOK_SECONDS)
    await broker.stop()
    await engine.dispose()
