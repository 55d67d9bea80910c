"""A database that is dropped under a forwarder in a loop is let go, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import psycopg
import pytest
from psycopg import sql

from saf.broker.embedded import EmbeddedServer
from saf.config import Fleet, Forwarder, Settings
from saf.database import Dsn
from saf.destinations.postgresql import Postgresql
from saf.forwarding import forwarder, runner
from saf.forwarding.runner import Runner
from saf.forwarding.summary import Summary
from tests.driver import InProcess
from tests.kept import _nothing_stays
from tests.pipeline import bodies, connect, send
from tests.waits import until, waiters

__all__ = ["_nothing_stays"]

REFRESH_SECONDS = 0.2


@contextmanager
def in_a_loop(
    fleet: Fleet, mom: Dsn, tasks: Runner | None = None, **options: Any
) -> Iterator[forwarder.Forwarder]:
    """A forwarder of a fleet, until the end; ``summary`` is of its last cycle."""
    settings = Settings(
        fleets={"tenants": fleet},
        destinations={"mom": Postgresql(dsn=mom)},
        forwarder=Forwarder(
            default_destination="mom", interval_seconds=0.05, attempts=1, **options
        ),
    )
    running = forwarder.Forwarder(settings, tasks or runner.InProcess())
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
def both(server: EmbeddedServer) -> Fleet:
    """Whoever of the tenants is there."""
    return Fleet(
        dsn=server.dsn("postgres"), databases="*_drop_[ab]", refresh_seconds=REFRESH_SECONDS
    )


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
    server: EmbeddedServer, mom: Dsn, tenants: tuple[Dsn, Dsn], both: Fleet
) -> None:
    gone, stays = tenants
    with in_a_loop(both, mom) as running:
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
    server: EmbeddedServer, mom: Dsn, tenants: tuple[Dsn, Dsn], both: Fleet
) -> None:
    gone, stays = tenants
    database = sql.Identifier(gone.database)
    with (
        in_a_loop(both, mom) as running,
        server.dsn("postgres").connect(role="test", autocommit=True) as admin,
    ):
        forwarded(gone, mom, "of the one that goes")
        with pytest.raises(psycopg.errors.ObjectInUse):
            admin.execute(sql.SQL("DROP DATABASE {}").format(database))
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(database))
        until(lambda: names(running) == {"b"})
        admin.execute(sql.SQL("DROP DATABASE {}").format(database))
        forwarded(stays, mom, "after")


def test_a_database_that_leaves_its_fleet_while_it_is_at_work_is_let_go_after_it(
    mom: Dsn, new_broker: Callable[[str], Dsn]
) -> None:
    """The list was asked for before the work, and comes in the middle of it."""
    goes, stays = new_broker("goes"), new_broker("stays")
    armed = Event()
    with connect(mom) as admin, connect(mom) as holder:
        admin.execute("CREATE TABLE tenant AS SELECT 'drop_b' AS name, '' AS dsn")
        admin.execute("UPDATE tenant SET dsn = %s", [stays.conninfo])
        admin.execute("INSERT INTO tenant VALUES ('drop_a', %s)", [goes.conninfo])
        fleet = Fleet(
            dsn=mom, query="SELECT name, dsn FROM tenant", refresh_seconds=REFRESH_SECONDS
        )

        def leave(job: int, task: int) -> None:  # noqa: ARG001 - as a runner calls it
            if armed.is_set():
                armed.clear()
                holder.execute("DELETE FROM tenant WHERE name = 'drop_a'")
                holder.commit()
                until(lambda: len(running.roster._listed["tenants"]) == 1, 20)

        with in_a_loop(fleet, mom, InProcess(before_task=leave), lease_seconds=1) as running:
            forwarded(goes, mom, "before")
            holder.autocommit = False
            holder.execute("LOCK TABLE tenant IN ACCESS EXCLUSIVE MODE")
            until(lambda: waiters(holder) == 1)
            armed.set()
            forwarded(goes, mom, "at work")
            until(lambda: names(running) == {"b"})
            forwarded(stays, mom, "after")
