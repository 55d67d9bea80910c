"""Guarantee 7 where nothing is down: what hangs is waited for no longer than its bound.

Locks that nobody gives back, a server process that is stopped, a network that swallows everything.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

import saf
from saf import Unavailable
from saf.broker import services
from saf.database import Dsn, bulk, fetch, unavailable_if_lost
from saf.database.bounds import Bounds
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass, send
from tests.silence import Silence

Broker = Callable[[str], Dsn]

SHORT = Bounds(
    network_seconds=2, lock_seconds=0.5, statement_seconds=1, chunk_seconds=1, long_seconds=5
)
PATIENT = replace(SHORT, lock_seconds=30, statement_seconds=3, chunk_seconds=3)
"""What is to be stopped is stopped before any bound of its own is over."""
ROOMY = replace(SHORT, statement_seconds=30, chunk_seconds=30)
"""For databases at which nothing hangs: on a busy machine, what they do takes seconds too."""
LONGER = 15.0
"""Of any one attempt, on a busy machine."""

WAITS_FOR_A_LOCK = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name = %(role)s AND wait_event_type = 'Lock'
"""


def bounded(dsn: Dsn, bounds: Bounds = SHORT) -> Dsn:
    return replace(dsn, bounds=bounds)


@contextmanager
def locked(dsn: Dsn, table: str) -> Iterator[psycopg.Connection[Any]]:
    """Somebody has a table for himself."""
    with connect(dsn) as connection, connection.transaction(force_rollback=True):
        connection.execute(f"LOCK TABLE saf.{table} IN ACCESS EXCLUSIVE MODE")
        yield connection


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process of the server is stopped meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def in_the_middle(dsn: Dsn, table: str, role: str, act: Callable[[int], None]) -> Iterator[None]:
    """Something happens to a session, by its pid, as soon as it is at a table."""

    def watch(holder: psycopg.Connection[Any]) -> None:
        with connect(dsn) as connection:
            while not (found := fetch(connection, WAITS_FOR_A_LOCK, {"role": role})):
                if over.wait(0.01):
                    return
        act(found[0][0])
        holder.rollback()

    over = Event()
    with dsn.connect(role="test") as holder:
        holder.execute(f"LOCK TABLE saf.{table} IN ACCESS EXCLUSIVE MODE")
        watching = Thread(target=watch, args=(holder,))
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()


@contextmanager
def frozen(dsn: Dsn, table: str, role: str) -> Iterator[None]:
    """A process of the server is stopped as soon as it is at a table."""
    pids: list[int] = []

    def freeze(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        pids.append(pid)

    try:
        with in_the_middle(dsn, table, role, freeze):
            yield
        assert pids, f"no session {role!r} came to saf.{table}"
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@pytest.fixture
def two(new_broker: Broker) -> tuple[Dsn, Dsn, Dsn]:
    """A source with ten messages each for two destinations."""
    app, mom, other = (bounded(new_broker(name)) for name in ("app", "mom", "other"))
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route (service, destination) VALUES ('shipping', 'other')"
        )
        for number in range(10):
            send(connection, f"b{number}", "k")
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, body) VALUES ('shipping', 'k', %s)",
                [f"s{number}".encode()],
            )
    return app, mom, other


def run(app: Dsn, **destinations: Dsn) -> list[str | None]:
    rules = forwarding_rules("exactly_once", 1000, **destinations)
    with Cycle(app, replace(rules, attempts=3)) as cycle:
        return [receipt.error for receipt in cycle.run() if receipt.error_kind]


def lanes(app: Dsn) -> list[tuple[Any, ...]]:
    with connect(app) as connection:
        return fetch(connection, "SELECT destination, error FROM saf.backoff")


BILLS = [f"b{number}" for number in range(10)]
SHIPMENTS = [f"s{number}" for number in range(10)]


@pytest.mark.every_postgresql
def test_a_locked_table_at_one_destination_stops_no_other_and_is_waited_for_once(
    two: tuple[Dsn, Dsn, Dsn],
) -> None:
    app, mom, other = two
    app, mom = bounded(app, ROOMY), bounded(mom, ROOMY)
    with locked(other, "inbox"), at_most(LONGER):
        assert run(app, mom=mom, other=other) == []
    assert bodies(mom) == BILLS
    ((destination, error),) = lanes(app)
    assert destination == "other"
    assert error == (
        "destination 'other' does not answer: canceling statement due to lock timeout; "
        "`saf doctor` shows who holds the lock"
    )
    let_time_pass(app)
    run(app, mom=mom, other=bounded(other, ROOMY))
    assert bodies(other) == SHIPMENTS


