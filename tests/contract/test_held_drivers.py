"""By name and later on each driver: the same statements, and the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import saf
from saf.database import Dsn, fetch
from saf.errors import AutocommitError, InvalidMessage, UsageError
from tests.pipeline import connect
from tests.programs import url

LATER = datetime(2199, 1, 1, tzinfo=UTC)
HELD = "SELECT name, due, body, headers ->> 'x' FROM saf.held ORDER BY name"

outbox = saf.Outbox()


def stored(dsn: Dsn) -> list[tuple[Any, ...]]:
    with connect(dsn) as connection:
        return fetch(connection, HELD)


EXPECTED = [
    ("a", LATER + timedelta(days=1), b"\x00\\\xff", "é\\"),
    ("c", LATER, b"3", None),
    ("d", None, b"", None),
]
MANY = [
    saf.Message(service="billing", body="3", name="c", deliver_at=LATER),
    saf.Message(service="billing", body="4", name="d", key="k"),
    saf.Message(service="billing", body="5"),
]
FIRST: dict[str, Any] = {
    "name": "a",
    "deliver_at": LATER,
    "headers": {"x": "é\\"},
    "once_for": timedelta(days=1, microseconds=1),
}


@pytest.mark.parametrize("driver", ["psycopg", "Session", "asyncpg by SQLAlchemy", "literals"])
def test_each_driver_holds_moves_and_cancels(app: Dsn, driver: str) -> None:
    dialect = "asyncpg" if "asyncpg" in driver else "psycopg"
    if driver == "literals":
        with connect(app) as connection:
            connection.execute(
                f"ALTER DATABASE {app.database} SET standard_conforming_strings = off".encode()
            )

    def act(conn: Any) -> None:
        assert outbox.send(conn, "billing", b"\x00\\\xff", **FIRST).is_new
        assert not outbox.send(conn, "billing", "2", **FIRST).is_new
        assert [one.is_new for one in outbox.send_many(conn, MANY)] == [True] * 3
        outbox.send(conn, "billing", "b", name="b", deliver_at=LATER)
        assert outbox.reschedule(conn, "billing", "a", LATER + timedelta(days=1))
        assert outbox.cancel(conn, "billing", "b") is True
        assert outbox.cancel(conn, "billing", "b") is False

    if driver in ("psycopg", "literals"):
        with psycopg.connect(app.conninfo) as connection:
            act(connection)
    elif dialect == "psycopg":
        engine = sa.create_engine(url(app))
        with Session(engine) as session, session.begin():
            act(session)
        engine.dispose()
    else:

        async def run() -> None:
            engine = create_async_engine(url(app).replace("psycopg", "asyncpg"))
            async with AsyncSession(engine) as session, session.begin():
                await session.run_sync(act)
            await engine.dispose()

        asyncio.run(run())
    assert stored(app) == EXPECTED


@asynccontextmanager
async def opened(app: Dsn, driver: str) -> AsyncIterator[Any]:
    if driver == "psycopg":
        async with await psycopg.AsyncConnection.connect(app.conninfo) as connection:
            yield connection
    elif driver == "asyncpg":
        raw = await asyncpg.connect(url(app).replace("+psycopg", ""))
        async with raw.transaction():
            yield raw
        await raw.close()
    else:
        engine = create_async_engine(url(app).replace("psycopg", driver.split(maxsplit=1)[0]))
        async with AsyncSession(engine) as session, session.begin():
            yield session
        await engine.dispose()


DRIVERS = ["psycopg", "asyncpg", "psycopg by SQLAlchemy", "asyncpg by SQLAlchemy"]


@pytest.mark.parametrize("driver", DRIVERS)
def test_under_asyncio_each_driver_holds_moves_and_cancels(app: Dsn, driver: str) -> None:
    async def run() -> None:
        async with opened(app, driver) as conn:
            assert (await outbox.asend(conn, "billing", b"\x00\\\xff", **FIRST)).is_new
            assert not (await outbox.asend(conn, "billing", "2", **FIRST)).is_new
            assert [one.is_new for one in await outbox.asend_many(conn, MANY)] == [True] * 3
            assert (await outbox.asend(conn, "billing", "plain")).is_new
            await outbox.asend(conn, "billing", "b", name="b", deliver_at=LATER)
            assert await outbox.areschedule(conn, "billing", "a", LATER + timedelta(days=1))
            assert await outbox.acancel(conn, "billing", "b") is True
            assert await outbox.acancel(conn, "billing", "b") is False

    asyncio.run(run())
    assert stored(app) == EXPECTED


@pytest.mark.parametrize("driver", DRIVERS)
def test_on_each_driver_what_the_server_refuses_is_the_same_error(app: Dsn, driver: str) -> None:
    day = timedelta(days=1)

    async def run() -> None:
        async with opened(app, driver) as conn:
            await outbox.asend(conn, "a", "1", name="n", deliver_at=LATER, expires_at=LATER + day)
            says = r"^deliver_at: 2199-01-02 .* is not before expires_at 2199-01-02 "
            with pytest.raises(InvalidMessage, match=says) as refused:
                await outbox.areschedule(conn, "a", "n", LATER + day)
            assert refused.value.field == "deliver_at"

    asyncio.run(run())


def test_an_async_connection_and_one_in_autocommit_name_the_method_that_cancels(app: Dsn) -> None:
    async def run() -> None:
        engine = create_async_engine(url(app).replace("psycopg", "asyncpg"))
        async with AsyncSession(engine) as session:
            with pytest.raises(UsageError, match=r"`acancel` or `areschedule`"):
                outbox.cancel(session, "a", "n")  # type: ignore[arg-type]
        await engine.dispose()
        raw = await asyncpg.connect(url(app).replace("+psycopg", ""))
        with pytest.raises(AutocommitError, match="would be cancelled even if"):
            await outbox.acancel(raw, "a", "n")
        with pytest.raises(AutocommitError, match="would be sent even if"):
            await outbox.asend(raw, "a", "1", name="n")
        await raw.close()

    asyncio.run(run())
