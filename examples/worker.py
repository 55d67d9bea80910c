"""A worker: the service billing, which writes an invoice for each order.

    export MOM_DSN=postgresql://localhost/mom            # `saf migrate --dsn "$MOM_DSN"` was run
    saf service create billing                           # once; it lives in that database
    saf worker worker:billing                            # any number of workers share the work

Each message is handled exactly once, and an order's messages in order: the handler's work and the
mark that the message is handled are one transaction. A handler that raises is retried later, and
the messages of its order wait; those of other orders do not.
"""

from __future__ import annotations

import os
from typing import Any

import psycopg

import saf

billing = saf.Worker(os.environ["MOM_DSN"], "billing")

TABLE = "CREATE TABLE IF NOT EXISTS invoice (number text PRIMARY KEY, total int NOT NULL)"
INSERT = "INSERT INTO invoice (number, total) VALUES (%s, %s)"


@billing.handler("OrderPlaced")
def placed(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
    """Write the invoice of an order."""
    order = message.json()
    connection.execute(TABLE)
    connection.execute(INSERT, [order["order"], order["total"]])


if __name__ == "__main__":
    billing.run()
