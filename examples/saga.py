"""A saga: an order gets stock and payment or neither, whatever fails, and whenever.

    export SHOP_DSN=postgresql://localhost/shop          # `saf migrate --dsn "$SHOP_DSN"` was run
    python saga_services.py                              # once: services and tables
    python saga.py A-1 book 2                            # place an order
    saf worker saga:orders                               # and, each in a process of its own:
    saf worker saga_services:stock
    saf worker saga_services:payment

Each handler's state, messages and rows are one transaction. Kill any of the three at any time, and
start it again: money and stock are conserved.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass

import psycopg

import saf

CONCLUDE = "INSERT INTO outcome (number, result) VALUES (%s, %s)"


@dataclass
class Order:
    """State of an order's process."""

    number: str
    article: str
    amount: int
    reserved: bool = False


orders = saf.Saga(os.environ["SHOP_DSN"], "orders", state=Order)


@orders.starts("PlaceOrder")
def place(process: saf.Process[Order], message: saf.Received) -> None:
    """Ask the stock first, and wait a minute for all answers."""
    process.state = Order(**message.json())
    process.send("stock", asdict(process.state), message_type="Reserve")
    process.start_timer(60)


@orders.handler("Reserved")
def reserved(process: saf.Process[Order], _: saf.Received) -> None:
    """Ask for the payment."""
    process.state.reserved = True
    process.send("payment", asdict(process.state), message_type="Pay")


@orders.handler("Paid")
def paid(process: saf.Process[Order], _: saf.Received) -> None:
    """End in order: reservation and payment are final."""
    process.connection.execute(CONCLUDE, [process.key, "done"])
    process.end()


@orders.on_error
def refused(process: saf.Process[Order], error: saf.DialogFailed) -> None:
    """Fail with the error of one service: the other one undoes its part."""
    process.connection.execute(CONCLUDE, [process.key, error.text])
    process.fail(error.code, error.text)


@orders.timer
def late(process: saf.Process[Order]) -> None:
    """Give up: both services undo their parts."""
    process.connection.execute(CONCLUDE, [process.key, "too late"])
    process.fail(3, "too late")


if __name__ == "__main__":
    number, article, amount = sys.argv[1:]
    with psycopg.connect(os.environ["SHOP_DSN"]) as connection:
        order = {"number": number, "article": article, "amount": int(amount)}
        saf.Outbox().send(connection, "orders", order, key=number, message_type="PlaceOrder")
