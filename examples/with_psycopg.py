"""An order and its message in one transaction, with only psycopg.

    export SHOP_DSN=postgresql://localhost/shop          # `saf migrate --dsn "$SHOP_DSN"` was run
    python with_psycopg.py A-1 90

Both are committed, or neither; `saf forward` then forwards the message.
"""

from __future__ import annotations

import os
import sys

import psycopg

import saf

outbox = saf.Outbox()

TABLE = "CREATE TABLE IF NOT EXISTS orders (number text PRIMARY KEY, total int NOT NULL)"
INSERT = "INSERT INTO orders (number, total) VALUES (%s, %s)"


def place(number: str, total: int) -> None:
    """Place an order, with a message to the service billing."""
    # the block is one transaction: it commits at its end, and rolls back if it raises
    with psycopg.connect(os.environ["SHOP_DSN"]) as connection:
        connection.execute(TABLE)
        connection.execute(INSERT, [number, total])
        outbox.send(
            connection,
            "billing",
            {"order": number, "total": total},
            key=number,  # messages about this order stay in order
            message_type="OrderPlaced",
        )


if __name__ == "__main__":
    place(sys.argv[1], int(sys.argv[2]))
