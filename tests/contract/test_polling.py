"""Polling: a forwarder in a loop asks often after work, seldom later, and misses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from saf.config import load
from saf.database import Dsn, fetch
from saf.forwarding.broker import SourceBroker
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


@pytest.fixture
def quiet(app: Dsn) -> Iterator[SourceBroker]:
    """A broker that was looked at, and had nothing."""
    broker = SourceBroker("app", app, lease_seconds=30)
    assert not pending(broker)
    yield broker
    broker.leave()


def pending(broker: SourceBroker) -> bool:
    return bool(broker.visit("mom", brief=False))


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


def test_a_lane_is_tried_when_its_time_comes_though_nothing_was_written(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection, Cycle(app, forwarding_rules(mom=mom)) as cycle:
        send(connection, "waits for a route")
        cycle.default = None
        cycle.run()
        add_route(connection, "mom")
        connection.execute(
            "UPDATE saf.backoff SET next_attempt_at = clock_timestamp() + interval '1 s'"
        )
        assert not cycle.broker.visit(None, brief=False)
        assert until(lambda: cycle.broker.visit(None, brief=False)) < AT_ONCE_SECONDS
