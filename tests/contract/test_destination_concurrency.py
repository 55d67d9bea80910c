"""Concurrency of destinations: how many tasks of a source's forwarders store there at a time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saf.config import load
from saf.database import Dsn, connections, fetch
from saf.destinations.postgresql import Postgresql
from saf.engine import context, seats
from saf.engine.source_session import SourceSession
from saf.errors import ConfigurationError
from saf.setaside import backoff
from saf.testing.cycle import Cycle, forwarding_rules
from tests.destinations import count, route, send_to, subscription
from tests.driver import InProcess, forwarder
from tests.pipeline import bodies, connect, forward, send
from tests.processes import start
from tests.programs import configuration
from tests.waits import until

MESSAGES, KEYS = 300, 60
COUNTING = """
CREATE TABLE seen (id bigint GENERATED ALWAYS AS IDENTITY, names text[]);
CREATE VIEW storing AS SELECT DISTINCT a.application_name AS name, a.pid
FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.objid = 4711 AND l.database = (
    SELECT oid FROM pg_database WHERE datname = current_database());
CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM pg_advisory_xact_lock_shared(4711);
    INSERT INTO public.seen (names) SELECT array_agg(name) FROM public.storing;
    PERFORM pg_sleep(0.02);
    RETURN NULL;
END $$;
CREATE TRIGGER see AFTER INSERT ON saf.inbox FOR EACH STATEMENT EXECUTE FUNCTION see()
"""
FILL = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT 'billing', 'k' || n %% %s, convert_to(n::text, 'UTF8') FROM generate_series(0, %s - 1) AS n
"""
SHARES = """
SELECT count(DISTINCT owner) FROM saf.cursor JOIN saf.subscription USING (subscription_id)
WHERE log = 'outbox' AND name = 'forwarder' AND owner IS NOT NULL
"""


def narrow(dsn: Dsn, concurrency: int = 1, **more: Any) -> Postgresql:
    return Postgresql(dsn=dsn, concurrency=concurrency, **more)


@contextmanager
def seats_taken(app: Dsn, destination: str, number: int = 1) -> Iterator[None]:
    """Other tasks have the first seats during a block; they end without freeing them."""
    with ExitStack() as stack:
        for expected in range(1, number + 1):
            connection = stack.enter_context(connect(app))
            taken = seats.take(connection, subscription(connection), destination, number, 60.0)
            assert taken is not None
            assert taken.number == expected
        yield


def member(app: Dsn, mom: Dsn, name: str) -> None:
    """A program: a forwarder in small chunks, until it is killed."""
    named = Dsn(f"{mom.conninfo} application_name={name}")
    rules = forwarding_rules("exactly_once", 5, mom=narrow(named, 2))
    with Cycle(app, rules) as cycle:
        while True:
            cycle.run()
            time.sleep(0.01)


def test_six_processes_keep_the_limit_though_two_are_killed_as_they_store(
    app: Dsn, mom: Dsn
) -> None:
    with connect(mom) as there, connect(app) as source:
        there.execute(COUNTING)
        names = [f"member{number}" for number in range(6)]
        ones = {name: start(member, app, mom, name) for name in names}
        try:
            until(lambda: fetch(source, SHARES) == [(6,)], seconds=200)
            source.execute(FILL, [KEYS, MESSAGES])
            until(lambda: fetch(there, "SELECT count(*) > 10 FROM seen") == [(True,)], seconds=200)
            killed: set[str] = set()
            while len(killed) < 2:
                for name, _ in fetch(there, "SELECT * FROM storing"):
                    if len(killed) < 2 and name not in killed:
                        pid = ones[name].pid
                        assert pid is not None
                        os.kill(pid, signal.SIGKILL)
                        ones[name].join()
                        killed.add(name)
            ((last,),) = fetch(there, "SELECT max(id) FROM seen")
            until(lambda: count(mom, "inbox") >= MESSAGES, seconds=200)
        finally:
            for one in ones.values():
                one.kill()
                one.join()
        seen = fetch(there, "SELECT id, names FROM seen ORDER BY id")
    # what a killed process has begun ends at the server, and is no task any more
    most = max(len({*names} - (killed if id_ > last else set())) for id_, names in seen)
    assert most == 2
    assert len({name for _, names in seen for name in names}) > 2, "all take turns"
    by_key = defaultdict[int, list[int]](list)
    for body in map(int, bodies(mom)):
        by_key[body % KEYS].append(body)
    assert by_key == {key: [*range(key, MESSAGES, KEYS)] for key in range(KEYS)}


def test_the_only_destination_gets_its_messages_once_a_seat_is_free(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "SPEND_SECONDS", 0.1)
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number))
        forward(app, mom=narrow(mom))
        send(connection, "10")
        one = threading.Thread(target=forward, args=[app], kwargs={"mom": narrow(mom)})
        with seats_taken(app, "mom"):
            one.start()
            time.sleep(0.5)
            assert len(bodies(mom)) == 10
        one.join()
        assert bodies(mom) == [str(number) for number in range(11)]
        assert count(app, "parked") == 0