@pytest.mark.slow
def test_a_stopped_server_process_at_one_destination_stops_no_other(
    two: tuple[Dsn, Dsn, Dsn],
) -> None:
    """Its own timeouts do not fire, its machine goes on acknowledging: only the client can end."""
    app, mom, other = two
    with frozen(other, "watermark", "saf deliver"), at_most(LONGER):
        assert run(app, mom=mom, other=bounded(other, PATIENT)) == []
        assert bodies(mom) == BILLS
        ((destination, error),) = lanes(app)
        assert destination == "other"
        assert "has not answered for 6 s" in error
    let_time_pass(app)
    run(app, mom=mom, other=other)
    assert bodies(other) == SHIPMENTS


@pytest.mark.slow
def test_a_stopped_server_process_at_the_source_ends_the_task_and_not_the_run(
    two: tuple[Dsn, Dsn, Dsn],
) -> None:
    app, mom, other = two
    with Cycle(bounded(app, PATIENT), forwarding_rules(mom=mom, other=other)) as cycle:
        cycle.open()
        with frozen(app, "cursor", "saf mark"), at_most(LONGER):
            (error,) = (r.error for r in cycle.deliver() if r.error_kind == "Unavailable")
        assert error is not None
        assert "broker 'app' does not answer" in error
    assert run(app, mom=mom, other=other) == []
    assert (bodies(mom), bodies(other)) == (BILLS, SHIPMENTS)


def test_a_locked_cursor_at_the_source_is_unavailable_within_the_bound(
    two: tuple[Dsn, Dsn, Dsn],
) -> None:
    app, mom, _ = two
    with (
        Cycle(app, forwarding_rules(mom=mom)) as cycle,
        locked(app, "cursor"),
        at_most(LONGER),
        pytest.raises(Unavailable, match="lock timeout") as caught,
    ):
        cycle.open()
    assert caught.value.hangs


SQL = re.compile(r"SELECT|UPDATE|INSERT|COPY|LINE \d|SQLSTATE|libpq|\\n|\n")


@pytest.mark.parametrize("table", ["inbox", "watermark"])
def test_an_error_of_a_destination_contains_the_servers_message_and_no_sql(
    two: tuple[Dsn, Dsn, Dsn], table: str
) -> None:
    app, mom, other = two
    with locked(other, table):
        run(bounded(app, ROOMY), mom=bounded(mom, ROOMY), other=other)
    ((_, error),) = lanes(app)
    assert "canceling statement due to lock timeout" in error
    assert not SQL.search(error), error


def test_an_error_of_a_source_contains_the_servers_message_and_no_sql(
    two: tuple[Dsn, Dsn, Dsn],
) -> None:
    app, mom, other = two
    rules = forwarding_rules(mom=bounded(mom, ROOMY), other=bounded(other, ROOMY))
    with Cycle(app, rules) as cycle:
        cycle.open()
        with locked(app, "outbox"):  # by ADBC
            (error,) = (r.error for r in cycle.deliver() if r.error_kind == "Unavailable")
        assert error is not None
    with (
        Cycle(app, rules) as cycle,
        locked(app, "cursor"),  # by psycopg
        pytest.raises(Unavailable) as caught,
    ):
        cycle.open()
    for text in (error, str(caught.value)):
        assert "broker 'app' does not answer: canceling statement due to lock timeout" in text
        assert not SQL.search(text), text


def test_a_server_that_is_not_there_is_unavailable_in_one_line(app: Dsn) -> None:
    absent = replace(app, conninfo=f"{app.conninfo} host=/nowhere")
    with pytest.raises(Unavailable, match=r"is unavailable: .*No such file or directory; Is the"):
        absent.connect(role="test")


