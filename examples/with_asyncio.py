"""An order and its message in one transaction under asyncio, with psycopg and nothing else.

    export SHOP_DSN=postgresql://localhost/shop          # `saf migrate --dsn "$SHOP_DSN"` was run
    python with_asyncio.py A-1 90

A plain INSERT is a correct send, from any driver: here psycopg's AsyncConnection. With SQLAlchemy's
AsyncSession, `outbox.send` itself works: see with_fastapi.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import psycopg
from psycopg.types.json import Jsonb

TABLE = "CREATE TABLE IF NOT EXISTS orders (number text PRIMARY KEY, total int NOT NULL)"
ORDER = "INSERT INTO orders (number, total) VALUES (%s, %s)"
MESSAGE = """
INSERT INTO saf.outbox (to_service, key, message_type, headers, body)
VALUES ('billing', %s, 'OrderPlaced', %s, %s)
"""


async def place(number: str, total: int) -> None:
    """Place an order; the service billing will hear of it."""
    body = json.dumps({"order": number, "total": total}, separators=(",", ":")).encode()
    # the block is one transaction: it commits at its end, and rolls back if it raises
    async with await psycopg.AsyncConnection.connect(os.environ["SHOP_DSN"]) as connection:
        await connection.execute(TABLE)
        await connection.execute(ORDER, [number, total])
        headers = Jsonb({"content-type": "application/json"})
        await connection.execute(MESSAGE, [number, headers, body])


if __name__ == "__main__":
    asyncio.run(place(sys.argv[1], int(sys.argv[2])))
