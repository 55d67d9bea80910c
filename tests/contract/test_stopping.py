"""A worker that is told to stop: it ends after the message in hand, and nothing is done twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import saf
from saf.database import Dsn, fetch
from saf.errors import StopTimeout, UsageError
from saf.failpoints import arm
from saf.receiving.inbox import inbox_status
from saf.receiving.link import connected
from saf.receiving.loop import Loop
from saf.receiving.receive import one_delivery
from saf.receiving.stopping import Stopping
from tests import dialogs
from tests.pipeline import connect
from tests.programs import ROOT, environment
from tests.receivers import (
    SUBSCRIPTION,
    effect,
    effects,
    keys_of_one_shard,
    prepare,
    put,
    store,
)
from tests.waits import until

MODULE = """
import os, time
import psycopg
import saf

worker = saf.Worker(os.environ["INBOX"], "billing", max_messages=60)

@worker.handler()
def handle(message, connection):
    # seen by others at once: that this one was begun
    with psycopg.connect(os.environ["INBOX"], autocommit=True) as other:
        other.execute("INSERT INTO begun VALUES (%s)", [message.text()])
    connection.execute("INSERT INTO effect (key, body) VALUES (%s, %s)",
                       [message.key, message.text()])
    time.sleep(float(os.environ["SECONDS"]))

class Slow(saf.Processor):
    @saf.handles()
    def any(self, message, connection):
        handle(message, connection)