@pytest.mark.slow
def test_a_destination_behind_a_silent_network_is_unavailable_and_stops_no_other(
    two: tuple[Dsn, Dsn, Dsn],
) -> None:
    app, mom, other = two
    with (
        Silence(bounded(other, PATIENT)) as network,
        Cycle(app, forwarding_rules(mom=mom, other=network.dsn)) as cycle,
    ):
        falls = in_the_middle(other, "watermark", "saf deliver", lambda _: network.fall())
        with falls, at_most(LONGER):
            assert [r.error for r in cycle.run() if r.error_kind] == []
        assert bodies(mom) == BILLS
        ((destination, error),) = lanes(app)
        assert destination == "other"
        assert "has not answered" in error


def test_a_forwarder_that_vanishes_in_mid_transaction_gives_its_watermarks_back(
    two: tuple[Dsn, Dsn, Dsn],
) -> None:
    app, mom, other = two
    run(app, mom=mom, other=other)
    with connect(app) as connection:
        send(connection, "later", "k")
    with Silence(mom) as network, closing(network.dsn.connect(role="deliver")) as vanished:
        vanished.execute("SELECT FROM saf.watermark FOR UPDATE")
        network.fall()
        with at_most(LONGER):
            run(app, mom=mom, other=other)
        began = time.monotonic()
        while bodies(mom) != [*BILLS, "later"]:
            assert time.monotonic() - began < 20, "its session still holds the watermarks"
            let_time_pass(app)
            run(app, mom=mom, other=other)


def test_a_frozen_forwarders_row_locks_bound_those_who_take_over(
    two: tuple[Dsn, Dsn, Dsn],
) -> None:
    """Its session is alive, and in a transaction that it does not go on with."""
    app, mom, other = two
    with Cycle(app, forwarding_rules(mom=mom, other=other)) as sleeper:
        (work, *_) = sleeper.open()
        with closing(app.connect(role="mark")) as session:
            fetch(session, "SELECT FROM saf.cursor WHERE shard = ANY (%(s)s) FOR UPDATE",
                  {"s": work.batch.shards})  # fmt: skip
            with connect(app) as connection:
                connection.execute("UPDATE saf.member SET lease_until = now() - interval '1 s'")
            with (
                at_most(LONGER),
                suppress(Unavailable),  # if its own bound for the lock is over first
                Cycle(app, forwarding_rules(mom=mom)) as heir,
            ):
                heir.open()
            began = time.monotonic()
            while bodies(mom) != BILLS:
                assert time.monotonic() - began < 20, "nobody ends its transaction"
                try:
                    run(app, mom=mom, other=other)
                except Unavailable:
                    continue
            with pytest.raises(Unavailable), unavailable_if_lost("broker 'app'"):
                session.execute("SELECT 1")


def test_a_frozen_member_holds_up_the_others_no_longer_than_they_wait_for_a_lock(
    app: Dsn, mom: Dsn
) -> None:
    """They all take turns at the subscription's row, to share the shards."""
    with connect(app) as connection:
        send(connection, "later", "k")
    patient = bounded(app, replace(SHORT, statement_seconds=60))
    with closing(patient.connect(role="forward")) as frozen, at_most(LONGER):
        frozen.execute("SELECT FROM saf.subscription FOR NO KEY UPDATE")
        while bodies(mom) != ["later"]:
            try:
                run(bounded(app), mom=mom)
            except Unavailable:
                continue


def test_every_session_of_ours_has_bounds_at_the_server_and_none_of_theirs(app: Dsn) -> None:
    asked = "lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout"
    query = "SELECT " + ", ".join(f"current_setting('{name}')" for name in asked)
    with bounded(app).connect(role="status") as connection:
        assert fetch(connection, query) == [("500ms", "1s", "1s")]
    with bounded(app).connect(role="reconcile") as connection:
        assert fetch(connection, query) == [("500ms", "5s", "5s")]
    with bounded(app).connect(role="rebase") as connection:
        assert fetch(connection, query) == [("1s", "0", "5s")]
    with bounded(app).connect(role="receive") as connection:
        assert fetch(connection, query) == [("0", "0", "0")]


