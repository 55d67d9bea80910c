"""The forwarder's driver: what it closes, goes on with, gives way to, and reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from saf.config import Settings, load
from saf.database import Dsn, fetch
from saf.engine.work import Receipt, Work
from saf.errors import JobFailed, Restored, RowsGone, Unavailable
from saf.forwarding.broker import LITTLE, SourceBroker
from saf.forwarding.summary import Summary
from saf.routing.routes import add_route
from tests.destinations import NOWHERE
from tests.driver import InProcess, forwarder
from tests.kept import _nothing_stays
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass, send
from tests.programs import configuration
from tests.programs import send as send_many

__all__ = ["_nothing_stays"]

GIANT = 2000
PAST = datetime(2020, 1, 1, tzinfo=UTC)

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


def test_a_runner_that_does_not_answer_is_given_up_and_its_shards_are_free(
    app: Dsn, mom: Dsn, settings: Callable[..., Settings]
) -> None:
    given_up = threading.Event()

    class Hangs(InProcess):
        def slots(self) -> int:
            given_up.wait(20)
            return 1

        def abandon(self) -> None:
            given_up.set()

    send_many(app, 10)
    hanging = forwarder(settings(lease_seconds=1.0), Hangs())
    with pytest.raises(Unavailable, match="Spark is unavailable: it has not answered for 2 s"):
        hanging.drain()
    assert given_up.is_set()
    assert forwarder(settings(), InProcess()).drain().forwarded == 10
    assert len(bodies(mom)) == 10


def test_a_job_that_does_not_begin_is_waited_for_as_long_as_the_runner_answers(
    app: Dsn, mom: Dsn, settings: Callable[..., Settings]
) -> None:
    given_up = threading.Event()
    answers = 3

    class BeginsNever(InProcess):
        asked = 0

        def slots(self) -> int:
            self.asked += 1
            if self.asked > answers:
                given_up.wait(20)
            return 1

        def run(self, *_: object) -> list[Receipt]:
            given_up.wait(20)
            return []

        def abandon(self) -> None:
            given_up.set()

    send_many(app, 10)
    runner, began = BeginsNever(), time.monotonic()
    with pytest.raises(Unavailable, match="Spark is unavailable: it has not answered for 2 s"):
        forwarder(settings(lease_seconds=1.0), runner).drain()
    assert given_up.is_set()
    assert runner.asked == answers + 1
    assert answers + 2 <= time.monotonic() - began < 15
    assert forwarder(settings(), InProcess()).drain().forwarded == 10
    assert len(bodies(mom)) == 10


@pytest.mark.parametrize("step", ["start", "run"])
def test_a_stop_before_a_job_has_begun_is_honoured_within_a_lease(
    app: Dsn, mom: Dsn, settings: Callable[..., Settings], step: str
) -> None:
    over = threading.Event()
    ended: list[str] = []

    class WaitsForExecutors(InProcess):
        def start(self, work: Sequence[Work]) -> None:
            super().start(work)
            if step == "start":
                self._wait()

        def run(self, *_: object) -> list[Receipt]:
            self._wait()
            return []

        def _wait(self) -> None:
            waits.set()
            over.wait(60)

        def cancel(self, group: str) -> None:
            assert group
            ended.append("cancelled")
            over.set()

        def abandon(self) -> None:
            ended.append("abandoned")
            over.set()

    waits = threading.Event()
    send_many(app, 10)
    waiting = forwarder(settings(lease_seconds=1.0), WaitsForExecutors())
    failed: list[Exception] = []

    def drain() -> None:
        try:
            waiting.drain()
        except Unavailable as error:
            failed.append(error)

    thread = threading.Thread(target=drain)
    thread.start()
    assert waits.wait(20)
    waiting.stop()
    thread.join(10)
    assert not thread.is_alive()
    if step == "run":
        assert (ended, failed) == (["cancelled"], [])
        assert waiting.summary.stopped
    else:
        assert (ended, len(failed)) == (["abandoned"], 1)
    assert forwarder(settings(), InProcess()).drain().forwarded == 10
    assert len(bodies(mom)) == 10


def test_a_drain_goes_on_while_a_task_has_left_some_of_its_work(
    app: Dsn, mom: Dsn, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two tasks ends before its last chunk; the cycle has forwarded little."""
    monkeypatch.setattr("saf.engine.source.BATCH_BYTES", 20_000)
    send_many(app, LITTLE + 1000)
    context = InProcess(parallel=2)
    drained = forwarder(settings(chunk_bytes=20_000), context)

    def stop_the_second_task(job: int, task: int) -> None:
        broker = drained.roster.brokers["app"]
        if (job, task) == (0, 1):
            broker.stop()
        elif job == 1:
            assert 0 < len(bodies(mom)) < LITTLE + 1000
            broker.take_back_stop()

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
    context = InProcess(parallel=3)
    assert forwarder(settings(brokers), context).drain().forwarded == 9
    assert context.jobs == [3]


@pytest.mark.slow
def test_a_giant_that_has_given_way_goes_on_whole_in_the_next_cycle(
    app: Dsn,
    new_broker: NewBroker,
    settings: Callable[..., Settings],
    mom: Dsn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("saf.forwarding.broker.LITTLE", 100)
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


def test_what_became_of_messages_is_reported_by_number(
    app: Dsn, settings: Callable[..., Settings]
) -> None:
    with connect(app) as connection:
        add_route(connection, "nowhere", service="shipping")
        for service, expires in (("shipping", None), ("billing", PAST), ("billing", None)):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, body, expires_at) VALUES (%s, '', %s)",
                [service, expires],
            )
    summary = forwarder(settings(), InProcess()).drain()
    assert (summary.forwarded, summary.parked, summary.dead) == (1, 1, 1)
    assert [one["broker"] for one in summary.waiting] == ["app"]
    assert (summary.problems, summary.exit_code) == ([], 0)


