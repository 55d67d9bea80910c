"""A database that is dropped under a forwarder in a loop is let go, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

import psycopg
import pytest
from psycopg import sql

from saf.broker.embedded import EmbeddedServer
from saf.config import Fleet, Forwarder, Settings
from saf.database import Dsn
from saf.destinations.postgresql import Postgresql
from saf.forwarding import forwarder, runner
from saf.forwarding.summary import Summary
from tests.kept import _nothing_stays
from tests.pipeline import bodies, connect, send
from tests.waits import until

__all__ = ["_nothing_stays"]

REFRESH_SECONDS = 0.2


@contextmanager
def in_a_loop(server: EmbeddedServer, databases: str, mom: Dsn) -> Iterator[forwarder.Forwarder]:
    """A forwarder of a fleet, until the end; ``summary`` is of its last cycle."""
    settings = Settings(
        fleets={
            "tenants": Fleet(
                dsn=server.dsn("postgres"), databases=databases, refresh_seconds=REFRESH_SECONDS
            )
        },
        destinations={"mom": Postgresql(dsn=mom)},
        forwarder=Forwarder(default_destination="mom", interval_seconds=0.05, attempts=1),
    )
    running = forwarder.Forwarder(settings, runner.InProcess())
    reports: list[Summary] = []
    thread = Thread(target=running.loop, args=[reports.append])
    thread.start()
    try:
        yield running
    finally:
        running.stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def tenants(new_broker: Callable[[str], Dsn], server: EmbeddedServer) -> Iterator[tuple[Dsn, Dsn]]:
    """The first is to be dropped; what is removed after the test is an empty one of its name."""
    gone, stays = new_broker("drop_a"), new_broker("drop_b")
    yield gone, stays
    with server.dsn("postgres").connect(role="test", autocommit=True) as admin:
        name = sql.Identifier(gone.database)
        admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))
        admin.execute(sql.SQL("CREATE DATABASE {}").format(name))


def forwarded(tenant: Dsn, mom: Dsn, body: str) -> None:
    with connect(tenant) as connection:
        send(connection, body)
    until(lambda: body in bodies(mom))


def names(running: forwarder.Forwarder) -> set[str]:
    return {name.rpartition("_")[2] for name in running.roster.brokers}


def test_a_database_of_a_fleet_that_is_dropped_by_force_is_let_go_and_the_others_go_on(
    server: EmbeddedServer, mom: Dsn, tenants: tuple[Dsn, Dsn]
) -> None:
    gone, stays = tenants
    with in_a_loop(server, "*_drop_[ab]", mom) as running:
        forwarded(gone, mom, "of the one that goes")
        forwarded(stays, mom, "before")
        with server.dsn("postgres").connect(role="test", autocommit=True) as admin:
            admin.execute(
                sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(gone.database))
            )
        until(lambda: names(running) == {"b"})
        forwarded(stays, mom, "after")
        until(lambda: running.summary.problems == [])


def test_a_database_that_no_fleet_lists_any_more_can_be_dropped_without_force(
    server: EmbeddedServer, mom: Dsn, tenants: tuple[Dsn, Dsn]
) -> None:
    gone, stays = tenants
    database = sql.Identifier(gone.database)
    with (
        in_a_loop(server, "*_drop_[ab]", mom) as running,
        server.dsn("postgres").connect(role="test", autocommit=True) as admin,
    ):
        forwarded(gone, mom, "of the one that goes")
        with pytest.raises(psycopg.errors.ObjectInUse):
            admin.execute(sql.SQL("DROP DATABASE {}").format(database))
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(database))
        until(lambda: names(running) == {"b"})
        admin.execute(sql.SQL("DROP DATABASE {}").format(database))
        forwarded(stays, mom, "after")
