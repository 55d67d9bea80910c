"""The services of saga.py, stock and payment: each does its part, and undoes it after an Error.

    python saga_services.py                              # once: services and tables
    saf worker saga_services:stock
    saf worker saga_services:payment

All three services are in one database, and talk by local routes. With a forwarder, each may have
its own.
"""

from __future__ import annotations

import os
from typing import Any

import psycopg

import saf

SHOP = os.environ["SHOP_DSN"]
TABLES = """
CREATE TABLE article (name text PRIMARY KEY, in_stock int NOT NULL);
CREATE TABLE account (name text PRIMARY KEY, balance int NOT NULL);
CREATE TABLE reservation (dialog uuid PRIMARY KEY, article text NOT NULL, amount int NOT NULL);
CREATE TABLE payment (dialog uuid PRIMARY KEY, account text NOT NULL, total int NOT NULL);
CREATE TABLE outcome (number text PRIMARY KEY, result text NOT NULL);
INSERT INTO article VALUES ('book', 10); INSERT INTO account VALUES ('customer', 100)
"""
RESERVE = """
WITH taken AS (UPDATE article SET in_stock = in_stock - %(amount)s
               WHERE name = %(article)s AND in_stock >= %(amount)s RETURNING name)
INSERT INTO reservation SELECT %(dialog)s, name, %(amount)s FROM taken
"""
RELEASE = """
WITH undone AS (DELETE FROM reservation WHERE dialog = %(dialog)s RETURNING article, amount)
UPDATE article SET in_stock = in_stock + amount FROM undone WHERE name = article
"""
PAY = """
WITH taken AS (UPDATE account SET balance = balance - 30 * %(amount)s
               WHERE balance >= 30 * %(amount)s RETURNING name)
INSERT INTO payment SELECT %(dialog)s, name, 30 * %(amount)s FROM taken
"""
REFUND = """
WITH undone AS (DELETE FROM payment WHERE dialog = %(dialog)s RETURNING account, total)
UPDATE account SET balance = balance + total FROM undone WHERE name = account
"""


def serve(service: str, question: str, answer: str, *, do: str, undo: str) -> saf.Worker:
    """Return a service that answers a question, or ends the dialog with an error."""
    worker = saf.Worker(SHOP, service)

    @worker.handler(question)
    def asked(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        assert message.dialog is not None  # noqa: S101 - for the type checker
        order = message.json() | {"dialog": message.dialog.handle}
        if connection.execute(do, order).rowcount:
            message.dialog.send(connection, {}, message_type=answer)
        else:
            message.dialog.end_with_error(connection, 1, f"no {service}")

    @worker.handler("saf/error")
    def failed(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        assert message.dialog is not None  # noqa: S101 - for the type checker
        connection.execute(undo, {"dialog": message.dialog.handle})
        message.dialog.end(connection)

    return worker


stock = serve("stock", "Reserve", "Reserved", do=RESERVE, undo=RELEASE)
payment = serve("payment", "Pay", "Paid", do=PAY, undo=REFUND)

if __name__ == "__main__":
    with psycopg.connect(SHOP) as connection:
        for service in ("orders", "stock", "payment"):
            saf.create_service(connection, service)
            saf.add_route(connection, "shop", service=service, local=True)
        connection.execute(TABLES)
