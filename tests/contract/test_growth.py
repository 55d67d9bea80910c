"""Pools that grow: as many processes of a worker as its messages need, within bounds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import typer

import saf
from saf.broker import services
from saf.cli.worker import Pool, Processes, processes_of
from saf.database import Dsn, fetch
from saf.receiving import growth
from saf.receiving.growth import Growth
from tests.pipeline import connect
from tests.programs import ROOT
from tests.receivers import SUBSCRIPTION, effects, put, running
from tests.waits import until

BUSY, IDLE = 0, 100

READER = """
import os, pathlib, sys, time
idle, pipe = pathlib.Path(sys.argv[1]), int(sys.argv[3])
while True:
    os.write(pipe, bytes([int(idle.read_text())]))
    time.sleep(0.02)
"""


class Readers:
    """A pool of programs that report what a file says."""

    def __init__(self, folder: Path, *, least: int, most: int) -> None:
        self._file = folder / "idle"
        self.are(BUSY)
        command = [sys.executable, "-c", READER, str(self._file)]
        self.pool = Pool([command] * most, least)
        self.stopping = threading.Event()

    def are(self, idle: int) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(str(idle))
        part.rename(self._file)

    def number(self) -> int:
        self.pool.tend(self.stopping)
        return len(self.pool._running)


@pytest.fixture
def readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Readers]:
    monkeypatch.setattr(growth, "GROW_SECONDS", 3)
    monkeypatch.setattr(growth, "SHRINK_SECONDS", 5)
    ones = Readers(tmp_path, least=1, most=3)
    yield ones
    ones.stopping.set()
    ones.pool.end()


def test_a_pool_grows_while_all_are_busy_and_shrinks_when_they_are_not(readers: Readers) -> None:
    assert readers.number() == 1
    until(lambda: readers.number() == 3)
    for _ in range(20):
        assert readers.number() == 3, "not beyond the bound"
    ended = [*readers.pool._running.values()][1:]
    readers.are(IDLE)
    until(lambda: readers.number() == 1)
    for _ in range(20):
        assert readers.number() == 1, "not below the bound"
    for child in ended:
        assert child.wait(60) == -signal.SIGTERM, "it was told to stop, and has ended"


def test_a_pool_stays_within_its_bounds_however_long_all_are_busy() -> None:
    growth_ = Growth(least=1, most=2)
    assert max(growth_.next([0.0, 0.0]) for _ in range(20)) == 2


def test_who_has_not_reported_is_not_busy() -> None:
    silent = Pool([[sys.executable, "-c", "import time; time.sleep(60)"]] * 3, 1)
    stopping = threading.Event()
    try:
        for _ in range(20):
            silent.tend(stopping)
        assert len(silent._running) == 1
    finally:
        stopping.set()
        silent.end()


def test_one_that_dies_is_replaced_and_the_end_ends_all(readers: Readers) -> None:
    until(lambda: readers.number() == 3)
    first = readers.pool._running[0]
    first.kill()
    first.wait()
    assert readers.number() == 3
    assert readers.pool._running[0] is not first
    readers.stopping.set()
    assert readers.pool.end() == [-signal.SIGTERM] * 3


def test_growth_waits_for_readers_that_are_busy_in_a_row() -> None:
    one = Growth(least=1, most=9)
    for _ in range(10):
        assert {one.next([0.0]), one.next([0.0]), one.next([1.0])} == {1}


@pytest.mark.parametrize(
    ("text", "expected"), [("4", Processes(4, 4)), ("1..8", Processes(1, 8)), (Processes(), (1, 1))]
)
def test_a_number_or_a_range_of_processes(text: object, expected: Processes) -> None:
    assert processes_of(text) == expected


@pytest.mark.parametrize("text", ["0", "8..1", "0..3", "1..", "x", "-1", "1.5"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="neither a number from 1 nor a range"):
        processes_of(text)


def test_a_worker_is_idle_while_it_finds_nothing_and_busy_while_it_handles(inbox: Dsn) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    made = saf.Worker(inbox, SUBSCRIPTION)

    @made.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[object]) -> None:
        del message, connection
        begun.set()
        assert goes_on.wait(60)

    with running(made):
        until(lambda: made.idle.seconds() > 0.3)
        put(inbox, "1")
        assert begun.wait(60)
        before = made.idle.seconds()
        threading.Event().wait(0.2)
        assert made.idle.seconds() == before
        goes_on.set()
        until(lambda: made.idle.seconds() > before)


def test_a_paused_or_limited_worker_is_idle(inbox: Dsn) -> None:
    made = saf.Worker(inbox, SUBSCRIPTION)
    made.handler()(lambda _, __: None)
    put(inbox, "1", "2", "3")
    with connect(inbox) as connection:
        services.limit(connection, SUBSCRIPTION, rate="1/h")
    with running(made):
        until(lambda: made.summary.handled == 1)
        before = made.idle.seconds()
        until(lambda: made.idle.seconds() > before + 1)


WORKER = """
import os, time
import saf
from saf.database import Dsn

worker = saf.Worker(Dsn(os.environ["INBOX"]), "billing", max_messages=1)

@worker.handler()
def handle(message, connection):
    time.sleep(0.02)
    connection.execute("INSERT INTO effect (key, body) VALUES (%s, %s)", [str(os.getpid()), ""])
"""


def test_a_backlog_starts_readers_and_sigterm_ends_all(inbox: Dsn, tmp_path: Path) -> None:
    (tmp_path / "consumers.py").write_text(WORKER)
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, body) "
            "SELECT 'billing', '' FROM generate_series(1, 50000)"
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "saf", "worker", "consumers:worker", "--processes", "1..2"],
            cwd=tmp_path,
            env={**os.environ, "INBOX": inbox.conninfo, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            pids = "SELECT count(DISTINCT key) FROM effect"
            until(lambda: fetch(connection, pids) == [(2,)], 120)
        finally:
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said.decode()
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name ~ 'saf receive'"
        until(lambda: fetch(connection, f"{sessions} AND datname = current_database()") == [(0,)])
    assert effects(inbox)
