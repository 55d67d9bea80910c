"""Sending as applications meet it: under asyncio, in Django, and where it cannot be."""

from __future__ import annotations

import asyncio
import json
import shlex
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session

import saf
from saf import AutocommitError, InvalidMessage, Message, Outbox, SchemaMissing, UsageError
from saf.broker.grants import Kind, grant
from saf.database import Dsn
from saf.errors import ConfigurationError
from tests.pipeline import connect
from tests.programs import BIN, run, url

DRIVERS = ("psycopg", "asyncpg")
ZURICH = timezone(timedelta(hours=1))
SOON = datetime.now(ZURICH) + timedelta(hours=1)
PAST = datetime.now(ZURICH) - timedelta(hours=1)


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


def stored(dsn: Dsn) -> list[dict[str, Any]]:
    with connect(dsn) as connection, psycopg.Cursor[Any](connection, row_factory=dict_row) as rows:
        return rows.execute("SELECT * FROM saf.outbox ORDER BY id").fetchall()


def keys(dsn: Dsn) -> list[str | None]:
    return [row["key"] for row in stored(dsn)]


def many(count: int) -> list[Message]:
    return [Message(service="billing", body=b"", key=str(number)) for number in range(count)]


def asyncpgs(dsn: Dsn) -> dict[str, Any]:
    """How asyncpg connects there."""
    return {"host": dsn.parts["host"], "user": "postgres", "database": dsn.database, "port": 5432}


def async_engine(dsn: Dsn, driver: str, **options: Any) -> AsyncEngine:
    return create_async_engine(url(dsn).replace("psycopg", driver), **options)


# asyncio


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_async_session_sends_every_field_in_its_transaction(
    app: Dsn, outbox: Outbox, driver: str
) -> None:
    async def business() -> list[UUID]:
        engine = async_engine(app, driver)
        async with AsyncSession(engine) as session, session.begin():
            first = await outbox.asend(
                session,
                "billing",
                {"a": 1},
                key="A",
                headers={"trace": [1, None]},
                message_type="t",
                deliver_at=PAST,
                expires_at=SOON,
                to_broker=UUID(int=7),
                from_service="shop",
            )
            rest = await outbox.asend_many(session, many(2))
        async with AsyncSession(engine) as session:
            await outbox.asend(session, "billing", b"", key="rolled back")
        await engine.dispose()
        return [first, *rest]

    sent = asyncio.run(business())
    found = stored(app)
    assert [row["message_id"] for row in found] == sent
    row = found[0]
    assert (row["key"], row["message_type"], row["body"]) == ("A", "t", b'{"a":1}')
    assert row["headers"] == {"content-type": "application/json", "trace": [1, None]}
    assert (row["deliver_at"], row["expires_at"]) == (PAST, SOON)
    assert (row["to_broker"], row["from_service"]) == (UUID(int=7), "shop")
    assert keys(app) == ["A", "0", "1"]


def test_an_async_session_whose_rows_are_on_another_connection_sends_nothing(
    app: Dsn, outbox: Outbox
) -> None:
    async def business() -> None:
        default, other = (async_engine(app, "psycopg") for _ in range(2))
        try:
            async with AsyncSession(default) as session, session.begin():
                await outbox.asend(session, "billing", b"")
                await session.execute(
                    sa.text("SELECT 1"), bind_arguments={"bind": other.sync_engine}
                )
        finally:
            await default.dispose()
            await other.dispose()

    with pytest.raises(UsageError, match="bind_arguments"):
        asyncio.run(business())
    assert stored(app) == []


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_async_connection_and_a_scoped_session_send(
    app: Dsn, outbox: Outbox, driver: str
) -> None:
    async def business() -> None:
        engine = async_engine(app, driver)
        async with engine.begin() as connection:
            await outbox.asend(connection, "billing", b"", key="A")
        scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
        await outbox.asend(scoped, "billing", b"", key="B")
        await scoped.commit()
        await scoped.remove()
        await engine.dispose()

    asyncio.run(business())
    assert keys(app) == ["A", "B"]


