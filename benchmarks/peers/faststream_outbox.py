"""faststream-outbox: the nearest product, tuned: wide batches, many workers, both flushed together.

Its table is the queue, and its subscriber relays to where it likes: here, to a table.
"""

from __future__ import annotations

import asyncio
from typing import Any

NAME, VERSION = "faststream-outbox", "0.19.0"
REQUIRES = ("faststream-outbox[asyncpg]==0.19.0", "psycopg[binary]==3.2.13")
LACKS = "order per key, fencing at the destination, exactly once"
SHARE = 0.03
WORKERS, BATCH = 20, 500

SEND = """
INSERT INTO peer_outbox (queue, payload, headers)
VALUES ('peer', '\\x7b22616d6f756e74223a3130307d', '{"content-type": "application/json"}')
RETURNING id, pg_notify('outbox_peer_outbox', queue)
"""
FILL = """
INSERT INTO peer_outbox (queue, payload, headers)
SELECT 'peer', convert_to('"' || rpad('order ' || i %% 5000 || '|', %s, 'x') || '"', 'UTF8'),
       '{"content-type": "application/json"}'
FROM generate_series(1, %s) AS i
"""
STORE = "INSERT INTO arrived (id, key, body) VALUES ($1, $2, $3)"
QUIET_SECONDS = 0.5


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


def fill(app: str, count: int, size: int) -> None:
    import psycopg

    with psycopg.connect(app, autocommit=True) as connection:
        connection.execute("TRUNCATE peer_outbox")
        connection.execute(FILL, [size, count])
        connection.execute("VACUUM ANALYZE peer_outbox")


def relay(app: str, mom: str, number: int) -> None:
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
            terminal_flush_batch_size=100,
        )  # type: ignore[untyped-decorator] # fmt: skip
        async def move(body: str) -> None:
            nonlocal moved
            key, _, rest = body.partition("|")
            await pool.execute(STORE, number * 10**9 + moved, key, rest.encode())
            moved += 1

        await broker.start()
        before = -1
        while moved != before:
            before = moved
            await asyncio.sleep(QUIET_SECONDS)
        await broker.stop()
        await pool.close()
        await engine.dispose()

    asyncio.run(run())
