"""Polling: a forwarder in a loop asks often after work, seldom later, and misses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from saf.config import load
from saf.database import Dsn, fetch
from saf.engine.work import Work
from saf.forwarding import broker as quiet_source
from saf.forwarding.broker import SourceBroker
from saf.log.pauses import SHORTEST_SECONDS, Pauses
from saf.routing.routes import add_route
from tests.driver import InProcess, forwarder
from tests.kept import _nothing_stays
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, send
from tests.programs import configuration
from tests.waits import until

__all__ = ["_nothing_stays"]

LONG_SECONDS = 30.0
AT_ONCE_SECONDS = 5.0
"""Far less than the longest pause, on a busy machine."""


def test_what_comes_soon_after_work_does_not_wait_for_the_longest_pause(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    file = configuration(
        tmp_path / "saf.toml", {"app": app}, {"mom": mom}, interval_seconds=LONG_SECONDS
    )
    looping = forwarder(load(file), InProcess())
    thread = threading.Thread(target=looping.loop, args=(lambda _: None,))
    with connect(app) as connection:
        send(connection, "first")
        thread.start()
        try:
            until(lambda: bodies(mom) == ["first"])
            time.sleep(0.1)  # it has found nothing since
            send(connection, "second")
            assert until(lambda: bodies(mom) == ["first", "second"]) < AT_ONCE_SECONDS
        finally:
            looping.stop()
            thread.join()


def test_a_pause_is_a_share_of_the_quiet_time_from_the_shortest_to_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr("saf.log.pauses.time", SimpleNamespace(monotonic=lambda: now[0]))
    pauses, found = Pauses(), []
    for after in (0.0, 1.0, 7.0, 1000.0):
        now[0] += after
        found.append(pauses.next(longest=5.0))
    assert found == [SHORTEST_SECONDS, 0.25, 2.0, 5.0]
    pauses.end()
    assert pauses.next(longest=5.0) == SHORTEST_SECONDS


@pytest.fixture
def quiet(app: Dsn) -> Iterator[SourceBroker]:
    """A broker that was looked at, and had nothing."""
    broker = SourceBroker("app", app, lease_seconds=30)
    assert not pending(broker)
    yield broker
    broker.leave()


def pending(broker: SourceBroker) -> bool:
    return bool(broker.visit("mom", brief=False).work)


def test_a_quiet_source_is_asked_by_one_statement_that_reads_no_table(
    quiet: SourceBroker, app: Dsn
) -> None:
    query = "SELECT seq_scan + coalesce(idx_scan, 0) FROM pg_stat_user_tables"
    assert not pending(quiet)
    with connect(app) as connection:
        connection.execute("SELECT pg_stat_force_next_flush()")
        before = fetch(connection, query)
        for _ in range(10):
            assert not pending(quiet)
        assert fetch(connection, query) == before


@pytest.mark.parametrize("how", ["commit", "began_before", "prepared", "other_database"])
def test_a_quiet_source_is_looked_at_again_as_soon_as_anything_is_committed(
    quiet: SourceBroker, app: Dsn, mom: Dsn, how: str
) -> None:
    with connect(app) as connection, connect(mom) as other:
        if how in ("began_before", "prepared"):
            connection.execute("BEGIN")
            send(connection, "1")
        if how == "prepared":
            connection.execute("PREPARE TRANSACTION 'poll'")
        assert not pending(quiet)
        assert not pending(quiet)
        if how == "other_database":  # of the same server: it is looked at in vain
            other.execute("CREATE TABLE anything ()")
            assert not pending(quiet)
        if how in ("commit", "other_database"):
            send(connection, "1")
        elif how == "began_before":
            connection.execute("COMMIT")
        else:
            connection.execute("COMMIT PREPARED 'poll'")
        assert pending(quiet)


class Looks:
    """How often a broker was looked at, and not only asked."""

    def __init__(self, broker: SourceBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        look = broker.open_work

        def counted(default_destination: str | None) -> list[Work]:
            self.count += 1
            return look(default_destination)

        monkeypatch.setattr(broker, "open_work", counted)
        monkeypatch.setattr(quiet_source, "SURE_SECONDS", 1e6)
        pending(broker)
        pending(broker)
        self.count = 0


def test_a_quiet_source_is_not_looked_at_because_other_databases_are_busy(
    quiet: SourceBroker, app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(mom) as other, connect(mom) as slow, connect(app) as connection:
        slow.execute("BEGIN")
        slow.execute("CREATE TABLE slow ()")
        other.execute("CREATE TABLE busy ()")
        looks = Looks(quiet, monkeypatch)
        for _ in range(5):
            other.execute("INSERT INTO busy DEFAULT VALUES")
            assert not pending(quiet)
        assert looks.count <= 1
        slow.execute("COMMIT")  # it was in progress at the look, wherever it has written
        before = looks.count
        for _ in range(5):
            other.execute("INSERT INTO busy DEFAULT VALUES")
            assert not pending(quiet)
        assert looks.count == before + 1
        send(connection, "1")
        assert pending(quiet)


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_committed_late_is_found_though_no_id_was_drawn_since(
    quiet: SourceBroker, app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    with connect(app) as late, connect(mom) as other:
        other.execute("CREATE TABLE busy ()")
        if when == "after":
            Looks(quiet, monkeypatch)
        late.execute("BEGIN")
        send(late, "1")
        Looks(quiet, monkeypatch)
        for _ in range(3):
            other.execute("INSERT INTO busy DEFAULT VALUES")
            assert not pending(quiet)
        late.execute("COMMIT")
        assert pending(quiet)


def test_a_lane_that_a_person_makes_is_seen_at_a_quiet_source(
    quiet: SourceBroker, app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(quiet, monkeypatch)
    with connect(app) as connection:
        for _ in range(3):  # the looks after the first of these rely on the sequence
            connection.execute("SELECT pg_current_xact_id()")
            looks.count = 0
            assert not pending(quiet)
        assert looks.count == 0
        connection.execute(
            "INSERT INTO saf.backoff (subscription_id, destination, kind, next_attempt_at, error) "
            "SELECT subscription_id, 'mom', 'main', now(), 'a person' FROM saf.subscription "
            "WHERE name = 'forwarder'"
        )
    assert not pending(quiet)
    assert looks.count == 1


def test_a_cursor_that_was_set_back_is_found_after_a_while(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(app) as connection, Cycle(app, forwarding_rules(mom=mom)) as cycle:
        send(connection, "1")
        cycle.run()
        looks = Looks(cycle.broker, monkeypatch)
        connection.execute("SELECT pg_current_xact_id()")
        assert not cycle.broker.visit("mom", brief=False).work
        monkeypatch.setattr(quiet_source, "SURE_SECONDS", 0.0)
        cycle.broker._quiet._until = time.monotonic()
        for _ in range(3):  # once the cursors are known, they are compared instead
            connection.execute("SELECT pg_current_xact_id()")
            looks.count = 0
            assert not cycle.broker.visit("mom", brief=False).work
        assert looks.count == 0
        monkeypatch.setattr(quiet_source, "SURE_SECONDS", 1e6)
        connection.execute("SELECT pg_current_xact_id()")
        assert not cycle.broker.visit("mom", brief=False).work
        connection.execute("UPDATE saf.cursor SET done = '1:1:'")
        assert not cycle.broker.visit("mom", brief=False).work
        monkeypatch.setattr(quiet_source, "SURE_SECONDS", 0.0)
        cycle.broker._quiet._until = time.monotonic()
        assert cycle.broker.visit("mom", brief=False).work


def test_cursors_are_compared_with_those_before_a_search(
    quiet: SourceBroker, app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet_source, "SURE_SECONDS", 0.0)
    asked, member = quiet._quiet, quiet._member
    assert member is not None
    with connect(app) as other, app.connect(role="test", autocommit=True) as connection:

        def lasts(*, searched: bool) -> bool:
            other.execute("SELECT pg_current_xact_id()")
            found = asked.lasts(connection, member)
            if not found:
                asked.nothing(searched=searched)
            return found

        assert [lasts(searched=True) for _ in range(3)] == [False, False, True]
        asked.forget()
        assert not any(lasts(searched=False) for _ in range(4))
        asked.forget()
        monkeypatch.setattr(quiet_source, "SURE_SECONDS", 1e6)
        assert not lasts(searched=False)
        asked._until = time.monotonic()
        assert not asked.lasts(connection, member), "nobody has written, and nobody has searched"


def test_a_renewed_lease_is_no_reason_to_search(
    quiet: SourceBroker, app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(quiet, monkeypatch)
    with connect(app) as connection:
        quiet.lease_seconds = 1e-9
        for _ in range(3):  # the looks after the first of these rely on the sequence
            looks.count = 0
            assert not pending(quiet)
        assert looks.count == 0
        send(connection, "1")
        assert pending(quiet)


def test_a_lane_is_tried_when_its_time_comes_though_nothing_was_written(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection, Cycle(app, forwarding_rules(mom=mom)) as cycle:
        send(connection, "waits for a route")
        cycle.default = None
        cycle.run()
        add_route(connection, "mom")
        connection.execute(
            "UPDATE saf.backoff SET next_attempt_at = clock_timestamp() + interval '1 s'"
        )
        assert not cycle.broker.visit(None, brief=False).work
        assert until(lambda: cycle.broker.visit(None, brief=False).work) < AT_ONCE_SECONDS