def test_psycopgs_async_connection_and_cursor_send(app: Dsn, outbox: Outbox) -> None:
    async def business() -> None:
        async with await psycopg.AsyncConnection.connect(
            app.conninfo, row_factory=dict_row
        ) as connection:
            await outbox.asend(connection, "billing", b"", key="A")
            async with connection.cursor() as cursor:
                await outbox.asend_many(cursor, many(2))
            async with connection.pipeline():
                await outbox.asend(connection, "billing", b"", key="B")
            await connection.commit()
            await outbox.asend(connection, "billing", b"", key="rolled back")
            await connection.rollback()

    asyncio.run(business())
    assert keys(app) == ["A", "0", "1", "B"]


def test_an_async_connection_in_autocommit_is_refused_unless_a_transaction_is_open(
    app: Dsn, outbox: Outbox
) -> None:
    async def business() -> None:
        async with await psycopg.AsyncConnection.connect(
            app.conninfo, autocommit=True
        ) as connection:
            with pytest.raises(AutocommitError):
                await outbox.asend(connection, "billing", b"")
            async with connection.transaction():
                await outbox.asend(connection, "billing", b"", key="A")

    asyncio.run(business())
    assert keys(app) == ["A"]


def test_a_database_without_the_schema_is_named_under_asyncio_too(
    new_database: Callable[[str], Dsn], outbox: Outbox
) -> None:
    plain = new_database("plain")

    async def business() -> None:
        async with await psycopg.AsyncConnection.connect(plain.conninfo) as connection:
            with pytest.raises(SchemaMissing, match="plain"):
                await outbox.asend(connection, "billing", b"")

    asyncio.run(business())


def test_a_pooler_is_recognised_under_asyncio_once_for_each_database(app: Dsn) -> None:
    outbox = Outbox()

    async def business() -> int:
        async with await psycopg.AsyncConnection.connect(app.conninfo) as connection:
            await outbox.asend(connection, "billing", b"")
            before = connection.info.backend_pid
            await outbox.asend(connection, "billing", b"")
            return before

    assert asyncio.run(business())


def test_what_is_of_asyncio_is_not_sent_on_at_once_and_told_so(app: Dsn, outbox: Outbox) -> None:
    async def business() -> None:
        engine = async_engine(app, "psycopg")
        async with AsyncSession(engine) as session:
            with pytest.raises(
                UsageError,
                match=r"AsyncSession is an async connection: use `await outbox\.asend\(…\)`",
            ):
                outbox.send(session, "billing", b"")  # type: ignore[arg-type]
        async with engine.connect() as connection:
            with pytest.raises(
                UsageError, match=r"AsyncConnection is an async connection: .*asend_many"
            ):
                outbox.send_many(connection, many(2))  # type: ignore[arg-type]
            with pytest.raises(UsageError, match=r"session\.run_sync"):
                saf.begin_dialog(connection, from_service="a", to_service="b")  # type: ignore[arg-type]
        await engine.dispose()

    asyncio.run(business())
    assert keys(app) == []


@pytest.mark.parametrize("how", ["connection", "pool", "codec"])
def test_a_connection_of_asyncpg_sends_every_field_in_its_transaction(
    app: Dsn, outbox: Outbox, how: str
) -> None:
    async def business() -> None:
        async with asyncpg.create_pool(**asyncpgs(app), min_size=1) as pool:
            raw = pool if how == "pool" else await asyncpg.connect(**asyncpgs(app))
            async with pool.acquire() if how == "pool" else nullcontext(raw) as connection:
                if how == "codec":
                    await connection.set_type_codec(
                        "jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads
                    )
                async with connection.transaction():
                    await outbox.asend(
                        connection,
                        "billing",
                        {"a": 1},
                        key="A",
                        headers={"trace": [1, None]},
                        deliver_at=PAST,
                        to_broker=UUID(int=7),
                    )
                    await outbox.asend_many(connection, many(2))
                rolled_back = connection.transaction()
                await rolled_back.start()
                await outbox.asend(connection, "billing", b"", key="rolled back")
                await rolled_back.rollback()
            if how != "pool":
                await raw.close()

    asyncio.run(business())
    row = stored(app)[0]
    assert (row["key"], row["body"], row["deliver_at"]) == ("A", b'{"a":1}', PAST)
    assert row["headers"] == {"content-type": "application/json", "trace": [1, None]}
    assert row["to_broker"] == UUID(int=7)
    assert keys(app) == ["A", "0", "1"]


