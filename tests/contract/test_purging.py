"""Purging by a forwarder: beside its work, and not in its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from saf.config import Settings, load
from saf.database import Dsn
from tests.driver import InProcess, forwarder, looping
from tests.kept import _nothing_stays
from tests.pipeline import bodies, connect, send
from tests.programs import configuration
from tests.ring import in_slot, leave_slot
from tests.waits import blocked, until

__all__ = ["_nothing_stays"]


@pytest.fixture
def settings(app: Dsn, mom: Dsn, tmp_path: Path) -> Callable[[float], Settings]:
    def made(lock_seconds: float) -> Settings:
        brokers, destinations = {"app": app}, {"mom": mom}
        file = configuration(tmp_path / "saf.toml", brokers, destinations, interval_seconds=0.1)
        more = f"[purge]\nretention_seconds = 0\n[bounds]\nlock_seconds = {lock_seconds}\n"
        file.write_text(file.read_text() + more)
        return load(file)

    return made


@contextmanager
def purges_held_up(app: Dsn) -> Iterator[psycopg.Connection[Any]]:
    """Gives the connection whose transaction holds them up, by a table that only they look at."""
    with connect(app) as holder:
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE saf.staged IN ACCESS EXCLUSIVE MODE")
        yield holder


def test_a_loop_that_always_has_work_purges_all_the_same(
    app: Dsn,
    mom: Dsn,
    settings: Callable[[float], Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("saf.forwarding.purging.EVERY_SECONDS", 0.1)
    with connect(app) as connection:
        send(connection, "old")
        leave_slot(connection)
        send(connection, "first")
    runner, began = InProcess(), time.monotonic()
    busy = forwarder(settings(10), runner)

    def send_another(*_: int) -> None:
        with connect(app) as connection:
            send(connection, "another")
            if not in_slot(connection, "outbox_0") or time.monotonic() - began > 20:
                busy.stop()

    runner.before_task = send_another
    busy.loop(lambda _: None)
    with connect(app) as connection:
        assert in_slot(connection, "outbox_0") == []
    assert bodies(mom)[0] == "old"


def test_forwarding_does_not_wait_for_a_purge_and_a_loop_that_ends_does(
    app: Dsn, mom: Dsn, settings: Callable[[float], Settings]
) -> None:
    one = forwarder(settings(60), InProcess())
    with connect(app) as connection, purges_held_up(app) as holder, looping(one) as loop:
        until(lambda: blocked(connection) == 1)
        send(connection, "meanwhile")
        until(lambda: bodies(mom) == ["meanwhile"], 20)
        assert blocked(connection) == 1
        one.stop()
        loop.join(1)
        assert loop.is_alive()
        holder.execute("ROLLBACK")
        loop.join(20)
        assert not loop.is_alive()


def test_a_run_that_waits_for_its_purges_has_left_its_shards_to_others(
    app: Dsn, mom: Dsn, settings: Callable[[float], Settings]
) -> None:
    with connect(app) as connection, purges_held_up(app) as holder:
        send(connection, "first")
        ending = threading.Thread(target=forwarder(settings(60), InProcess()).drain)
        ending.start()
        until(lambda: blocked(connection) == 1, 20)
        send(connection, "next")
        next_one = forwarder(settings(60), InProcess())
        until(lambda: next_one.cycle() and bodies(mom) == ["first", "next"], 20)
        assert ending.is_alive()
        next_one._leave()
        holder.execute("ROLLBACK")
        ending.join(20)
    assert not ending.is_alive()


def test_a_purge_that_fails_is_said_and_stops_nothing(
    app: Dsn, mom: Dsn, settings: Callable[[float], Settings]
) -> None:
    one = forwarder(settings(0.3), InProcess())
    with connect(app) as connection, purges_held_up(app), capture_logs() as lines, looping(one):
        until(lambda: [line for line in lines if line["event"] == "not_purged"], 20)
        send(connection, "afterwards")
        until(lambda: bodies(mom) == ["afterwards"], 20)
    (said,) = [line for line in lines if line["event"] == "not_purged"]
    assert said["log_level"] == "warning"
    assert said["broker"] == "app"
    assert "`saf doctor` shows who holds the lock" in said["error"]
