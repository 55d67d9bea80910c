"""Requests that a client repeats: each Idempotency-Key has one effect, and one answer.

    export SHOP_DSN=postgresql://localhost/shop          # `saf migrate --dsn "$SHOP_DSN"` was run
    python idempotent_requests.py 7f3c 90                # prints: payment <id>: 90, new
    python idempotent_requests.py 7f3c 90                # prints: payment <id>: 90, repeated

The key is the name of the message. Of requests that arrive at the same time, one is first; the
others wait for it and return its payment. A request that fails leaves nothing and may be repeated.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import psycopg

import saf

outbox = saf.Outbox()

TABLE = "CREATE TABLE IF NOT EXISTS payment (id uuid PRIMARY KEY, total int NOT NULL)"
INSERT = "INSERT INTO payment (id, total) VALUES (%s, %s)"
FOUND = "SELECT total FROM payment WHERE id = %s"


def pay(connection: psycopg.Connection, key: str, total: int) -> str:
    """Return the answer to a request; the first one with a key also makes the payment."""
    connection.execute(TABLE)
    sent = outbox.send(
        connection, "bank", {"total": total}, key=key, name=key, once_for=timedelta(days=1)
    )
    if sent.is_new:
        connection.execute(INSERT, [sent, total])
    ((paid,),) = connection.execute(FOUND, [sent]).fetchall()
    return f"payment {sent}: {paid}, {'new' if sent.is_new else 'repeated'}"


if __name__ == "__main__":
    with psycopg.connect(os.environ["SHOP_DSN"]) as connection:  # one transaction
        print(pay(connection, sys.argv[1], int(sys.argv[2])))