def test_a_connection_of_asyncpg_is_refused_like_any_other(
    app: Dsn, new_database: Callable[[str], Dsn], outbox: Outbox
) -> None:
    empty = new_database("empty")

    async def business() -> None:
        connection = await asyncpg.connect(**asyncpgs(app))
        with pytest.raises(AutocommitError):
            await outbox.asend(connection, "billing", b"")
        with pytest.raises(UsageError, match=r"asend"):
            outbox.send(connection, "billing", b"")
        await connection.close()
        with pytest.raises(UsageError, match="closed"):
            await outbox.asend(connection, "billing", b"")
        connection = await asyncpg.connect(**asyncpgs(empty))
        async with connection.transaction():
            with pytest.raises(SchemaMissing):
                await outbox.asend(connection, "billing", b"")
        await connection.close()

    asyncio.run(business())
    assert keys(app) == []


def test_what_is_not_of_asyncio_cannot_be_awaited_and_told_so(app: Dsn, outbox: Outbox) -> None:
    async def business() -> None:
        with connect(app) as connection, pytest.raises(UsageError, match=r"use outbox\.send, "):
            await outbox.asend(connection, "billing", b"")  # type: ignore[arg-type]

    asyncio.run(business())


# Django

DJANGO = """
import os, sys
import django
from django.conf import settings

postgresql = {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": os.environ["DATABASE"], "HOST": os.environ["HOST"], "USER": "postgres", "PORT": 5432,
}
settings.configure(DATABASES={
    "default": postgresql,
    "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
})
django.setup()
from django.db import connection, connections, transaction
import saf

outbox = saf.Outbox()
with transaction.atomic():
    outbox.send(connection, "billing", {"a": 1}, key="A")
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    try:
        with transaction.atomic():
            outbox.send(connection, "billing", b"", key="rolled back")
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    outbox.send_many(connections["default"], [
        saf.Message(service="billing", body=b"", key=str(n)) for n in range(2)])
for what in (connection, connections["lite"]):
    try:
        outbox.send(what, "billing", b"", key="outside")
    except saf.UsageError as refused:
        print(f"{type(refused).__name__}: {refused}")
connection.close()
"""


def test_djangos_connection_is_taken_as_it_is(app: Dsn) -> None:
    done = run(
        [sys.executable, "-c", DJANGO], env={"DATABASE": app.database, "HOST": app.parts["host"]}
    )
    assert done.returncode == 0, done.stderr
    autocommit, lite = done.stdout.splitlines()
    assert autocommit.startswith("AutocommitError: ")
    assert "transaction.atomic()" in autocommit
    assert lite.startswith("UsageError: this connection is to sqlite, and the outbox is a table in")
    assert keys(app) == ["A", "0", "1"]


# Where it cannot be


def test_a_closed_connection_says_that(app: Dsn, outbox: Outbox) -> None:
    connection = app.connect(role="test")
    cursor = connection.cursor()
    connection.close()
    engine = app.engine()
    with engine.connect() as alchemy:
        pass
    for conn in (connection, cursor, alchemy):
        with pytest.raises(UsageError, match=r"this connection is closed, so nothing was sent"):
            outbox.send(conn, "billing", b"")
    engine.dispose()

    async def business() -> None:
        gone = await psycopg.AsyncConnection.connect(app.conninfo)
        await gone.close()
        with pytest.raises(UsageError, match=r"this connection is closed"):
            await outbox.asend(gone, "billing", b"")

    asyncio.run(business())


