"""A dialog: a shop asks a warehouse for articles, and gets an answer, each in its own database.

    export SHOP_DSN=postgresql://localhost/shop WAREHOUSE_DSN=postgresql://localhost/warehouse
    # `saf migrate --dsn …` was run on both databases
    saf service create shop --broker shop --config dialog_shop.toml
    saf service create warehouse --broker warehouse --config dialog_warehouse.toml
    python dialog.py A-1 2                               # the shop asks
    saf forward --config dialog_shop.toml                # and its side forwards the question
    saf worker dialog:warehouse                          # the warehouse answers and ends
    saf forward --config dialog_warehouse.toml           # and its side forwards the answer
    saf worker dialog:shop                               # the shop receives it and ends, too

Each database has both roles: a broker whose outbox is forwarded, and a store that others deliver
to. The two files are the complete saf.toml of each side.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import psycopg

import saf

IN_STOCK = 100
TABLE = "CREATE TABLE IF NOT EXISTS delivery (article text, amount int)"
INSERT = "INSERT INTO delivery (article, amount) VALUES (%s, %s)"

shop = saf.Worker(os.environ["SHOP_DSN"], "shop")
warehouse = saf.Worker(os.environ["WAREHOUSE_DSN"], "warehouse")


def ask(article: str, amount: int) -> None:
    """Begin a dialog; the answer comes to the shop's worker, however much later."""
    with psycopg.connect(os.environ["SHOP_DSN"]) as connection:
        dialog = saf.begin_dialog(
            connection, from_service="shop", to_service="warehouse", lifetime=3600
        )
        body = {"article": article, "amount": amount}
        dialog.send(connection, body, message_type="order")


@warehouse.handler("order")
def order(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
    """Answer in the transaction that receives the question."""
    assert message.dialog is not None  # noqa: S101 - for the type checker
    wanted = message.json()
    if wanted["amount"] > IN_STOCK:
        message.dialog.end_with_error(connection, 17, "we do not have that many")
        return
    message.dialog.send(connection, wanted, message_type="delivery")
    message.dialog.end(connection)


@shop.handler("delivery")
def delivery(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
    """Record the delivery. Without a handler, an End is answered by an End automatically."""
    said = message.json()
    connection.execute(TABLE)
    connection.execute(INSERT, [said["article"], said["amount"]])


if __name__ == "__main__":
    ask(sys.argv[1], int(sys.argv[2]))