def test_other_destinations_wait_only_briefly_and_order_stays(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()
    has_seat = context.Context.has_seat

    def timed(*given: Any, **more: Any) -> bool:
        began = time.monotonic()
        found = has_seat(*given, **more)
        waits.append(time.monotonic() - began)
        return found

    monkeypatch.setattr(context.Context, "has_seat", timed)
    with connect(app) as connection:
        route(connection, "shipping", "other")
        forward(app, mom=mom, other=narrow(other))
        rules = forwarding_rules("exactly_once", 5, mom=mom, other=narrow(other))
        for number in range(30):
            send_to(connection, "shipping", str(number))
            send_to(connection, "billing", str(number))
        with seats_taken(app, "other"):
            with Cycle(app, rules) as cycle:
                cycle.run()
            assert context.SPEND_SECONDS / 2 < sum(waits) < context.SPEND_SECONDS + 4
            assert bodies(mom) == [str(number) for number in range(30)]
            assert bodies(other) == []
            assert fetch(connection, "SELECT sum(attempts) FROM saf.backoff") == [(0,)]
        send_to(connection, "shipping", "30")
        with Cycle(app, rules) as cycle:
            cycle.run()
            cycle.run()
        assert bodies(other) == [str(number) for number in range(31)]


def test_a_limit_that_changes_counts_in_the_next_run(app: Dsn, mom: Dsn, other: Dsn) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        forward(app, mom=mom, other=other)
        send_to(connection, "shipping", "1")
        with seats_taken(app, "other", 2):
            forward(app, mom=mom, other=narrow(other, 2))
            assert bodies(other) == []
            forward(app, mom=mom, other=narrow(other, 3))
            assert bodies(other) == ["1"]
            send_to(connection, "shipping", "2")
            forward(app, mom=mom, other=narrow(other, 1))
            assert bodies(other) == ["1"]


def test_a_task_frees_its_seat_and_restores_its_session(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        number = subscription(connection)
        connection.execute("SET idle_session_timeout = '7min'")
        taken = seats.take(connection, number, "mom", 1, 5.0)
        assert taken is not None
        assert fetch(connection, "SHOW idle_session_timeout") == [("5s",)]
        with connect(app) as second:
            assert seats.take(second, number, "mom", 1, 5.0) is None
            assert seats.take(second, number, "other", 1, 5.0) is not None
            taken.free()
            assert fetch(connection, "SHOW idle_session_timeout") == [("7min",)]
            assert seats.take(second, number, "mom", 1, 5.0) is not None
        send(connection, "1")
        with Cycle(app, forwarding_rules(mom=narrow(mom))) as cycle:
            cycle.work = [replace(work, keep=True) for work in cycle.open()]
            try:
                cycle.close(cycle.deliver())
                assert bodies(mom) == ["1"]
                assert seats.take(connection, number, "mom", 1, 5.0) is not None
            finally:
                connections.forget()


def test_a_process_that_hangs_loses_its_seat(app: Dsn) -> None:
    with connect(app) as connection, connect(app) as second:
        number = subscription(connection)
        assert seats.take(connection, number, "mom", 1, 0.2)
        until(lambda: seats.take(second, number, "mom", 1, 60.0), seconds=5)
        connection.close()


def test_a_lost_session_loses_the_seat(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection, Cycle(app, forwarding_rules(mom=narrow(mom))) as cycle:
        send(connection, "1")
        (work,) = cycle.open()
        session = SourceSession(work, attempts=2)
        assert session.has_seat("mom", 1)
        ((pid,),) = session.find(lambda source: fetch(source, "SELECT pg_backend_pid()"))
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        with seats_taken(app, "mom"):
            assert not session.has_seat("mom", 1)
        until(lambda: session.has_seat("mom", 1), seconds=5)
        session.free_seat()
        session.close()


def test_messages_sent_at_most_once_wait_for_a_seat(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "SPEND_SECONDS", 0.1)
    once = narrow(other, quality="at_most_once")
    with connect(app) as connection:
        route(connection, "shipping", "other")
        forward(app, mom=mom, other=once)
        send_to(connection, "shipping", "1")
        one = threading.Thread(target=forward, args=[app], kwargs={"mom": mom, "other": once})
        with seats_taken(app, "other"):
            one.start()
            time.sleep(0.5)
            assert bodies(other) == []
        one.join()
        assert bodies(other) == ["1"]
        assert count(app, "dead_letter") == 0


def test_a_pause_ends_the_wait_for_a_seat(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "ASK_SECONDS", 0.05)
    with connect(app) as connection:
        forward(app, mom=narrow(mom))
        send(connection, "1")
        one = threading.Thread(target=forward, args=[app], kwargs={"mom": narrow(mom)})
        with seats_taken(app, "mom"):
            one.start()
            time.sleep(0.3)
            assert one.is_alive()
            assert backoff.pause(connection, "mom")
            one.join(10)
            assert not one.is_alive()
        assert backoff.resume(connection, "mom")
        forward(app, mom=narrow(mom))
        assert bodies(mom) == ["1"]


def test_saf_toml_limits_little_work_too(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    text = file.read_text()
    file.write_text(text.replace("[destinations.mom]", "[destinations.mom]\nconcurrency = 1"))
    with connect(app) as connection:
        send(connection, "1")
        forwarder(load(file), InProcess()).drain()
        send(connection, "2")
        run = forwarder(load(file), InProcess())
        one = threading.Thread(target=run.drain)
        with seats_taken(app, "mom"):
            one.start()
            time.sleep(0.5)
            assert bodies(mom) == ["1"]
        one.join()
        assert bodies(mom) == ["1", "2"]
    file.write_text(text.replace("[destinations.mom]", "[destinations.mom]\nconcurrency = 0"))
    with pytest.raises(ConfigurationError, match="concurrency"):
        load(file)