processors = saf.Processors(os.environ["INBOX"], "billing", Slow, max_messages=60)
"""


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare(mom)
    with connect(mom) as connection:
        connection.execute("CREATE TABLE begun (body text)")
    return mom


def start(
    folder: Path, inbox: Dsn, *arguments: str, seconds: float = 1, which: str = "worker"
) -> subprocess.Popen[str]:
    (folder / "consumers.py").write_text(MODULE)
    return subprocess.Popen(
        [sys.executable, "-m", "saf", "worker", f"consumers:{which}", *arguments],
        cwd=folder,
        env=environment(INBOX=inbox.conninfo, SECONDS=str(seconds), PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def begun(inbox: Dsn) -> int:
    with connect(inbox) as connection:
        ((count,),) = fetch(connection, "SELECT count(*) FROM begun")
    return int(count)


def set_aside(inbox: Dsn) -> tuple[int, int]:
    """How many messages are unread, and how many parked."""
    with connect(inbox) as connection:
        (status,) = inbox_status(connection)
    return status.unread, status.parked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "arguments", "told"),
    [
        ("worker", (), signal.SIGTERM),
        pytest.param("worker", (), signal.SIGINT, marks=pytest.mark.full),
        pytest.param("worker", ("--drain",), signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("worker", ("--processes", "2"), signal.SIGTERM, marks=pytest.mark.full),
        ("processors", (), signal.SIGTERM),
    ],
)
def test_a_worker_with_sixty_messages_in_hand_stops_after_the_one_it_is_at(
    inbox: Dsn, tmp_path: Path, which: str, arguments: Sequence[str], told: int
) -> None:
    put(inbox, *map(str, range(60)), key="k")
    process = start(tmp_path, inbox, *arguments, which=which)
    try:
        until(lambda: begun(inbox) >= 2)
        process.send_signal(told)
        began = time.monotonic()
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert time.monotonic() - began < 5, "fifty-eight messages of a second each were in hand"
    assert process.returncode == 0, err
    done = begun(inbox)
    assert effects(inbox) == [str(number) for number in range(done)]
    assert f"handled {done} messages" in out
    assert set_aside(inbox) == (60 - done, 0), "put back as if they had not been read"
    rest = quick_worker(inbox)
    rest.drain()
    assert effects(inbox) == [str(number) for number in range(60)]
    assert rest.attempts == {1}, "to be put back is no attempt"


class Quick(saf.Worker):
    def __init__(self, inbox: Dsn, **options: Any) -> None:
        super().__init__(inbox, SUBSCRIPTION, **options)
        self.attempts: set[int] = set()
        self.handler()(self.handle)

    def handle(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        self.attempts.add(message.attempt)
        effect(connection, message)


def quick_worker(inbox: Dsn, **options: Any) -> Quick:
    return Quick(inbox, **options)


def test_what_was_put_back_of_many_keys_and_shards_comes_once_and_in_order(inbox: Dsn) -> None:
    store(inbox, 20, 10)
    handled: list[str] = []
    for stop_after in (1, 7, 50, 3, 200):
        worker = saf.Worker(inbox, SUBSCRIPTION, max_messages=77)

        @worker.handler()
        def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
            effect(connection, message)
            handled.append(f"{message.key} {message.text()}")
            if len(handled) % stop_after == 0:  # noqa: B023 - it is called in this turn only
                worker.stop()  # noqa: B023

        worker.drain()
    assert len(handled) == len(set(handled)) == 200
    for key in range(1, 21):
        mine = [one.split()[1] for one in handled if one.startswith(f"k{key} ")]
        assert mine == [str(number) for number in range(1, 11)]
    assert set_aside(inbox) == (0, 0)


def test_a_batch_in_hand_is_finished_and_the_next_one_put_back(inbox: Dsn) -> None:
    keys = iter(keys_of_one_shard(10))
    for number in range(5):
        put(inbox, f"a{number}", key=next(keys), message_type="A")
        put(inbox, f"b{number}", key=next(keys), message_type="B")
    first = saf.Worker(inbox, SUBSCRIPTION)
    done: list[str] = []

    @first.batch_handler("A")
    def all_a(messages: Sequence[saf.Received], _: object) -> None:
        done.extend(message.text() for message in messages)
        first.stop()

    @first.batch_handler("B")
    def all_b(messages: Sequence[saf.Received], _: object) -> None:
        done.extend(message.text() for message in messages)
        first.stop()

    first.drain()
    assert sorted(done) == [f"{done[0][0]}{number}" for number in range(5)]
    second = saf.Worker(inbox, SUBSCRIPTION)

    @second.batch_handler()
    def others(messages: Sequence[saf.Received], _: object) -> None:
        done.extend(message.text() for message in messages)
        assert {message.attempt for message in messages} == {1}

    second.drain()
    assert sorted(done) == sorted(f"{kind}{number}" for kind in "ab" for number in range(5))


def test_a_message_that_failed_before_the_stop_is_parked_though_earlier_ones_are_put_back(
    inbox: Dsn,
) -> None:
    """As one of a batch handler: it is complete, so its shard cannot go back behind it."""
    for number, key in enumerate(keys_of_one_shard(3), start=1):
        put(inbox, str(number), key=key)
    stopping = threading.Event()
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        delivery.until(stopping)
        delivery.park(delivery[2], "no")
        stopping.set()
        assert list(delivery) == []
    with connect(inbox) as connection:
        parked = fetch(connection, "SELECT convert_from(body, 'UTF8') FROM saf.parked ORDER BY id")
    assert [body for (body,) in parked] == ["1", "2", "3"]
    assert set_aside(inbox) == (0, 3)


def test_the_messages_of_a_lane_that_was_begun_stay_in_it_and_are_due(inbox: Dsn) -> None:
    put(inbox, "1", "2", "3", key="k")
    failing = saf.Worker(inbox, SUBSCRIPTION, policy=saf.Policy(first_wait_seconds=0))
    handled: list[tuple[str, int]] = []

    @failing.handler()
    def handle(message: saf.Received, _: psycopg.Connection[Any]) -> None:
        if not handled and message.attempt == 1:
            raise ValueError
        handled.append((message.text(), message.attempt))
        failing.stop()

    failing.drain()
    assert handled == [("1", 2)]
    quick = quick_worker(inbox)
    quick.drain()
    assert effects(inbox) == ["2", "3"]
    assert quick.attempts == {1}


def test_what_was_read_from_a_lane_and_not_handed_out_stays_in_it(inbox: Dsn) -> None:
    put(inbox, "1", "2", "3", key="k", message_type="OrderPlaced")
    without = saf.Worker(inbox, SUBSCRIPTION)
    without.handler("OrderPaid")(lambda _message, _connection: None)
    without.drain()
    assert set_aside(inbox) == (0, 3)
    stopped = saf.Worker(inbox, SUBSCRIPTION)

    @stopped.handler("OrderPlaced")
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)
        stopped.stop()

    stopped.drain()
    assert (effects(inbox), set_aside(inbox)) == (["1"], (0, 2))
    quick_worker(inbox).drain()
    assert effects(inbox) == ["1", "2", "3"]


def test_the_message_of_a_counted_attempt_is_given_though_the_worker_was_told_to_stop(
    inbox: Dsn,
) -> None:
    put(inbox, "1", key="k")
    worker = saf.Worker(inbox, SUBSCRIPTION, policy=saf.Policy(first_wait_seconds=0))
    attempts: list[int] = []

    @worker.handler()
    def handle(message: saf.Received, _: psycopg.Connection[Any]) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise ValueError

    arm("attempt_counted", worker.stop)
    worker.drain()
    assert attempts == [1, 2]


def test_a_dialog_of_which_messages_were_put_back_goes_on_without_a_gap(app: Dsn, mom: Dsn) -> None:
    dialogs.prepare(app, mom)
    dialog = dialogs.begin(app, *map(str, range(4)))
    with app.connect(role="test") as connection:
        dialog.send(connection, b"x" * 100, fragment_bytes=30)
        dialog.send(connection, "5")
    dialogs.forward(app, mom)
    heard: list[str] = []
    attempts = set()
    for _ in range(8):
        worker = saf.Worker(mom, dialogs.WAREHOUSE)

        @worker.handler()
        def handle(message: saf.Received, _: object) -> None:
            heard.append(message.text()[:5])
            attempts.add(message.attempt)
            worker.stop()  # noqa: B023 - it is called in this turn only

        worker.drain()
    assert heard == ["0", "1", "2", "3", "xxxxx", "5"]
    assert attempts == {1}
    assert dialogs.states(mom) == ["conversing"]


@pytest.mark.slow
def test_a_handler_that_takes_longer_than_the_stop_timeout_is_rolled_back_and_named(
    inbox: Dsn, tmp_path: Path
) -> None:
    put(inbox, "1", "2", key="k")
    process = start(tmp_path, inbox, "--stop-timeout", "0.5", seconds=600)
    try:
        until(lambda: begun(inbox) >= 1)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert time.monotonic() - began < 10
    assert process.returncode == 75
    assert "longer than stop_timeout (0.5 s)" in err
    assert "key='k'" in err
    assert "comes again" in err
    assert effects(inbox) == []
    until(lambda: quick_worker(inbox).drain() or len(effects(inbox)) == 2)
    assert effects(inbox) == ["1", "2"]


def test_a_worker_in_a_thread_that_is_not_done_in_time_can_commit_nothing_more(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    worker = saf.Worker(inbox, SUBSCRIPTION, stop_timeout=0.1)
    at_it, go_on = threading.Event(), threading.Event()

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)
        at_it.set()
        go_on.wait(60)

    errors: list[Exception] = []

    def run(loop: Loop) -> None:
        try:
            loop.run()
        except StopTimeout as error:
            errors.append(error)

    thread = threading.Thread(target=run, args=[worker])
    thread.start()
    assert at_it.wait(60)
    worker.stop()
    thread.join(60)
    go_on.set()
    assert "stop_timeout (0.1 s)" in str(errors[0])
    until(lambda: not _in_hand(inbox))
    assert effects(inbox) == []


def test_processors_that_are_not_done_in_time_leave_their_shards_to_others(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    at_it, go_on = threading.Event(), threading.Event()

    class Slow(saf.Processor):
        @saf.handles()
        def any(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
            effect(connection, message)
            at_it.set()
            go_on.wait(60)

    class Fast(saf.Processor):
        @saf.handles()
        def any(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
            effect(connection, message)

    slow = saf.Processors(inbox, SUBSCRIPTION, Slow, stop_timeout=0.1)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            slow.run()
        except StopTimeout as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert at_it.wait(60)
    slow.stop()
    thread.join(60)
    assert len(errors) == 1
    fast = saf.Processors(inbox, SUBSCRIPTION, Fast)
    until(lambda: fast.drain() or effects(inbox) == ["1"])
    go_on.set()
    assert effects(inbox) == ["1"]


def _in_hand(inbox: Dsn) -> bool:
    """Whether any receiver has a transaction open."""
    with connect(inbox) as connection:
        return bool(
            fetch(
                connection,
                "SELECT FROM pg_stat_activity WHERE datname = current_database() "
                "AND starts_with(application_name, 'saf receive')",
            )
        )


@pytest.mark.parametrize("column", ["deliver_at", "expires_at"])
def test_a_stop_is_heard_while_all_that_is_there_is_set_aside(inbox: Dsn, column: str) -> None:
    at = datetime.now(UTC) + timedelta(days=1 if column == "deliver_at" else -1)
    put(inbox, *(str(n) for n in range(60)), key="k", **{column: at})
    stopping = threading.Event()
    stopping.set()
    with one_delivery(
        connected(inbox), SUBSCRIPTION, max_messages=10, wait_seconds=0, policy=None, trust=None,
        signer=None, stopping=stopping,
    ) as delivery:  # fmt: skip
        assert not delivery
    with connect(inbox) as connection:
        (status,) = inbox_status(connection)
    assert status.unread == 50


def test_a_stop_timeout_below_zero_is_refused(inbox: Dsn) -> None:
    assert saf.Worker(inbox, SUBSCRIPTION, stop_timeout=0).stop_timeout == 0
    with pytest.raises(UsageError, match="stop_timeout: -1 s is less than 0"):
        saf.Worker(inbox, SUBSCRIPTION, stop_timeout=-1)


def test_who_waits_for_threads_to_end_takes_no_processor() -> None:
    class Counted(threading.Thread):
        times = 0

        def is_alive(self) -> bool:
            self.times += 1
            return super().is_alive()

    thread = Counted(target=time.sleep, args=[0.3])
    Stopping(seconds=60).run([thread])
    assert thread.times < 10


TWICE = """
import os, signal
from saf.signals import stop_on_signals

with stop_on_signals(lambda: print("told")):
    os.kill(os.getpid(), signal.{first})
    os.kill(os.getpid(), signal.{second})
    print("goes on")
"""


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
def test_a_second_signal_ends_the_process_at_once_whichever_it_is(first: str, second: str) -> None:
    code = TWICE.format(first=first, second=second)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "told\n"
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize(("told", "hurried"), [(None, 0.0), (600.0, 0.0), (0.0, 600.0)])
def test_who_is_hurried_ends_at_the_earlier_of_two_deadlines(
    told: float | None, hurried: float
) -> None:
    stopping = Stopping(told or 0.0)
    if told is not None:
        stopping.tell()
    stopping.hurry(hurried)
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, args=[20.0])
    try:
        with pytest.raises(StopTimeout):
            stopping.run([thread])
    finally:
        ends.set()
        thread.join()