def test_another_databases_connection_gets_a_sentence(outbox: Outbox) -> None:
    engine = sa.create_engine("sqlite://")
    said = "this connection is to sqlite, and the outbox is a table in PostgreSQL"
    with Session(engine) as session, pytest.raises(UsageError, match=said):
        outbox.send(session, "billing", b"")
    engine.dispose()
    lite = sqlite3.connect(":memory:")
    with pytest.raises(UsageError, match=r"cannot use a sqlite3\.Connection: expected a SQLA"):
        outbox.send(lite, "billing", b"")  # type: ignore[arg-type]
    lite.close()


@pytest.fixture
def role(app: Dsn) -> Iterator[str]:
    """A role that may log in, and nothing else."""
    name = f"sender {app.database}"
    with connect(app) as connection:
        connection.execute(f'CREATE ROLE "{name}" LOGIN')
    yield name
    with connect(app) as connection:
        connection.execute(f'DROP OWNED BY "{name}"')
        connection.execute(f'DROP ROLE "{name}"')


def as_role(dsn: Dsn, role: str) -> Dsn:
    return Dsn(psycopg.conninfo.make_conninfo(dsn.conninfo, user=role))


def test_who_has_no_right_to_send_is_told_the_command_that_gives_it(
    app: Dsn, role: str, outbox: Outbox
) -> None:
    theirs = as_role(app, role)
    said = rf"role '{role}' may not do this: .*`saf grant --role writer '{role}' --dsn .*dbname="
    with theirs.connect(role="test") as connection, pytest.raises(ConfigurationError, match=said):
        outbox.send(connection, "billing", b"")
    with connect(app) as owner:
        grant(owner, role, [Kind.RECEIVER])
    with theirs.connect(role="test") as connection, pytest.raises(ConfigurationError, match=said):
        outbox.send(connection, "billing", b"")
    engine = theirs.engine()
    with Session(engine) as session, pytest.raises(ConfigurationError, match=said):
        outbox.send_many(session, many(2))
    engine.dispose()

    async def business() -> None:
        async with await psycopg.AsyncConnection.connect(theirs.conninfo) as connection:
            with pytest.raises(ConfigurationError, match=said):
                await outbox.asend(connection, "billing", b"")
        alchemy = async_engine(theirs, "asyncpg")
        async with AsyncSession(alchemy) as session:
            with pytest.raises(ConfigurationError, match=said):
                await outbox.asend(session, "billing", b"")
        await alchemy.dispose()

    asyncio.run(business())
    with theirs.connect(role="test") as connection, pytest.raises(ConfigurationError) as told:
        outbox.send(connection, "billing", b"")
    program, *arguments = shlex.split(str(told.value).split("`")[1])
    assert program == "saf"
    done = run([BIN / "saf", *arguments], env={"PGUSER": "postgres"})
    assert done.returncode == 0, done.stderr
    with theirs.connect(role="test") as connection:
        outbox.send(connection, "billing", b"", key="A")
    assert keys(app) == ["A"]


def test_of_many_messages_the_one_at_fault_is_named(app: Dsn, outbox: Outbox) -> None:
    bad = Message(service="billing", body={"items": [{"price": {1}}]}, key="A")
    with connect(app) as connection:
        with pytest.raises(
            InvalidMessage, match=r"^messages\[3\]\.body: .* at body\.items\[0\]\.price: "
        ) as refused:
            outbox.send_many(connection, [*many(3), bad])
        assert (refused.value.item, refused.value.field) == (3, "body")
        other: Any = {"service": "billing"}
        with pytest.raises(InvalidMessage, match=r"^messages\[1\]: expected saf\.Message, got d"):
            outbox.send_many(connection, [*many(1), other])
    assert keys(app) == []


def test_saf_migrate_takes_the_url_that_sqlalchemy_has(new_database: Callable[[str], Dsn]) -> None:
    plain = new_database("plain")
    for driver in ("psycopg", "asyncpg", "psycopg2"):
        done = run([BIN / "saf", "migrate", "--dsn", url(plain).replace("psycopg", driver)])
        assert done.returncode == 0, done.stderr
    assert Dsn("postgresql+psycopg://u:geheim@h/d").parts["password"] == "geheim"
    assert "geheim" not in repr(Dsn("postgresql+psycopg://u:geheim@h/d"))
