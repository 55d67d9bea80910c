"""A web application that places orders: Flask and psycopg, a transaction for each request.

    pip install flask
    export SHOP_DSN=postgresql://localhost/shop          # `saf migrate --dsn "$SHOP_DSN"` was run
    flask --app with_flask run --port 8000
    curl -X POST localhost:8000/orders -H 'content-type: application/json' \\
         -d '{"number": "A-1", "total": 90}'
"""

from __future__ import annotations

import os
from typing import Any

import psycopg
from flask import Flask, Response, g, jsonify, request

import saf

app = Flask(__name__)
outbox = saf.Outbox()

TABLE = "CREATE TABLE IF NOT EXISTS orders (number text PRIMARY KEY, total int NOT NULL)"
INSERT = "INSERT INTO orders (number, total) VALUES (%s, %s)"


def database() -> psycopg.Connection[Any]:
    """Return this request's connection; a larger application takes it from a pool."""
    if "database" not in g:
        g.database = psycopg.connect(os.environ["SHOP_DSN"])
        with g.database.transaction():
            g.database.execute(TABLE)
    return g.database  # type: ignore[no-any-return] # Flask's g has no types


@app.teardown_appcontext
def close(_: BaseException | None) -> None:
    """Close the connection; uncommitted work is rolled back."""
    if "database" in g:
        g.pop("database").close()


@app.post("/orders")
def place() -> tuple[Response, int]:
    """Place an order, with a message to the service billing."""
    order = request.get_json()
    try:
        # the block is one transaction, so commit here and not in a hook after the response: a
        # client that gets a 201 knows that the message is committed, too
        with database().transaction():
            database().execute(INSERT, [order["number"], order["total"]])
            outbox.send(
                database(),
                "billing",
                {"order": order["number"], "total": order["total"]},
                key=order["number"],
                message_type="OrderPlaced",
            )
    except psycopg.errors.UniqueViolation:
        return jsonify(error=f"order {order['number']} already exists"), 409
    return jsonify(order), 201
