"""Dispatch: dispatchers side by side in one process, of which some fail, change or go."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs

from saf.database import Dsn
from saf.database.background import Background
from saf.receiving.dispatch import dispatcher as running
from saf.receiving.dispatch.dispatcher import Dispatcher
from saf.receiving.dispatch.http import Client
from saf.receiving.dispatch.settings import Endpoint
from tests.endpoints import Partner, dispatcher, dispatching, inbox, partner
from tests.pipeline import connect
from tests.receivers import put
from tests.waits import until, waiters

__all__ = ["inbox", "partner"]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "FIND_SECONDS", 0.1)
    monkeypatch.setattr(running, "AGAIN_SECONDS", 0.2)


def stop() -> None:
    """Unless it has ended by itself."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)


class Finding:
    """Finds what there is by now, and counts how often it was asked."""

    def __init__(self, *there: Dispatcher) -> None:
        self.there = there
        self.asked = 0

    def __call__(self) -> tuple[Dispatcher, ...]:
        self.asked += 1
        return self.there

    def again(self, times: int) -> None:
        """Wait until what was found so many times from now on has been taken up."""
        before = self.asked
        until(lambda: self.asked > before + times)


@pytest.mark.parametrize("then", ["gone", "another one"])
def test_what_fails_after_it_was_told_to_end_is_nobody_elses_failure(
    inbox: Dsn, partner: Partner, then: str
) -> None:
    late = Dispatcher("late", Endpoint(url=partner.url, subscription="none"), inbox)
    new = Dispatcher("late", dispatcher(inbox, partner).endpoint, inbox)
    find = Finding()

    def work() -> None:
        with connect(inbox) as holder, holder.transaction():
            holder.execute("LOCK TABLE saf.subscription IN ACCESS EXCLUSIVE MODE")
            find.there = (late,)
            until(lambda: waiters(holder) == 1)
            find.there = (new,) if then == "another one" else ()
            find.again(1)
        until(lambda: any(line["event"] == "endpoint_not_dispatched" for line in lines))
        time.sleep(2 * running.AGAIN_SECONDS)
        find.again(2)

    with capture_logs() as lines, ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        working.add_done_callback(lambda _: stop())
        running.run([], find=find)
        working.result()
    begun = [line for line in lines if line["event"] == "endpoint_begins"]
    assert len(begun) == (2 if then == "another one" else 1)


def test_a_stop_waits_for_no_broker_that_is_asked_for_endpoints(
    inbox: Dsn, partner: Partner
) -> None:
    asked, over, answered = threading.Event(), threading.Event(), threading.Event()

    def find() -> list[Dispatcher]:
        asked.set()
        over.wait(30)
        answered.set()
        return []

    put(inbox, "1", key="a")
    one = dispatcher(inbox, partner)

    def work() -> None:
        assert asked.wait(20)
        until(lambda: partner.accepted)
        stop()

    try:
        with ThreadPoolExecutor(1) as threads:
            working = threads.submit(work)
            running.run([one], find=find)
            working.result()
        assert not answered.is_set()
        assert one.summary.handled == 1
    finally:
        over.set()


def test_an_endpoint_that_is_found_after_a_stop_does_not_begin(
    inbox: Dsn, partner: Partner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, stopped = threading.Event(), threading.Event()
    dismiss = Background.dismiss

    def dismissed(finding: Background) -> None:
        stopped.set()
        dismiss(finding)

    def find() -> list[Dispatcher]:
        asked.set()
        assert stopped.wait(30)
        return [one, Dispatcher("new", one.endpoint, inbox)]

    def work() -> None:
        assert asked.wait(20)
        until(lambda: partner.in_flight == 1)
        stop()

    monkeypatch.setattr(Background, "dismiss", dismissed)
    partner.after(60)
    put(inbox, "1", key="a")
    one = dispatcher(inbox, partner, timeout_seconds=60)
    one.stop_seconds = 1.0
    with capture_logs() as lines, ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        running.run([one], find=find)
        working.result()
    assert "endpoint_begins" not in {line["event"] for line in lines}


def test_a_stop_waits_for_a_slow_answer_no_longer_than_it_says(
    inbox: Dsn, partner: Partner
) -> None:
    partner.after(60)
    put(inbox, "1", key="a")
    one = dispatcher(inbox, partner, timeout_seconds=60)
    one.stop_seconds = 0.5
    with dispatching(one):
        until(lambda: partner.in_flight == 1)
        told = time.monotonic()
    assert 0.5 <= time.monotonic() - told < 20


def test_what_saf_is_to_blame_for_at_one_endpoint_stops_no_other_one(
    inbox: Dsn, partner: Partner
) -> None:
    class Broken(Dispatcher):
        async def _session(self, _: asyncio.Event, *, drain: bool) -> None:
            raise TypeError(f"a bug, drain={drain}")

    partner.after(0.5)
    put(inbox, "1", "2", key="a")
    broken = Broken("broken", Endpoint(url=partner.url), inbox)
    with capture_logs() as lines, pytest.raises(TypeError, match="a bug"):
        running.run([broken, dispatcher(inbox, partner)], drain=True)
    assert partner.by_key() == {"a": [1, 2]}
    (line,) = [line for line in lines if line["event"] == "endpoint_not_dispatched"]
    assert "in _session" in line["stack"]


def test_what_saf_is_to_blame_for_in_a_request_ends_the_session(
    inbox: Dsn, partner: Partner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def post(*_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(Client, "post", post)
    put(inbox, "1", key="a")
    running_once = dispatcher(inbox, partner).run(asyncio.Event(), drain=True)
    with pytest.raises(TypeError, match="a bug"):
        asyncio.run(asyncio.wait_for(running_once, 20))


def test_what_has_ended_is_forgotten() -> None:
    one = Dispatcher("x", Endpoint(url="http://127.0.0.1:1"), Dsn("host=/nowhere dbname=none"))

    async def work() -> None:
        several = running._Running([], drain=False, find=None)
        for _ in range(100):
            several._begin(one)
            several._end("x")
        async with asyncio.timeout(10):
            while several._ending:
                await asyncio.sleep(0)

    asyncio.run(work())


def test_a_loop_counts_all_dispatchers_of_an_endpoint(inbox: Dsn, partner: Partner) -> None:
    first = dispatcher(inbox, partner)
    endpoint = dispatcher(inbox, partner, mode="plain").endpoint
    then = Dispatcher("partner", endpoint, inbox, summary=first.summary)
    find = Finding(first)

    def sent(number: int) -> Callable[[], bool]:
        return lambda: first.summary.handled == number

    def work() -> None:
        put(inbox, "1", key="a")
        until(sent(1))
        find.there = (then,)
        put(inbox, "2", "3", key="a")
        until(sent(3))

    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        working.add_done_callback(lambda _: stop())
        running.run([first], find=find)
        working.result()
    assert then.summary.handled == 3
    until(lambda: "saf dispatch find" not in {thread.name for thread in threading.enumerate()})


def test_an_endpoint_that_has_failed_is_left_alone_for_a_while(
    inbox: Dsn, partner: Partner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "AGAIN_SECONDS", 60.0)
    find = Finding(Dispatcher("new", Endpoint(url=partner.url, subscription="none"), inbox))

    def failures() -> int:
        return sum(line["event"] == "endpoint_not_dispatched" for line in lines)

    def work() -> None:
        until(lambda: failures() > 0)
        find.again(5)

    with capture_logs() as lines, ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        working.add_done_callback(lambda _: stop())
        running.run([], find=find)
        working.result()
    assert failures() == 1
