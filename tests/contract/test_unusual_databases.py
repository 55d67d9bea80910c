"""Databases whose settings are unusual: each body arrives as it was sent, by whatever way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql

import saf
from saf import Message, Outbox
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.operating import decide
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from saf.routing_service import RoutingService
from saf.setaside.selection import DeadLetters
from saf.testing.databases import Database
from tests.destinations import NOWHERE, count, route, send_to
from tests.pipeline import connect, forward, let_time_pass, run

BODIES = [b"s0\\x\x00\xff'", b"\\", b"\\x6162", b"", b'"{NULL}', "grüße\n".encode()]
KEY = "größe"
MANY = BODIES * 20
"""So many that they are sent by COPY."""

SETTINGS = {
    "standard_conforming_strings": "off",
    "datestyle": "German, DMY",
    "client_encoding": "LATIN1",
    "bytea_output": "escape",
    "default_transaction_isolation": "serializable",
}


@pytest.fixture(params=SETTINGS)
def unusual(request: pytest.FixtureRequest, app: Dsn, mom: Dsn) -> None:
    """The databases app and mom have an unusual setting."""
    statement = sql.SQL("ALTER DATABASE {} SET {} = {}")
    for dsn in (app, mom):
        with connect(dsn) as connection:
            value = [one.strip() for one in SETTINGS[request.param].split(",")]
            connection.execute(
                statement.format(
                    sql.Identifier(dsn.database),
                    sql.Identifier(request.param),
                    sql.SQL(", ").join(map(sql.Literal, value)),
                )
            )
    with connect(mom) as connection:
        create_service(connection, "billing")


def messages(bodies: list[bytes]) -> list[Message]:
    return [Message(service="billing", body=body, key=KEY) for body in bodies]


def one_by_one(app: Dsn) -> list[bytes]:
    with psycopg.connect(app.conninfo) as connection:
        for body in BODIES:
            Outbox().send(connection, "billing", body, key=KEY)
    return BODIES


def few(app: Dsn) -> list[bytes]:
    with psycopg.connect(app.conninfo) as connection:
        Outbox().send_many(connection, messages(BODIES))
    return BODIES


def many(app: Dsn) -> list[bytes]:
    with psycopg.connect(app.conninfo) as connection:
        Outbox().send_many(connection, messages(MANY))
    return MANY


def by_sqlalchemy(app: Dsn) -> list[bytes]:
    engine = sa.create_engine(Database(app).url)
    with engine.begin() as connection:
        Outbox().send_many(connection, messages(BODIES))
        Outbox().send_many(connection, messages(MANY))
    engine.dispose()
    return BODIES + MANY


def under_asyncio(app: Dsn) -> list[bytes]:
    async def send() -> None:
        async with await psycopg.AsyncConnection.connect(app.conninfo) as connection:
            await Outbox().asend_many(connection, messages(BODIES))

    asyncio.run(send())
    return BODIES


@pytest.mark.usefixtures("unusual")
@pytest.mark.parametrize(
    "send", [one_by_one, few, many, by_sqlalchemy, under_asyncio], ids=lambda send: send.__name__
)
def test_what_is_sent_by_any_way_is_received_as_it_was_sent(
    app: Dsn, mom: Dsn, send: Callable[[Dsn], list[bytes]]
) -> None:
    sent = send(app)
    run(app, mom=mom)
    with saf.receive(mom, "billing", max_messages=1000) as delivery:
        assert [(message.key, message.body) for message in delivery] == [(KEY, b) for b in sent]


@pytest.mark.usefixtures("unusual")
def test_what_waits_and_what_is_a_dead_letter_keeps_its_body(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    few(app)
    with connect(app) as connection:
        send_to(connection, "elsewhere", "")
        route(connection, "elsewhere", "other")
    forward(app, mom=NOWHERE, other=other)
    assert count(app, "parked") == len(BODIES)
    let_time_pass(app)
    with connect(mom) as store, connect(app) as connection:
        store.execute("ALTER TABLE saf.inbox ADD CONSTRAINT refuses CHECK (false)")
        run(app, mom=mom, other=other)
        assert count(app, "dead_letter") == len(BODIES)
        assert [body for (body,) in dead(connection)] == BODIES
        store.execute("ALTER TABLE saf.inbox DROP CONSTRAINT refuses")
        decide.retry(connection, DeadLetters(), "")
    run(app, mom=mom, other=other)
    with saf.receive(mom, "billing") as delivery:
        assert [message.body for message in delivery] == BODIES


@pytest.mark.usefixtures("unusual")
def test_what_a_receiver_rejects_keeps_its_body(app: Dsn, mom: Dsn) -> None:
    few(app)
    run(app, mom=mom)
    with saf.receive(mom, "billing") as delivery:
        for message in delivery:
            delivery.reject(message, "no")
    with connect(mom) as connection:
        assert [body for (body,) in dead(connection)] == BODIES


# psycopg reads no times in German, and these connections are the application's
@pytest.mark.usefixtures("unusual")
@pytest.mark.parametrize("through", ["psycopg", "SQLAlchemy"])
@pytest.mark.parametrize("unusual", [one for one in SETTINGS if one != "datestyle"], indirect=True)
def test_what_a_routing_service_sends_on_keeps_its_body(app: Dsn, mom: Dsn, through: str) -> None:
    with connect(mom) as connection:
        create_service(connection, "r0")
        add_route(connection, "app", service="r1")
        add_router(connection, "r0", "python", "tests.classifiers:to_first", mode="forward")
    with psycopg.connect(app.conninfo) as connection:
        Outbox().send_many(connection, [Message(service="r0", body=body) for body in BODIES])
    run(app, mom=mom)
    engine = sa.create_engine(Database(mom).url)
    pool = partial(psycopg.connect, mom.conninfo)
    RoutingService(pool if through == "psycopg" else engine, "r0").drain()
    engine.dispose()
    with connect(mom) as connection:
        found = fetch(connection, "SELECT body FROM saf.outbox ORDER BY id")
    assert sorted(body for (body,) in found) == sorted(BODIES)


def dead(connection: psycopg.Connection[object]) -> list[tuple[bytes]]:
    return fetch(connection, "SELECT body FROM saf.dead_letter ORDER BY dead_letter_id")
