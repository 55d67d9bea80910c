"""The forwarder's driver: what it closes, goes on with, gives way to, and reports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from saf.config import Settings, load
from saf.database import Dsn, fetch
from saf.spark.broker import LITTLE
from saf.spark.summary import Summary
from tests.contract.test_connections import _nothing_stays
from tests.driver import InProcess, forwarder
from tests.pipeline import bodies, connect, send
from tests.programs import configuration
from tests.programs import send as send_many

__all__ = ["_nothing_stays"]

GIANT = 2000

NewBroker = Callable[[str], Dsn]

OPEN = "SELECT count(*) FROM saf.cursor WHERE open IS NOT NULL"


@pytest.fixture
def settings(app: Dsn, mom: Dsn, tmp_path: Path) -> Callable[..., Settings]:
    def made(brokers: dict[str, Dsn] | None = None, **options: object) -> Settings:
        file = configuration(
            tmp_path / "saf.toml", brokers or {"app": app}, {"mom": mom}, **options
        )
        return load(file)

    return made


def test_a_drain_goes_on_while_a_task_has_left_some_of_its_work(
    app: Dsn, mom: Dsn, settings: Callable[..., Settings]
) -> None:
    """One of two tasks ends before its last chunk; the cycle has forwarded little."""
    send_many(app, LITTLE + 1000)
    context = InProcess(defaultParallelism=2)
    drained = forwarder(settings(chunk_bytes=64 * 1024), context)

    def stop_the_second_task(job: int, task: int) -> None:
        broker = drained.roster.brokers["app"]
        if (job, task) == (0, 1):
            broker.stop()
        elif job == 1:
            broker.go_on()

    context.before_task = stop_the_second_task
    drained.drain()
    assert context.jobs[0] == 2
    assert len(bodies(mom)) == LITTLE + 1000
    with connect(app) as connection:
        assert fetch(connection, OPEN) == [(0,)]


def test_each_item_of_work_is_a_task_of_its_own(
    app: Dsn, new_broker: NewBroker, settings: Callable[..., Settings]
) -> None:
    """What fails in one, or takes long, is another one's in no slice."""
    brokers = {"app": app, "two": new_broker("two"), "three": new_broker("three")}
    for dsn in brokers.values():
        send_many(dsn, 3)
    context = InProcess(defaultParallelism=3)
    assert forwarder(settings(brokers), context).drain().forwarded == 9
    assert context.jobs == [3]


def test_a_giant_that_has_given_way_goes_on_whole_in_the_next_cycle(
    app: Dsn,
    new_broker: NewBroker,
    settings: Callable[..., Settings],
    mom: Dsn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("saf.spark.broker.LITTLE", 100)
    small = new_broker("small")
    send_many(app, GIANT, "giant")
    looping = forwarder(
        settings(
            {"app": app, "small": small},
            chunk_rows=20,
            turn_seconds=0.01,
            interval_seconds=0.05,
        ),
        InProcess(),
    )
    summaries: list[Summary] = []
    thread = threading.Thread(target=looping.loop, args=[summaries.append])
    thread.start()
    try:
        while not bodies(mom):
            pass
        with connect(small) as connection:
            send(connection, "small")
        while len(bodies(mom)) <= GIANT:
            assert thread.is_alive()
    finally:
        looping.stop()
        thread.join()
    arrived = bodies(mom)
    assert arrived.index("small") < len(arrived) - 1, "the giant gave way"
    assert sum(one.cycles for one in summaries) < 20
