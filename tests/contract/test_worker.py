"""Workers: what fails waits or dies alone, and everything else goes on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

import saf
from saf.broker import services
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, SchemaMissing, Unexpected, UsageError
from saf.operating import decide
from saf.receiving import retries
from saf.receiving.hand import Reader
from saf.receiving.receive import Receiver
from saf.setaside.selection import DeadLetters
from saf.setaside.waiting import Lanes, retry_now, undecided
from tests.pipeline import connect
from tests.programs import ROOT, environment, run
from tests.receivers import (
    SUBSCRIPTION,
    by_key,
    dead,
    effect,
    effects,
    let_keys_be_due,
    put,
    running,
    store,
    waiting,
    writes_nothing,
)
from tests.waits import until

AT_ONCE_SECONDS = 5.0


class Picky:
    """A worker that fails on what it is told to."""

    def __init__(self, inbox: Dsn, *bad: str, **options: Any) -> None:
        self.bad = set(bad)
        self.worker = saf.Worker(inbox, SUBSCRIPTION, **options)
        self.worker.handler()(self.handle)

    def handle(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)
        if message.text() in self.bad:
            raise ValueError(f"{message.text()} will not do")


def test_a_count_is_taken_back_only_if_nobody_has_counted_another_attempt_since(
    inbox: Dsn,
) -> None:
    put(inbox, "1", key="k")
    Picky(inbox, "1").worker.drain()
    with connect(inbox) as connection:
        found = services.subscription(connection, SUBSCRIPTION)
        reader = Reader(
            subscription_id=found.subscription_id, name=found.name, service=found.service
        )
        counts = []
        retries.count(connection, reader, "k", 2, saf.Policy())
        for number in (1, 3, 2):
            retries.uncount(connection, reader, "k", number)
            counts.append((retries.attempts(connection, reader, "k") or ())[:1])
    assert counts == [(2,), (2,), (1,)]


def test_a_message_that_fails_waits_with_its_key_and_others_go_on(inbox: Dsn) -> None:
    put(inbox, "1", "2", "3", key="k")
    put(inbox, "a", "b", key="other")
    picky = Picky(inbox, "2")
    picky.worker.drain()
    put(inbox, "4", key="k")
    put(inbox, "c", key="other")
    picky.worker.drain()
    assert effects(inbox) == ["1", "a", "b", "c"]
    assert waiting(inbox) == ["k"]
    with connect(inbox) as connection:
        ((error, seconds),) = fetch(
            connection,
            "SELECT error, extract(epoch FROM next_attempt_at - now())::float FROM saf.backoff",
        )
    assert error == "ValueError: 2 will not do"
    assert 2 < seconds <= 4
    picky.bad.clear()
    let_keys_be_due(inbox)
    picky.worker.drain()
    assert effects(inbox)[4:] == ["2", "3", "4"]
    assert waiting(inbox) == []


def test_after_its_attempts_a_message_is_dead_and_its_key_goes_on(inbox: Dsn) -> None:
    put(inbox, "1", "2", "3", key="k")
    picky = Picky(inbox, "2", policy=saf.Policy(max_attempts=3))
    for _ in range(3):
        assert dead(inbox) == []
        picky.worker.drain()
        let_keys_be_due(inbox)
    assert dead(inbox) == [("2", "failed")]
    picky.worker.drain()
    assert effects(inbox) == ["1", "3"]


def test_a_key_stays_blocked_by_its_dead_letter_if_so_configured_until_it_is_decided(
    inbox: Dsn,
) -> None:
    put(inbox, "1", "2", "3", key="k")
    put(inbox, "x", "y", key="other")
    picky = Picky(inbox, "2", "x", policy=saf.Policy(max_attempts=1, block=True))
    picky.worker.drain()
    let_keys_be_due(inbox)
    put(inbox, "4", key="k")
    picky.worker.drain()
    with connect(inbox) as connection:
        # nor does whoever is impatient: what came later than a dead letter would go before it
        assert (retry_now(connection), undecided(connection)) == (0, 2)
        assert undecided(connection, Lanes(subject="k")) == 1
    picky.worker.drain()
    assert effects(inbox) == ["1"]
    assert dead(inbox) == [("2", "failed"), ("x", "failed")]
    picky.bad.clear()
    with connect(inbox) as connection:
        decide.retry(connection, DeadLetters(key="k"), "mended")
        decide.discard(connection, DeadLetters(key="other"), "not wanted")
    picky.worker.drain()
    assert effects(inbox) == ["1", "2", "3", "4", "y"] or effects(inbox) == [
        "1", "y", "2", "3", "4",
    ]  # fmt: skip
    assert waiting(inbox) == []


@pytest.mark.parametrize("end", [SystemExit(0), asyncio.CancelledError(), KeyboardInterrupt()])
def test_a_handler_that_would_end_its_thread_is_undone_and_the_message_comes_again(
    inbox: Dsn, end: BaseException
) -> None:
    put(inbox, "1", key="k")
    tried = []
    worker = saf.Worker(inbox, SUBSCRIPTION)

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)
        tried.append(message.text())
        if len(tried) == 1:
            raise end

    with capture_logs() as lines, running(worker):
        until(lambda: effects(inbox) == ["1"], 20)
    assert tried == ["1", "1"]
    (failed,) = [line for line in lines if line["event"] == "delivery_failed"]
    assert type(end).__name__ in failed["stack"]
    put(inbox, "2", key="k")
    tried.clear()
    with pytest.raises(Unexpected, match=type(end).__name__):
        worker.run(drain=True)
    assert effects(inbox) == ["1"]


def test_what_parks_behind_a_key_that_waits_counts_though_no_handler_sees_it(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    Picky(inbox, "1").worker.drain()
    put(inbox, "2", "3", key="k")
    worker = Picky(inbox).worker
    assert worker.drain() == 0
    assert (worker.summary.parked, worker.summary.exit_code) == (2, 75)


@pytest.mark.parametrize("permanent", [[ValueError], ValueError, ("ValueError",)])
def test_what_is_permanent_is_a_tuple_of_exceptions(permanent: Any) -> None:
    with pytest.raises(ValueError, match="permanent: expected a tuple of exceptions, got"):
        saf.Policy(permanent=permanent)


@pytest.mark.parametrize("name", ["max_attempts", "first_wait_seconds", "longest_wait_seconds"])
def test_a_policy_with_a_number_out_of_range_is_refused(name: str) -> None:
    least: Any = {"max_attempts": 1}.get(name, 0)
    assert getattr(saf.Policy(**{name: least}), name) == least
    with pytest.raises(ValueError, match="max_attempts is at least 1, and no wait is negative"):
        saf.Policy(**{name: least - 1})


def test_a_handler_that_has_no_name_is_refused_as_any_other(inbox: Dsn) -> None:
    worker = saf.Worker(inbox, SUBSCRIPTION)
    with pytest.raises(UsageError, match=r"the handler functools\.partial.* takes \(\*, key"):
        worker.handler("A")(partial(sorted, []))
    worker.handler("A")(partial(lambda *_: None))
    with pytest.raises(UsageError, match=r"'A' has a handler already: functools\.partial"):
        worker.handler("A")(effect)


def test_a_permanent_exception_is_not_tried_again(inbox: Dsn) -> None:
    put(inbox, "1", "2", key="k")
    Picky(inbox, "1", policy=saf.Policy(permanent=(ValueError,))).worker.drain()
    assert dead(inbox) == [("1", "failed")]
    assert effects(inbox) == ["2"]


def test_what_has_no_handler_or_a_body_that_is_not_json_is_kept_with_its_reason(
    inbox: Dsn,
) -> None:
    put(inbox, "1", message_type="Unheard")
    put(inbox, "{", message_type="Placed", headers='{"content-type": "application/json"}')
    worker = saf.Worker(
        inbox,
        SUBSCRIPTION,
        policy=saf.Policy(permanent=(saf.UnreadableBody,)),
        unhandled="dead",
    )

    @worker.handler("Placed")
    def placed(message: saf.Received, _: object) -> None:
        message.json()

    worker.drain()
    with connect(inbox) as connection:
        errors = [error for (error,) in fetch(connection, "SELECT error FROM saf.dead_letter")]
    assert sorted(dead(inbox)) == [("1", "failed"), ("{", "failed")]
    assert any("no handler for message type 'Unheard', only for 'Placed'" in e for e in errors)
    assert any("its content type is application/json" in e for e in errors)


def test_a_batch_that_fails_is_handed_over_one_by_one_and_keys_stay_in_order(inbox: Dsn) -> None:
    put(inbox, "1", "2", key="k", message_type="many")
    put(inbox, "3", key="k", message_type="single")
    put(inbox, "4", "bad", "5", key="k", message_type="many")
    put(inbox, "6", "7", key="other", message_type="many")
    batches: list[list[str]] = []
    worker = saf.Worker(inbox, SUBSCRIPTION)

    @worker.batch_handler("many")
    def many(messages: Sequence[saf.Received], connection: psycopg.Connection[Any]) -> None:
        batches.append([message.text() for message in messages])
        for message in messages:
            effect(connection, message)
            if message.text() == "bad":
                raise ValueError

    @worker.handler("single")
    def single(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)

    worker.drain()
    assert batches[0] == ["1", "2"]
    assert sorted(effects(inbox)) == ["1", "2", "3", "4", "6", "7"]
    assert [body for body in effects(inbox) if body < "5"] == ["1", "2", "3", "4"]
    assert waiting(inbox) == ["k"]


def test_an_error_of_the_database_that_a_handler_swallows_fails_its_message_only(
    inbox: Dsn,
) -> None:
    put(inbox, "1", key="a")
    put(inbox, "2", key="b")
    worker = saf.Worker(inbox, SUBSCRIPTION)

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)
        if message.text() == "1":
            try:
                connection.execute("SELECT 1/0")
            except psycopg.Error:
                return

    worker.drain()
    assert effects(inbox) == ["2"]
    assert waiting(inbox) == ["a"]


def test_threads_share_the_work_and_stop_in_order(inbox: Dsn) -> None:
    store(inbox, 30, 20)
    picky = Picky(inbox, threads=4, max_messages=10)
    with running(picky.worker):
        while len(effects(inbox)) < 600:
            time.sleep(0.02)
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert by_key(inbox) == {f"k{key}": list(range(1, 21)) for key in range(1, 31)}


@pytest.mark.slow
def test_a_worker_goes_on_when_its_connections_are_cut(inbox: Dsn) -> None:
    picky = Picky(inbox)
    with running(picky.worker):
        put(inbox, "1")
        while not effects(inbox):
            time.sleep(0.02)
        with connect(inbox) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() "
                "AND starts_with(application_name, 'saf receive')"
            )
        put(inbox, "2")
        while len(effects(inbox)) < 2:
            time.sleep(0.02)


@pytest.mark.slow
def test_an_idle_worker_writes_nothing_and_asks_twice_a_second(inbox: Dsn) -> None:
    with running(Picky(inbox).worker):
        time.sleep(1.5)
        assert writes_nothing(inbox, lambda: time.sleep(1.5))


def test_two_handlers_for_one_type_and_a_wrong_signature_are_refused_by_name(inbox: Dsn) -> None:
    worker = saf.Worker(inbox, SUBSCRIPTION)
    with pytest.raises(UsageError, match="the worker for 'billing' has no handler"):
        worker.drain()

    @worker.handler("Placed")
    def first(message: object, connection: object) -> None: ...

    def alone(message: object) -> None: ...

    async def later(message: object, connection: object) -> None: ...

    with pytest.raises(UsageError, match=r"'Placed' has a handler already: .*first"):
        worker.batch_handler("Placed")(alone)
    with pytest.raises(UsageError, match=r"alone for any type .* expected \(message, connection\)"):
        worker.handler()(alone)
    with pytest.raises(UsageError, match=r"first is not async, and .*later is"):
        worker.handler()(later)
    with pytest.raises(UsageError, match="at least 1"):
        saf.Worker(inbox, SUBSCRIPTION, threads=0)
    unknown = saf.Worker(inbox, "nobody")
    unknown.handler()(first)
    with pytest.raises(
        ConfigurationError, match=r"has no subscription 'nobody'\. It has 'billing'"
    ):
        unknown.run()


# saf worker

MODULE = """
import os, signal, time
import saf

