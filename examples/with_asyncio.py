"""Orders and their messages under asyncio, with only psycopg; several at a time.

    export SHOP_DSN=postgresql://localhost/shop          # `saf migrate --dsn "$SHOP_DSN"` was run
    python with_asyncio.py A-1=90 A-2=70

For each order, both are committed, or neither; `saf forward` then forwards the messages.
"""

from __future__ import annotations

import asyncio
import os
import sys

import psycopg

import saf

outbox = saf.Outbox()

TABLE = "CREATE TABLE IF NOT EXISTS orders (number text PRIMARY KEY, total int NOT NULL)"
INSERT = "INSERT INTO orders (number, total) VALUES (%s, %s)"


async def place(number: str, total: int) -> None:
    """Place an order, with a message to the service billing."""
    # the block is one transaction: it commits at its end, and rolls back if it raises
    async with await psycopg.AsyncConnection.connect(os.environ["SHOP_DSN"]) as connection:
        await connection.execute(INSERT, [number, total])
        await outbox.asend(
            connection,
            "billing",
            {"order": number, "total": total},
            key=number,  # messages about this order stay in order
            message_type="OrderPlaced",
        )


async def main(orders: list[str]) -> None:
    """Place all orders concurrently."""
    async with await psycopg.AsyncConnection.connect(os.environ["SHOP_DSN"]) as connection:
        await connection.execute(TABLE)
    async with asyncio.TaskGroup() as tasks:
        for order in orders:
            number, _, total = order.partition("=")
            tasks.create_task(place(number, int(total)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
