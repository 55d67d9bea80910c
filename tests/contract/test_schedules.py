"""Schedules: exactly one message a run, whoever runs them, and whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import psycopg
import pytest
import structlog
from alembic import command
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import saf
from saf.broker.grants import Kind, grant
from saf.broker.migrate import config, migrate
from saf.broker.senders import add_senders, remove_senders
from saf.config import load
from saf.database import Dsn, fetch
from saf.database.queries import records
from saf.failpoints import arm
from saf.forwarding import broker, moving
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from saf.log import pauses
from saf.operating.repair.new_id import give_new_id
from saf.schedules import running
from saf.schedules.stored import MISSED
from saf.schedules.times import Times
from saf.testing.clock import let_time_pass
from tests.driver import looping
from tests.dying import Crash
from tests.dying import crash as die
from tests.kept import _nothing_stays
from tests.pipeline import bodies, connect, run
from tests.programs import configuration, url
from tests.server_clock import ClockedServer
from tests.waits import until, waiters

__all__ = ["_nothing_stays"]

every_postgresql = pytest.mark.every_postgresql

HOUR = timedelta(hours=1)
LONG_SECONDS = 600.0
"""Longer than any of these tests waits."""
EVERY = {"every": "1h"}
SENT = "SELECT headers ->> 'scheduled-for' FROM saf.outbox ORDER BY id"
TERMINATE = "SELECT pg_terminate_backend(%(pid)s)"


def add(dsn: Dsn, name: str = "hourly", **given: Any) -> str:
    if "cron" not in given:
        given = {**EVERY, **given}
    with dsn.connect(role="test") as connection:
        return saf.schedules.add(connection, name, "billing", {"a": 1}, **given)


def is_due(
    dsn: Dsn, hours: float = 0, name: str = "hourly", *, late: timedelta = timedelta(0)
) -> datetime:
    """Let the next run be due since so many full hours, and the last one be late; return when.

    Runs are counted from now, so that no further one is due while the test runs.
    """
    with connect(dsn) as connection:
        ((at,),) = fetch(
            connection,
            "UPDATE saf.schedule SET last_run = NULL, "
            "anchor = date_trunc('second', now() - %(late)s) - interval '1000 h', "
            "next_run = date_trunc('second', now() - %(late)s) - %(hours)s * interval '1 h' "
            "WHERE name = %(name)s RETURNING next_run",
            {"hours": hours, "name": name, "late": late},
        )
    found: datetime = at
    return found.astimezone(UTC)


def move(dsn: Dsn) -> int:
    with connect(dsn) as connection:
        return running.run(connection, 60.0)[0]


def sent(dsn: Dsn) -> list[str | None]:
    """The runs whose messages are in the outbox, in their order."""
    with connect(dsn) as connection:
        return [at for (at,) in fetch(connection, SENT)]


def stated(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


def state(dsn: Dsn, name: str = "hourly") -> saf.schedules.Schedule:
    with dsn.connect(role="test") as connection:
        (found,) = saf.schedules.listed(connection, name)
    return found


@every_postgresql
def test_each_run_is_a_message_that_is_delivered(app: Dsn, mom: Dsn) -> None:
    assert add(app, key="k", headers={"a": 1}, message_type="Refresh", from_service="clock") == (
        "added"
    )
    run(app, mom=mom)
    assert bodies(mom) == []
    due = is_due(app)
    run(app, mom=mom)
    run(app, mom=mom)
    with connect(mom) as connection:
        found = fetch(
            connection,
            "SELECT to_service, from_service, key, message_type, headers, body FROM saf.inbox",
        )
    headers = {"content-type": "application/json", "a": 1, "scheduled-for": stated(due)}
    assert found == [("billing", "clock", "k", "Refresh", headers, b'{"a":1}')]
    after = state(app)
    assert (after.last_run, after.next_run, after.skipped) == (due, due + HOUR, 0)


def test_a_forwarder_learns_from_one_question_what_is_due(app: Dsn) -> None:
    with connect(app) as connection:
        assert moving.due_in(connection) is None
        add(app)
        seconds = moving.due_in(connection)
        assert seconds is not None
        assert 0 < seconds <= 3600
        with app.connect(role="test") as other:
            at = datetime.now(UTC) + timedelta(seconds=2)
            saf.Outbox().send(other, "billing", "", deliver_at=at)
        seconds = moving.due_in(connection)
        assert seconds is not None
        assert seconds <= 2
        is_due(app)
        assert (moving.due_in(connection) or 0.0) < 0


@every_postgresql
def test_of_eight_forwarders_one_sends_the_message_of_each_run(app: Dsn) -> None:
    names = [f"s{number}" for number in range(5)]
    for name in names:
        add(app, name, missed="all", key=name)
        is_due(app, 40, name)
    ready = Barrier(8)

    def race() -> int:
        with connect(app) as connection:
            ready.wait()
            made = 0
            while (more := running.run(connection, 60.0)[0]) or _left(connection):
                made += more
            return made

    with ThreadPoolExecutor(8) as threads:
        made = [job.result() for job in [threads.submit(race) for _ in range(8)]]
    assert sum(made) == 5 * 41
    with connect(app) as connection:
        found = fetch(
            connection, "SELECT key, headers ->> 'scheduled-for' FROM saf.outbox ORDER BY id"
        )
    for name in names:
        times = [at for key, at in found if key == name]
        assert len(times) == len(set(times)) == 41
        assert times == sorted(times)


def _left(connection: psycopg.Connection[Any]) -> bool:
    return (moving.due_in(connection) or 1.0) <= 0


@pytest.mark.usefixtures("disarmed")
@pytest.mark.parametrize("point", ["schedule_read", "schedule_run"])
def test_a_forwarder_that_dies_between_two_statements_sends_no_run_twice(
    app: Dsn, point: str
) -> None:
    add(app, missed="all")
    due = is_due(app, 3)
    for times in (1, 2):
        arm(f"{point}:{times}", die)
        with pytest.raises(Crash):
            move(app)
        arm("")
    move(app)
    assert sent(app) == [stated(due + n * HOUR) for n in range(4)]


@every_postgresql
def test_a_session_that_ends_within_a_run_sends_nothing_of_it(app: Dsn) -> None:
    add(app)
    due = is_due(app)
    with (
        connect(app) as holder,
        connect(app) as dying,
        ThreadPoolExecutor(1) as thread,
        holder.transaction(),
    ):
        # the run has the schedule's row and has sent its message, and waits to note it
        holder.execute("LOCK TABLE saf.schedule_run IN ACCESS EXCLUSIVE MODE")
        job = thread.submit(running.run, dying, 60.0)
        until(lambda: waiters(holder))
        # another forwarder waits for nobody, and sends nothing meanwhile
        with connect(app) as other:
            other.execute("SET lock_timeout = '5s'")
            assert running.run(other, 60.0) == (0, False)
        fetch(holder, TERMINATE, {"pid": dying.info.backend_pid})
        with pytest.raises(psycopg.OperationalError):
            job.result()
    assert sent(app) == []
    assert move(app) == 1
    assert sent(app) == [stated(due)]


def test_a_run_whose_transaction_is_rolled_back_is_due_again(app: Dsn) -> None:
    add(app)
    due = is_due(app)
    with app.connect(role="test") as connection:
        assert running.run(connection, 60.0) == (1, False)
        connection.rollback()
    assert sent(app) == []
    assert move(app) == 1
    assert sent(app) == [stated(due)]


@every_postgresql
@pytest.mark.parametrize("late", [timedelta(0), timedelta(minutes=6)])
def test_missed_runs_are_skipped_or_the_last_or_all_are_sent(app: Dsn, late: timedelta) -> None:
    due = {}
    for missed in MISSED:
        add(app, missed, missed=missed, key=missed)
        due[missed] = is_due(app, 3, missed, late=late)
    move(app)
    with connect(app) as connection:
        found = fetch(
            connection, "SELECT key, headers ->> 'scheduled-for' FROM saf.outbox ORDER BY id"
        )
    expected_runs = {"none": [] if late else [3], "one": [3], "all": [0, 1, 2, 3]}
    for missed in MISSED:
        expected = expected_runs[missed]
        times = [stated(due[missed] + n * HOUR) for n in expected]
        assert [at for key, at in found if key == missed] == times
        after = state(app, missed)
        assert after.skipped == (0 if missed == "all" else 4 - len(expected))
        assert after.next_run == due[missed] + 4 * HOUR


def test_the_history_shows_runs_skipped_ones_and_extra_ones_and_is_bounded(app: Dsn) -> None:
    add(app, missed="one")
    due = is_due(app, 3)
    move(app)
    with app.connect(role="test") as connection:
        extra = saf.schedules.run_now(connection, "hourly")
        runs = saf.schedules.history(connection, "hourly")
        assert [(one.due, one.skipped) for one in runs] == [(None, 0), (due + 3 * HOUR, 3)]
        assert runs[0].message_id == extra
        ids = {one for (one,) in fetch(connection, "SELECT message_id FROM saf.outbox")}
        assert ids == {one.message_id for one in runs}
        for _ in range(30):
            saf.schedules.run_now(connection, "hourly")
        assert len(saf.schedules.history(connection, "hourly")) == 20


@every_postgresql
def test_an_extra_run_leaves_the_scheduled_ones_as_they_are(app: Dsn) -> None:
    add(app)
    before = state(app)
    with app.connect(role="test") as connection:
        assert saf.schedules.run_now(connection, "hourly")
        assert saf.schedules.run_now(connection, "unknown") is None
    assert sent(app) == [None]
    after = state(app)
    assert (after.next_run, after.last_run) == (before.next_run, None)


@every_postgresql
def test_runs_during_a_pause_are_not_sent_and_not_caught_up(app: Dsn) -> None:
    add(app, missed="all")
    due = is_due(app, 2)
    with app.connect(role="test") as connection:
        assert saf.schedules.pause(connection, "hourly")
        assert not saf.schedules.pause(connection, "unknown")
    assert move(app) == 0
    with app.connect(role="test") as connection:
        assert saf.schedules.resume(connection, "hourly")
        assert not saf.schedules.resume(connection, "unknown")
    assert move(app) == 0
    assert sent(app) == []
    assert state(app).next_run == due + 3 * HOUR


def test_a_copy_that_becomes_another_broker_leaves_the_runs_to_its_original(app: Dsn) -> None:
    add(app)
    is_due(app)
    with connect(app) as connection:
        give_new_id(connection, None)
    assert move(app) == 0
    assert state(app).paused


def test_a_run_that_was_read_before_a_change_is_not_sent(app: Dsn) -> None:
    add(app)
    with connect(app) as connection:
        connection.execute("UPDATE saf.schedule SET next_run = date_trunc('second', now())")
        (due,) = records(connection, running.Due, running.DUE, {"most": 1})
        assert add(app, missed="all") == "changed"
        assert not running._run(connection, due)
    assert move(app) == 1


def test_another_role_may_not_invent_runs(app: Dsn) -> None:
    add(app)
    due = is_due(app)
    right = {"name": "hourly", "version": 1, "expected": due, "due": due, "skipped": 0}
    right |= {"next_run": due + HOUR, "problem": None}
    with connect(app) as connection:
        for wrong in (
            {"due": due - HOUR},
            {"next_run": due},
            {"due": None},
        ):
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                fetch(connection, running.RUN, {**right, **wrong})
        for early in (
            {"expected": due - HOUR},
            {"due": due + 2 * HOUR, "next_run": due + 3 * HOUR},  # the clock was set back
        ):
            assert fetch(connection, running.RUN, {**right, **early}) == [(False,)]
        assert fetch(connection, running.RUN, right) == [(True,)]
        assert fetch(connection, running.RUN, right) == [(False,)]
    assert sent(app) == [stated(due)]


@every_postgresql
def test_a_change_keeps_the_next_run_unless_the_times_change(app: Dsn) -> None:
    add(app)
    with connect(app) as connection:
        connection.execute("UPDATE saf.schedule SET next_run = '2001-01-01 UTC'")
    due = state(app).next_run
    assert add(app) == "unchanged"
    assert add(app, key="k") == "changed"
    assert state(app).next_run == due
    assert add(app, key="k", every="2h") == "changed"
    assert state(app).next_run > datetime.now(UTC)


def test_after_a_change_no_run_comes_again_even_if_the_clock_was_set_back(app: Dsn) -> None:
    add(app)
    is_due(app)
    move(app)
    with connect(app) as connection:  # as if the clock was set back by a day
        connection.execute(
            "UPDATE saf.schedule SET last_run = last_run + '1 day'::interval, "
            "next_run = next_run + '1 day'::interval"
        )
    last = state(app).last_run
    assert last is not None
    assert add(app, every="30m") == "changed"
    assert state(app).next_run == Times.of(cron=None, every="30m").after(last)
    with app.connect(role="test") as connection:
        saf.schedules.pause(connection, "hourly")
        saf.schedules.resume(connection, "hourly")
    assert state(app).next_run > last


@contextmanager
def clocked() -> Iterator[tuple[ClockedServer, Dsn]]:
    with tempfile.TemporaryDirectory(prefix="saf-clock-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        server = ClockedServer(Path(folder) / "data")
        server.start()
        try:
            dsn = server.create_database("app")
            migrate(dsn)
            yield server, dsn
        finally:
            server.stop_immediately()


@pytest.mark.slow
def test_a_clock_that_is_set_ahead_and_back_sends_each_run_once() -> None:
    with clocked() as (server, app):
        assert server.has_clock
        given: dict[str, Any] = {"missed": "all", "anchor": datetime.now(UTC)}
        add(app, **given)
        server.set_clock(3 * 3600)
        assert move(app) == 3
        first = sent(app)
        server.set_clock(0)
        assert move(app) == 0
        add(app, **given, key="k")  # a change, meanwhile
        add(app, **given, key="k", every="30m")
        add(app, **given, key="k")
        assert move(app) == 0
        server.set_clock(5 * 3600)
        assert move(app) == 2
        found = sent(app)
    assert found[:3] == first
    assert len(found) == len(set(found)) == 5
    assert found == sorted(found, key=str)


@pytest.fixture
def writer(app: Dsn) -> Iterator[Dsn]:
    """A login that may send, and nothing else."""
    yield from _login(app, Kind.WRITER)


@pytest.fixture
def mover(app: Dsn) -> Iterator[Dsn]:
    """A login that may forward, and nothing else."""
    yield from _login(app, Kind.FORWARDER)


def _login(app: Dsn, kind: Kind) -> Iterator[Dsn]:
    name = f"{kind}_{app.database}"
    with connect(app) as owner:
        owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        grant(owner, name, [kind])
        yield Dsn(make_conninfo(app.conninfo, user=name))
        owner.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
        owner.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@every_postgresql
def test_a_writer_adds_schedules_and_a_forwarder_runs_them(
    app: Dsn, writer: Dsn, mover: Dsn
) -> None:
    assert add(writer) == "added"
    due = is_due(app)
    with pytest.raises(psycopg.errors.InsufficientPrivilege), connect(writer) as connection:
        connection.execute("SELECT body FROM saf.schedule")
    with pytest.raises(psycopg.errors.InsufficientPrivilege), connect(mover) as connection:
        connection.execute("SELECT body FROM saf.schedule")
    with pytest.raises(saf.ConfigurationError, match="may not do this"):
        add(mover)
    with mover.connect(role="test") as other, pytest.raises(saf.ConfigurationError):
        saf.schedules.pause(other, "hourly")
    assert move(mover) == 1
    assert sent(app) == [stated(due)]
    assert state(writer).sender == writer.parts["user"]


@every_postgresql
def test_the_rules_of_senders_hold_when_it_is_added_changed_and_run(app: Dsn, writer: Dsn) -> None:
    with connect(app) as owner:
        add_senders(owner, writer.parts["user"], "clock", ["billing"])
    with pytest.raises(saf.ConfigurationError):
        add(writer)
    add(app, "others")
    with writer.connect(role="test") as connection:
        for change in (saf.schedules.pause, saf.schedules.remove, saf.schedules.run_now):
            with pytest.raises(saf.ConfigurationError), connection.transaction():
                change(connection, "others")
    assert add(writer, from_service="clock") == "added"
    with connect(app) as owner:
        add_senders(owner, writer.parts["user"], "clock", ["other"])
        remove_senders(owner, writer.parts["user"], "clock", ["billing"])
    due = is_due(app)
    assert move(app) == 1
    assert move(app) == 0
    refused = state(app)
    assert refused.refused is not None
    assert "billing" in refused.refused
    assert (refused.next_run, refused.last_run) == (due, None)
    assert sent(app) == []
    with connect(app) as owner:
        add_senders(owner, writer.parts["user"], "clock", ["billing"])
    with app.connect(role="test") as connection:
        saf.schedules.resume(connection, "hourly")
    assert move(app) == 1
    assert sent(app) == [stated(due)]


def test_a_schedule_whose_zone_a_forwarder_lacks_stops_with_the_reason(app: Dsn) -> None:
    add(app, cron="0 2 * * *")
    with connect(app) as connection:
        connection.execute("UPDATE saf.schedule SET zone = 'Mars/Olympus'")
    is_due(app)
    assert move(app) == 1
    assert move(app) == 0
    assert "no time zone 'Mars/Olympus'" in str(state(app).refused)
    add(app, cron="0 2 * * *")
    assert state(app).refused is None


def test_a_message_that_the_outbox_rejects_stops_its_schedule_only(app: Dsn) -> None:
    add(app, "bad", key="no")
    add(app)
    with connect(app) as connection:
        connection.execute("ALTER TABLE saf.outbox ADD CONSTRAINT no CHECK (key <> 'no')")
    is_due(app, 1, "bad")
    due = is_due(app)
    assert move(app) == 2
    assert '"no"' in str(state(app, "bad").refused)
    assert sent(app) == [stated(due)]


def test_a_mistake_is_refused_before_anything_is_written(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        for name in ("", "a\nb", 7, "x" * 256):
            with pytest.raises(saf.UsageError):
                saf.schedules.add(connection, name, "billing", "", every="1h")  # type: ignore[arg-type]
        with pytest.raises(saf.InvalidMessage, match="scheduled-for"):
            saf.schedules.add(
                connection, "n", "billing", "", every="1h", headers={"Scheduled-For": 1}
            )
        with pytest.raises(saf.UsageError, match="none, one, all"):
            saf.schedules.add(connection, "n", "billing", "", every="1h", missed="some")  # type: ignore[arg-type]
        with pytest.raises(saf.InvalidMessage, match="service"):
            saf.schedules.add(connection, "n", "", "", every="1h")
        assert saf.schedules.listed(connection) == []
    with connect(app) as autocommit, pytest.raises(saf.AutocommitError):
        saf.schedules.add(autocommit, "n", "billing", "", every="1h")


def declared(every: str = "15m", *, more: bool = True) -> saf.Schedules:
    schedules = saf.Schedules("shop", from_service="shop")
    schedules.every("refresh", every, service="search", body={"full": False})
    if more:
        schedules.cron("nightly", "0 2 * * *", zone="Europe/Berlin", service="reports", body="go")
    return schedules


def deploy(dsn: Dsn, schedules: saf.Schedules) -> dict[str, tuple[str, ...]]:
    with dsn.connect(role="test") as connection:
        done = schedules.deploy(connection)
    found = {name: getattr(done, name) for name in ("added", "changed", "unchanged", "undeclared")}
    return {name: names for name, names in found.items() if names}


@every_postgresql
def test_declared_schedules_are_added_changed_and_reported_when_they_are_gone(app: Dsn) -> None:
    both = ("nightly", "refresh")
    assert deploy(app, declared()) == {"added": both}
    assert deploy(app, declared()) == {"unchanged": both}
    assert deploy(app, declared("20m")) == {"changed": ("refresh",), "unchanged": ("nightly",)}
    with structlog.testing.capture_logs() as lines:
        gone = deploy(app, declared("20m", more=False))
    assert gone == {"unchanged": ("refresh",), "undeclared": ("nightly",)}
    assert [line["event"] for line in lines] == ["schedules_undeclared"]
    assert state(app, "nightly").origin == "shop"
    # another application has its own names
    assert deploy(app, saf.Schedules("other")) == {}
    other = saf.Schedules("other")
    other.every("refresh", "1h", service="search", body={})
    with pytest.raises(saf.ConfigurationError, match="is declared by 'shop'"):
        deploy(app, other)
    with pytest.raises(saf.ConfigurationError, match="is declared by 'shop'"):
        add(app, "refresh")
    with pytest.raises(saf.UsageError, match="declared twice"):
        other.every("refresh", "1h", service="search", body={})


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_schedules_are_deployed_and_changed_under_asyncio(app: Dsn, driver: str) -> None:
    async def change() -> list[saf.schedules.Schedule]:
        engine = create_async_engine(url(app).replace("psycopg", driver))
        async with AsyncSession(engine) as session, session.begin():
            done = await session.run_sync(declared().deploy)
            assert done.added == ("nightly", "refresh")
            assert await session.run_sync(saf.schedules.pause, "refresh")
            assert await session.run_sync(saf.schedules.resume, "refresh")
            sent = await session.run_sync(saf.schedules.run_now, "refresh")
            (run,) = await session.run_sync(saf.schedules.history, "refresh")
            assert run.message_id == sent
            done = await session.run_sync(declared().deploy)
            assert done.unchanged == ("nightly", "refresh")
            assert await session.run_sync(saf.schedules.remove, "nightly")
            found = await session.run_sync(saf.schedules.listed)
        await engine.dispose()
        return found

    (found,) = asyncio.run(change())
    assert (found.name, str(found.times)) == ("refresh", "every 15m")


@every_postgresql
def test_two_that_deploy_at_the_same_time_add_each_schedule_once(app: Dsn) -> None:
    with (
        app.connect(role="test") as first,
        app.connect(role="test") as second,
        ThreadPoolExecutor(1) as thread,
    ):
        done = declared().deploy(first)
        assert done.added == ("nightly", "refresh")
        job = thread.submit(declared().deploy, second)
        until(lambda: waiters(first))
        first.commit()
        assert job.result().unchanged == ("nightly", "refresh")
    with connect(app) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.schedule") == [(2,)]


def test_a_loop_that_sleeps_wakes_up_for_a_run(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "SURE_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(pauses, "SHORTEST_SECONDS", LONG_SECONDS / 2)
    soon = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=3)
    add(app, anchor=soon)
    file = configuration(
        tmp_path / "saf.toml", {"app": app}, {"mom": mom}, interval_seconds=LONG_SECONDS
    )
    forwarder = Forwarder(load(file), InProcess())
    forwarder.roster.once = False
    with looping(forwarder):
        until(lambda: bodies(mom))
    with connect(mom) as connection:
        found = fetch(connection, "SELECT headers ->> 'scheduled-for', received_at FROM saf.inbox")
    ((stated_, arrived),) = found
    assert stated_ == stated(soon)
    assert arrived >= soon


def test_a_visit_that_has_no_time_for_all_runs_leaves_them_to_the_next(
    app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(app, missed="all")
    is_due(app, 3)
    monkeypatch.setattr(running.run, "__defaults__", (-1.0,))
    with connect(app) as connection:
        moved = [moving.move(connection) for _ in range(5)]
        assert [(one.found, one.more) for one in moved] == [*4 * [(1, True)], (0, False)]


def test_the_clock_of_the_test_kit_moves_schedules(app: Dsn) -> None:
    add(app, missed="all")
    let_time_pass(app, 2 * HOUR)
    assert move(app) == 2
    let_time_pass(app, HOUR)
    assert move(app) == 1
    assert move(app) == 0


def test_the_revision_before_has_no_place_for_schedules(app: Dsn) -> None:
    add(app)
    with pytest.raises(Exception, match="there are schedules, and revision 0039"):
        command.downgrade(config(app), "0039")
    with app.connect(role="test") as connection:
        assert saf.schedules.remove(connection, "hourly")
        assert not saf.schedules.remove(connection, "hourly")
    command.downgrade(config(app), "0039")
    migrate(app)
    assert add(app) == "added"
