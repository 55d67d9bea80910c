"""A web application that also receives: Litestar, with a worker beside it in the same process.

    pip install litestar uvicorn
    export MOM_DSN=postgresql://localhost/mom            # `saf migrate --dsn "$MOM_DSN"` was run
    saf service create billing                           # once; it lives in that database
    uvicorn worker_in_litestar:app
    curl localhost:8000/invoices/A-1                     # once the order A-1 was forwarded

The worker begins with the application, and stops in order with it: on SIGTERM, on Ctrl-C, and when
``uvicorn --reload`` restarts the application. Several processes share the messages.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from litestar import Litestar, get
from litestar.exceptions import HTTPException, NotFoundException

import saf

DSN = os.environ["MOM_DSN"]
billing = saf.Worker(DSN, "billing")

TABLE = "CREATE TABLE IF NOT EXISTS invoice (number text PRIMARY KEY, total int NOT NULL)"
INSERT = "INSERT INTO invoice (number, total) VALUES (%s, %s)"
SELECT = "SELECT total FROM invoice WHERE number = %s"


@billing.handler("OrderPlaced")
async def placed(message: saf.Received, connection: psycopg.AsyncConnection[Any]) -> None:
    """Write the invoice of an order, in the event loop of the application."""
    order = message.json()
    await connection.execute(INSERT, [order["order"], order["total"]])


@asynccontextmanager
async def life(app: Litestar) -> AsyncIterator[None]:
    """Run the worker beside the application; the application does not start without it."""
    async with await psycopg.AsyncConnection.connect(DSN, autocommit=True) as connection:
        await connection.execute(TABLE)
    async with billing.running() as app.state.worker:
        yield


@get("/invoices/{number:str}")
async def invoice(number: str) -> dict[str, Any]:
    """Return the invoice of an order."""
    async with await psycopg.AsyncConnection.connect(DSN, autocommit=True) as connection:
        row = await (await connection.execute(SELECT, [number])).fetchone()
    if row is None:
        raise NotFoundException(f"no invoice for order {number}")
    return {"number": number, "total": row[0]}


@get("/health")
async def health() -> dict[str, str]:
    """Let a supervisor restart the process if its worker has ended."""
    if app.state.worker.done():
        raise HTTPException("the worker has ended; the log has the reason", status_code=503)
    return {"worker": "runs"}


app = Litestar([invoice, health], lifespan=[life])
