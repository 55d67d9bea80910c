"""An event: one class is the form of a message for the shop that sends and for billing.

    export SHOP_DSN=postgresql://localhost/shop          # `saf migrate` was run on both databases
    export MOM_DSN=postgresql://localhost/mom            # and the service billing lives in this one
    python typed.py A-1 90                               # the shop: an order
    saf worker typed:billing                             # billing: its invoice

Version 1 of the event had no currency. Messages of version 1 that are still on their way pass the
upcaster.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import psycopg

import saf

TABLE = """
CREATE TABLE IF NOT EXISTS invoice (number text PRIMARY KEY, total numeric, currency text)
"""

outbox = saf.Outbox(from_service="shop")
billing = saf.Worker(os.environ["MOM_DSN"], "billing")


@saf.event("OrderPlaced", key="number", version=2)
@dataclass(frozen=True)
class OrderPlaced:
    """An order was placed."""

    number: str
    total: Decimal
    currency: str


@saf.upcaster(OrderPlaced, 1)
def with_currency(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body of version 2: all older orders are in francs."""
    return {**body, "currency": "CHF"}


@billing.handler(OrderPlaced)
def placed(order: OrderPlaced, connection: psycopg.Connection[Any]) -> None:
    """Write the invoice of an order."""
    connection.execute(TABLE)
    values = [order.number, order.total, order.currency]
    connection.execute("INSERT INTO invoice VALUES (%s, %s, %s)", values)


def place(number: str, total: str) -> None:
    """Send an order to billing, in the transaction of the shop's own rows."""
    with psycopg.connect(os.environ["SHOP_DSN"]) as connection:
        outbox.send(connection, "billing", OrderPlaced(number, Decimal(total), "EUR"))


if __name__ == "__main__":
    place(*sys.argv[1:])
