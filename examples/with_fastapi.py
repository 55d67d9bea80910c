"""A web application that places orders: FastAPI, and SQLAlchemy under asyncio.

    pip install fastapi uvicorn 'sqlalchemy[asyncio]'
    export SHOP_URL=postgresql+psycopg://localhost/shop  # `saf migrate` was run on that database
    uvicorn with_fastapi:app
    curl -X POST localhost:8000/orders -H 'content-type: application/json' \\
         -d '{"number": "A-1", "total": 90}'
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import sqlalchemy as sa
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

import saf

engine = create_async_engine(os.environ["SHOP_URL"])
sessions = async_sessionmaker(engine)
outbox = saf.Outbox()

TABLE = sa.text("CREATE TABLE IF NOT EXISTS orders (number text PRIMARY KEY, total int NOT NULL)")
INSERT = sa.text("INSERT INTO orders (number, total) VALUES (:number, :total)")


class Order(BaseModel):
    """The request's body."""

    number: str
    total: int


@asynccontextmanager
async def life(_: FastAPI) -> AsyncIterator[None]:
    """Create the table before the first request; close all connections after the last."""
    async with engine.begin() as connection:
        await connection.execute(TABLE)
    yield
    await engine.dispose()


app = FastAPI(lifespan=life)


@app.post("/orders", status_code=201)
async def place(order: Order) -> Order:
    """Place an order, with a message to the service billing."""
    try:
        # one transaction: a client that gets a 201 knows that the message is committed, too
        async with sessions.begin() as session:
            await session.execute(INSERT, order.model_dump())
            await outbox.asend(
                session,
                "billing",
                {"order": order.number, "total": order.total},
                key=order.number,
                message_type="OrderPlaced",
            )
    except IntegrityError:
        raise HTTPException(409, f"order {order.number} already exists") from None
    return order