worker = saf.Worker(os.environ["INBOX"], "billing", max_messages=5,
                    policy=saf.Policy(first_wait_seconds=0, longest_wait_seconds=0))

@worker.handler()
def handle(message, connection):
    if message.text() == "poison":
        os.kill(os.getpid(), signal.SIGKILL)
    if message.text() == "slow":
        time.sleep(1)
    connection.execute("INSERT INTO effect (key, body) VALUES (%s, %s)",
                       [message.key, message.text()])

other = 7
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "consumers.py").write_text(MODULE)
    return tmp_path


def start(module: Path, inbox: Dsn, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "saf", "worker", "consumers:worker", *arguments],
        cwd=module,
        env=environment(INBOX=inbox.conninfo, PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# The first message is handled, and the slow one has been in hand for a while
IN_HAND = """
SELECT FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.relation = 'effect'::regclass AND a.state = 'idle in transaction'
  AND clock_timestamp() - a.state_change > '0.2 s'
"""


def test_sigterm_finishes_the_message_in_hand_and_ends_with_0(inbox: Dsn, module: Path) -> None:
    put(inbox, "first", "slow", key="k")
    process = start(module, inbox)
    with connect(inbox) as connection:
        while not fetch(connection, IN_HAND):
            time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == "handled 2 messages\n"
    assert effects(inbox) == ["first", "slow"]


@pytest.mark.slow
def test_processes_that_a_message_kills_are_replaced_until_it_is_a_dead_letter(
    inbox: Dsn, module: Path
) -> None:
    store(inbox, 4, 5)
    put(inbox, "poison", "after", key="k2")
    process = start(module, inbox, "--processes", "2")
    try:
        deadline = time.monotonic() + 60
        while len(effects(inbox)) < 21 and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert dead(inbox) == [("poison", "failed")]
    assert effects(inbox).count("after") == 1
    assert len(effects(inbox)) == 21


# A signal arrives when a process was started, and its starter does not know of it yet
INTERRUPTED = """
import os, signal, subprocess
from saf.cli.worker import supervise

class Interrupted(subprocess.Popen):
    def __init__(self, command):
        super().__init__(command)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Interrupted
supervise([["sleep", "60"], ["sleep", "60"]])
"""


def test_sigterm_while_a_process_is_started_ends_that_one_too() -> None:
    before = time.monotonic()
    done = run([sys.executable, "-c", INTERRUPTED], env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - before < 40


def test_a_database_without_the_schema_is_named(
    inbox: Dsn, new_database: Callable[[str], Dsn]
) -> None:
    def handle(message: saf.Received, connection: Any) -> None:
        del message, connection

    bare = new_database("bare")
    engine = bare.engine()
    for where in (bare, engine):
        receiver = saf.Worker(where, SUBSCRIPTION)
        receiver.handler()(handle)
        for drain in (True, False):
            with pytest.raises(SchemaMissing, match=f"{bare.database}' has no saf schema"):
                receiver.run(drain=drain)
    engine.dispose()
    receiver = saf.Worker(inbox, SUBSCRIPTION)
    receiver.handler()(handle)
    with connect(inbox) as connection:
        connection.execute("ALTER TABLE saf.cursor RENAME TO gone")
    with pytest.raises(ConfigurationError, match="its schema saf is incomplete"):
        receiver.run()


def test_a_worker_that_cannot_be_found_is_named(inbox: Dsn, module: Path) -> None:
    (module / "broken.py").write_text("import os\nos.environ['MOM_DSN']\n")
    for which, said in (
        ("consumers", "expected MODULE:WORKER"),
        ("nowhere:worker", "no module 'nowhere' here"),
        ("broken:worker", "broken.py, line 2: KeyError: 'MOM_DSN'"),
        ("consumers:other", "'other' in consumers is neither saf.Worker nor saf.Processors, but 7"),
    ):
        done = run(
            [sys.executable, "-m", "saf", "worker", which],
            cwd=module,
            env={"INBOX": inbox.conninfo, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 2
        assert said in done.stderr


def test_idle_threads_take_turns(inbox: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    quiet = Receiver._still_quiet

    def counted(receiver: Receiver) -> bool:
        asked.append(time.monotonic())
        return quiet(receiver)

    monkeypatch.setattr(Receiver, "_still_quiet", counted)
    worker = Picky(inbox, threads=40).worker
    with running(worker):
        time.sleep(4)  # by now, the pauses are the longest
        before = len(asked)
        time.sleep(2)
        assert 10 < len(asked) - before < 60, "each of 40 by itself would ask twice a second"
        put(inbox, "1")
        until(lambda: worker.summary.handled == 1, AT_ONCE_SECONDS)
        store(inbox, 200, 1)
        until(lambda: worker.summary.handled == 201)
        began = time.monotonic()
    assert time.monotonic() - began < AT_ONCE_SECONDS, "those without a turn stop, too"