@pytest.mark.every_postgresql
@pytest.mark.parametrize("role", ["forward", "mark", "status", "reconcile", "rebase", "ui"])
def test_no_session_of_ours_compiles_statements_which_takes_longer_than_to_run_them(
    app: Dsn, role: str
) -> None:
    with connect(app) as connection:
        connection.execute(f"ALTER DATABASE {app.database} SET jit = on")
    query = "SELECT current_setting('jit')"
    with app.connect(role=role) as connection:
        assert fetch(connection, query) == [("off",)]
    if role in ("forward", "mark"):
        with closing(bulk.connect(app, role, "source 'app'")) as reader, reader.cursor() as cursor:
            cursor.execute(query)
            assert cursor.fetchone() == ("off",)


@pytest.mark.every_postgresql
@pytest.mark.parametrize("role", ["forward", "mark", "deliver", "dispatch", "route", "purge"])
def test_transactions_of_ours_are_read_committed_whatever_the_database_s_default(
    app: Dsn, role: str
) -> None:
    with connect(app) as connection:
        connection.execute(
            f"ALTER DATABASE {app.database} SET default_transaction_isolation = 'serializable'"
        )
    query = "SELECT current_setting('transaction_isolation')"
    with app.connect(role=role) as connection:
        assert fetch(connection, query) == [("read committed",)]
    if role in ("mark", "deliver"):
        with closing(bulk.connect(app, role, "source 'app'")) as reader, reader.cursor() as cursor:
            cursor.execute(query)
            assert cursor.fetchone() == ("read committed",)


@pytest.mark.slow
def test_a_connection_lost_for_silence_says_so_and_for_how_long(app: Dsn) -> None:
    with (
        bounded(app).connect(role="status", autocommit=True) as connection,
        pytest.raises(Unavailable, match="has not answered for 2 s"),
        unavailable_if_lost("broker 'app'"),
        stopped(connection.info.backend_pid),
    ):
        connection.execute("SELECT 1")


@pytest.mark.parametrize(
    ("table", "own"),
    [("cursor", None), ("cursor", "700ms"), ("inbox", None), ("parked", None), ("backoff", None)],
)
def test_a_receiver_whose_tables_are_locked_says_so_within_the_bound_and_loses_nothing(
    two: tuple[Dsn, Dsn, Dsn], table: str, own: str | None
) -> None:
    app, mom, other = two
    run(app, mom=mom, other=other)
    with connect(mom) as connection:
        services.create_service(connection, "billing", start="beginning")
    patient = own is not None
    dsn = bounded(mom, replace(SHORT, lock_seconds=60)) if patient else mom
    received = engine(dsn, own)
    with (
        locked(mom, table),
        at_most(LONGER),
        pytest.raises(Unavailable, match=r"lock timeout.*saf doctor") as caught,
        saf.receive(received, "billing"),
    ):
        pass
    assert caught.value.hangs
    with saf.receive(received, "billing") as delivery:
        assert [message.text() for message in delivery] == BILLS
        assert delivery.connection.execute("SHOW lock_timeout").fetchone() == (own or "0",)


def engine(dsn: Dsn, lock_timeout: str | None) -> Any:
    """Where to receive; with a bound of the application's own, if there is one."""
    if lock_timeout is None:
        return dsn

    @contextmanager
    def connection() -> Iterator[psycopg.Connection[Any]]:
        with dsn.connect(role="receive", autocommit=True) as raw:
            raw.execute(f"SET lock_timeout = '{lock_timeout}'")
            yield raw

    return connection


def test_a_worker_whose_cursors_are_locked_keeps_trying_and_says_so(
    two: tuple[Dsn, Dsn, Dsn],
) -> None:
    app, mom, other = two
    with connect(mom) as connection:
        services.create_service(connection, "billing")
    heard: list[str] = []
    worker = saf.Worker(mom, "billing")

    @worker.handler()
    def hear(message: saf.Received, _: object) -> None:
        heard.append(message.text())

    working = Thread(target=worker.run)
    with capture_logs() as said:
        with locked(mom, "cursor"):
            working.start()
            until = time.monotonic() + LONGER
            while not said and time.monotonic() < until:
                time.sleep(0.05)
        run(app, mom=mom, other=other)
        while len(heard) < len(BILLS) and time.monotonic() < until + LONGER:
            time.sleep(0.05)
        worker.stop()
        working.join()
    assert said
    for one in said:
        assert (one["event"], one["subscription"]) == ("delivery_failed", "billing")
        assert "lock timeout" in one["error"]
    assert heard == BILLS
