"""Behind a pooler: sending and receiving are exactly as without one, the rest refuses it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import saf
from saf import Outbox
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, send
from tests.poolers import PgBouncer, prepared_by_name

OFTEN = 12
"""More than psycopg runs a statement before it gives it a name."""


@pytest.fixture
def one_session(app: Dsn) -> Iterator[PgBouncer]:
    """All clients share one session of the server, a transaction at a time."""
    with PgBouncer(app, "transaction") as pooler:
        yield pooler


class Total(saf.Processor):
    @saf.handles("Placed")
    def placed(self, message: saf.Received, connection: Any) -> None:
        """Nothing."""


def sent(app: Dsn) -> list[tuple[Any, ...]]:
    query = "SELECT to_service, convert_from(body, 'UTF8') FROM saf.outbox ORDER BY id"
    with connect(app) as connection:
        return fetch(connection, query)


EXPECTED = [pair for n in range(OFTEN) for pair in (("billing", f"b{n}"), ("shipping", f"s{n}"))]


def test_what_two_clients_send_in_turn_is_what_each_of_them_sent(
    app: Dsn, one_session: PgBouncer
) -> None:
    """A name that one has prepared is the other's statement, if the session is the same."""
    outbox, other = Outbox(), Outbox()
    through = one_session(app).conninfo
    with psycopg.connect(through) as bills, psycopg.connect(through) as shipments:
        for number in range(OFTEN):
            outbox.send(bills, "billing", f"b{number}", key="k")
            bills.commit()
            other.send_many(shipments, [saf.Message(service="shipping", body=f"s{number}")])
            shipments.commit()
        assert bills.prepare_threshold == 5, "the caller's connection stays as it was"
    assert sent(app) == EXPECTED
    assert prepared_by_name(one_session(app)) == []


def test_the_same_through_sqlalchemy(app: Dsn, one_session: PgBouncer) -> None:
    outbox = Outbox()
    connecting = partial(psycopg.connect, one_session(app).conninfo)
    bills, shipments = (
        sa.create_engine("postgresql+psycopg://", creator=connecting) for _ in range(2)
    )
    for number in range(OFTEN):
        with bills.begin() as connection:
            outbox.send(connection, "billing", f"b{number}", key="k")
        with shipments.begin() as connection:
            outbox.send_many(connection, [saf.Message(service="shipping", body=f"s{number}")])
    bills.dispose()
    shipments.dispose()
    assert sent(app) == EXPECTED
    assert prepared_by_name(one_session(app)) == []


def test_the_same_under_asyncio(app: Dsn, one_session: PgBouncer) -> None:
    async def business() -> None:
        outbox = Outbox()
        connecting = partial(psycopg.AsyncConnection.connect, one_session(app).conninfo)
        engine = create_async_engine("postgresql+psycopg://", async_creator=connecting)
        for number in range(OFTEN):
            async with AsyncSession(engine) as session, session.begin():
                await session.run_sync(outbox.send, "billing", f"b{number}")
                await session.run_sync(outbox.send, "shipping", f"s{number}")
        await engine.dispose()

    asyncio.run(business())
    assert sent(app) == EXPECTED
    assert prepared_by_name(one_session(app)) == []


def test_without_a_pooler_statements_are_prepared_as_ever(app: Dsn) -> None:
    outbox = Outbox()
    with psycopg.connect(app.conninfo) as connection:
        for _ in range(OFTEN):
            outbox.send(connection, "billing", "b")
        query = "SELECT statement FROM pg_prepared_statements"
        assert any("INSERT INTO saf.outbox" in text for (text,) in fetch(connection, query))


def test_two_receivers_in_turn_get_each_message_once_in_order(
    app: Dsn, mom: Dsn, one_session: PgBouncer
) -> None:
    with connect(mom) as connection:
        for service in ("billing", "shipping"):
            create_service(connection, service)
    with connect(app) as connection, connection.transaction():
        for number in range(OFTEN):
            Outbox().send(connection, "billing", f"b{number}", key="k")
            Outbox().send(connection, "shipping", f"s{number}", key="k")
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        cycle.run()
    through = one_session(mom)
    pool = partial(psycopg.connect, through.conninfo)
    engine = sa.create_engine("postgresql+psycopg://", creator=pool, pool_size=1)
    got: dict[str, list[str]] = {"billing": [], "shipping": []}
    for _ in range(OFTEN):
        for source, name in ((engine, "billing"), (through, "shipping")):
            with saf.receive(source, name, max_messages=1) as delivery:
                got[name] += [message.text() for message in delivery]
    engine.dispose()
    assert got == {
        "billing": [f"b{number}" for number in range(OFTEN)],
        "shipping": [f"s{number}" for number in range(OFTEN)],
    }
    assert prepared_by_name(through) == []


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_a_forwarder_refuses_a_pooler_at_its_source_in_one_sentence(
    app: Dsn, mom: Dsn, mode: str
) -> None:
    with (
        PgBouncer(app, mode, size=5) as pooler,
        Cycle(pooler(app), forwarding_rules(mom=mom)) as cycle,
        pytest.raises(ConfigurationError, match="connection pooler"),
    ):
        cycle.open()


def test_a_forwarder_refuses_a_pooler_at_a_destination_and_leaves_nothing_in_its_sessions(
    app: Dsn, mom: Dsn, one_session: PgBouncer
) -> None:
    with connect(app) as connection:
        send(connection, "b")
    with Cycle(app, forwarding_rules(mom=one_session(mom))) as cycle:
        (error,) = (receipt for receipt in cycle.run() if receipt.error_kind)
    assert error.error_kind == "ConfigurationError"
    assert "connection pooler" in str(error.error)
    assert bodies(mom) == []
    with psycopg.connect(one_session(mom).conninfo) as lent:
        assert fetch(lent, "SELECT current_setting('lock_timeout')") == [("0",)]


def test_processors_and_listeners_refuse_a_pooler(mom: Dsn, one_session: PgBouncer) -> None:
    with connect(mom) as connection:
        create_service(connection, "billing")
    with pytest.raises(ConfigurationError, match="connection pooler"):
        saf.Processors(one_session(mom), "billing", Total).drain()
    worker = saf.Worker(one_session(mom), "billing", listen=True)
    worker.handler()(lambda _message, _connection: None)
    with pytest.raises(ConfigurationError, match="connection pooler"):
        worker.drain()