def test_what_a_task_met_is_a_problem_and_decides_the_exit_code(
    app: Dsn, mom: Dsn, settings: Callable[..., Settings]
) -> None:
    with connect(app) as connection:
        send(connection, "x")
    with connect(mom) as connection:
        connection.execute("UPDATE saf.alembic_version SET version_num = '0001'")
    summary = forwarder(settings(attempts=1), InProcess()).drain()
    assert [one["kind"] for one in summary.problems] == ["SchemaMismatch"]
    assert summary.exit_code == 2


@pytest.mark.timeout(40)
def test_a_drain_whose_jobs_fail_each_time_ends_and_says_so(
    app: Dsn, new_broker: NewBroker, settings: Callable[..., Settings]
) -> None:
    """The next run forwards what this one has left."""

    def fail(job: int, task: int) -> None:  # noqa: ARG001 - as a runner calls it
        raise JobFailed("the executors have no such package")

    brokers = {"app": app, "two": new_broker("two")}
    for dsn in brokers.values():
        send_many(dsn, 3)
    context = InProcess(before_task=fail)
    given = settings(brokers, attempts=3, interval_seconds=0.1)
    summary = forwarder(given, context).drain()
    assert len(context.jobs) == 3
    assert [(one["broker"], one["kind"]) for one in summary.problems] == [
        ("app", "JobFailed"),
        ("two", "JobFailed"),
    ]
    assert summary.exit_code == 75
    assert forwarder(given, InProcess()).drain().forwarded == 6


def test_a_destination_under_two_names_is_refused(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    """One watermark cannot serve both."""
    with connect(app) as connection:
        add_route(connection, "again", service="shipping")
        for service in ("shipping", "billing"):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, body) VALUES (%s, '')", [service]
            )
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom, "again": mom})
    summary = forwarder(load(file), InProcess()).drain()
    assert [one["kind"] for one in summary.problems] == ["UsageError"]
    assert "are the same: one watermark" in summary.problems[0]["error"]


# Brief visits: with more sources than it may stay connected to


def brief(app: Dsn) -> list[Work]:
    broker = SourceBroker("app", app, lease_seconds=30)
    try:
        return broker.visit("mom", brief=True).work
    finally:
        broker.leave()


def test_who_has_nothing_to_do_in_a_brief_visit_ends_with_its_session(app: Dsn) -> None:
    broker = SourceBroker("app", app, lease_seconds=30)
    assert broker.visit("mom", brief=True).work == []
    assert not broker.connected
    sessions = "SELECT FROM pg_stat_activity WHERE application_name = 'saf forward' \
        AND datname = current_database()"
    with connect(app) as connection:
        until = time.monotonic() + 10
        while fetch(connection, sessions):
            assert time.monotonic() < until
        assert fetch(connection, "SELECT FROM saf.member") == []


def test_a_brief_visit_refuses_a_broker_whose_cursors_mean_nothing(app: Dsn) -> None:
    """They count what was sent as complete, so nothing would ever be found."""
    with connect(app) as connection:
        connection.execute("UPDATE saf.cursor SET done = '1000000:1000000:'")
        send(connection, "x")
    with pytest.raises(Restored, match=r"name transaction 999999.*saf rebase"):
        brief(app)


def test_a_brief_visit_finds_what_an_earlier_run_has_left_in_hand(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        send(connection, "x")
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        cycle.open()
        # what the batch holds is marked, and the batch is not closed
        cycle.deliver()
        with connect(app) as connection:
            connection.execute("UPDATE saf.cursor SET done = open WHERE open IS NOT NULL")
    assert len(brief(app)) == 1


def test_a_run_says_what_an_earlier_one_has_marked_and_may_have_told_nobody(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        for number in range(3):
            send(connection, str(number), key="k")
        with Cycle(app, forwarding_rules(mom=mom)) as killed:
            killed.open()
            connection.execute("UPDATE saf.cursor SET position = 2 WHERE open IS NOT NULL")
    with capture_logs() as events, Cycle(app, forwarding_rules(mom=mom)) as cycle:
        assert sum(one.messages for one in cycle.run()) == 1
        cycle.run()
    (said,) = [one for one in events if one["event"] == "resumed"]
    assert (said["broker"], said["shards"]) == ("app", 64)
    assert "if it was killed, in none" in said["detail"]


def test_a_brief_visit_finds_lanes_whose_time_has_come(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        add_route(connection, "other", service="billing")
        send(connection, "x")
    with Cycle(app, forwarding_rules(mom=mom, other=NOWHERE)) as cycle:
        cycle.run()
    assert brief(app) == []
    let_time_pass(app)
    assert len(brief(app)) == 1


def test_a_brief_visit_refuses_a_source_that_was_moved_since_the_last_one(app: Dsn) -> None:
    broker = SourceBroker("app", app, lease_seconds=30)
    assert broker.visit("mom", brief=True).work == []
    with connect(app) as connection:
        connection.execute("UPDATE saf.cursor SET done = '4000000000:4000000000:'")
        send(connection, "x")
    with pytest.raises(Restored, match=r"another cluster's cursors.*saf rebase"):
        broker.visit("mom", brief=True)
    broker.leave()


def test_a_brief_visit_refuses_a_source_whose_own_rows_are_gone(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("DELETE FROM saf.cursor WHERE shard > 0")
    with pytest.raises(RowsGone, match=r"saf.cursor has 1 of the 64 rows"):
        brief(app)
