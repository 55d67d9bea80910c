"""A deep batch is surveyed once for all its tasks, and no task relies on what may have changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from saf.config import load
from saf.database import Dsn
from saf.engine import survey as surveying
from saf.engine.source import messages
from saf.engine.work import Work
from saf.forwarding import broker, surveys
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from saf.forwarding.surveys import surveyed
from saf.log.cursor import Batch
from saf.log.ring import SLOT_ROWS, purge
from saf.log.shards import shard_of
from tests.forwarders import configuration
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, send
from tests.waits import until

FILL = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT 'billing', (n % 40)::text, convert_to(n || repeat('.', 300), 'UTF8')
FROM generate_series({}, {}) AS n
"""
MAX_BYTES = 1 << 26
SESSIONS = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'saf read'
"""


@pytest.fixture(autouse=True)
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few messages are a deep backlog, and some two pages a window."""
    monkeypatch.setattr(broker, "LITTLE", 0)
    monkeypatch.setattr(broker, "DEEP", 1)
    monkeypatch.setattr(surveying, "WINDOW_BYTES", 32_000)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who has made a survey, by the name of its session."""
    made: list[str] = []

    def noted(cursor: Any, batch: Batch) -> list[surveying.Window]:
        made.append("driver" if isinstance(cursor, psycopg.Cursor) else "task")
        return survey(cursor, batch)

    survey = surveying.survey
    monkeypatch.setattr(surveying, "survey", noted)
    monkeypatch.setattr("saf.engine.source.survey", noted)
    return made


def read(work: Work) -> pa.Table:
    return pa.Table.from_batches(list(messages(work, MAX_BYTES)))


def sessions(connection: psycopg.Connection[Any]) -> list[int]:
    """The processes of the server that readers of its log have."""
    return [pid for (pid,) in connection.execute(SESSIONS)]


def numbers(mom: Dsn) -> dict[int, list[int]]:
    """What arrived of each key, in order."""
    arrived: dict[int, list[int]] = {key: [] for key in range(40)}
    for body in bodies(mom):
        number = int(body.rstrip("."))
        arrived[number % 40].append(number)
    return arrived


def sent(messages: int) -> dict[int, list[int]]:
    return {key: [n for n in range(1, messages + 1) if n % 40 == key] for key in range(40)}


@contextmanager
def opened(app: Dsn, mom: Dsn, parts: int) -> Iterator[list[Work]]:
    """A batch, and so many items of work that share it."""
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        yield cycle.open(parts=parts)


@pytest.mark.parametrize("tasks", [2, 4, 16])
def test_a_batch_is_surveyed_once_however_many_tasks_share_it(
    app: Dsn, mom: Dsn, tmp_path: Path, made: list[str], tasks: int
) -> None:
    with connect(app) as connection:
        connection.execute(FILL.format(1, 2000))
    settings = load(configuration(tmp_path, app, mom, tasks=tasks))
    summary = Forwarder(settings, InProcess()).drain()
    assert (summary.forwarded, summary.problems) == (2000, [])
    assert made == ["driver"]
    assert numbers(mom) == sent(2000)


def test_where_nobody_shares_a_batch_its_task_surveys_it(
    app: Dsn, mom: Dsn, tmp_path: Path, made: list[str]
) -> None:
    with connect(app) as connection:
        connection.execute(FILL.format(1, 2000))
    settings = load(configuration(tmp_path, app, mom, tasks=1))
    assert Forwarder(settings, InProcess()).drain().forwarded == 2000
    assert made == ["task"]


def test_a_source_whose_connections_are_counted_is_surveyed_by_its_tasks(
    app: Dsn, mom: Dsn, tmp_path: Path, made: list[str]
) -> None:
    with connect(app) as connection:
        connection.execute(FILL.format(1, 2000))
    settings = load(configuration(tmp_path, app, mom, tasks=4, max_connections=7))
    assert Forwarder(settings, InProcess()).drain().forwarded == 2000
    assert made == ["task", "task"]


def test_tasks_read_with_a_shared_survey_what_they_read_with_their_own(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection, ExitStack() as stack:
        senders = [stack.enter_context(app.connect(role="test")) for _ in range(3)]
        for start in range(1, 1801, 100):  # each fills pages of its own, by turns
            senders[start // 100 % 3].execute(FILL.format(start, start + 99))
        for sender in senders:
            sender.commit()
        for task in range(4):  # and for each task pages that no other has anything on
            key = next(key for key in map(str, range(64)) if shard_of(key, 64) % 4 == task)
            for _ in range(200):
                send(connection, "." * 300, key=key)
        with opened(app, mom, 4) as work, surveyed(work) as shared:
            for item, own in zip(shared, work, strict=True):
                assert item.survey is not None
                assert own.survey is None
                rows = read(item)
                assert rows.num_rows > 0
                assert rows.equals(read(own))
                assert rows.equals(read(replace(own, deep=False)))


def test_what_a_late_committer_writes_is_of_the_next_batch(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection, app.connect(role="test") as late:
        late.execute(FILL.format(1, 40))
        connection.execute(FILL.format(41, 1000))
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            work = cycle.open(parts=4)
            with surveyed(work) as shared:
                late.commit()
                connection.execute(FILL.format(1001, 1500))  # on new pages
                ids = [id_ for item in shared for id_ in read(item)["id"].to_pylist()]
                assert sorted(ids) == list(range(41, 1001))
                cycle.close(cycle.deliver())
            cycle.open(parts=4)
            cycle.close(cycle.deliver())
    assert sorted(int(body.rstrip(".")) for body in bodies(mom)) == list(range(1, 1501))


@pytest.mark.every_postgresql
def test_rows_that_move_after_the_survey_are_read_once(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(FILL.format(1, 3000))
        connection.execute("DELETE FROM saf.outbox WHERE id % 3 <> 0")
        with opened(app, mom, 3) as work:
            before = [read(replace(item, deep=False)) for item in work]
            with surveyed(work) as shared:
                connection.execute("UPDATE saf.outbox SET headers = '{}' WHERE id % 2 = 0")
                connection.execute("SET lock_timeout = '50ms'")
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    connection.execute("VACUUM FULL saf.outbox_0")
                assert all(read(one).equals(rows) for one, rows in zip(shared, before, strict=True))
                # what the survey relies on ends with its session
                for pid in sessions(connection):
                    connection.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
                connection.execute("RESET lock_timeout")
                connection.execute("VACUUM FULL saf.outbox_0")
                ids = [rows["id"].to_pylist() for rows in before]
                assert [read(one)["id"].to_pylist() for one in shared] == ids
                assert sum(map(len, ids)) == 1000


def test_a_task_that_comes_after_a_purge_finds_nothing(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("SELECT setval('saf.outbox_id_seq', %s)", [SLOT_ROWS - 1001])
        connection.execute(FILL.format(1, 1001))
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            cycle.open(parts=3)
            with surveyed(cycle.work) as shared:
                cycle.close(cycle.deliver())
                first, *_ = purge(connection, "outbox", retention_seconds=0)
                assert first.state == "locked"
                assert sum(read(item).num_rows for item in shared) == 1001
            first, *_ = purge(connection, "outbox", retention_seconds=0)
            assert (first.state, first.messages) == ("purged", 1000)
            assert sum(len(list(messages(item, MAX_BYTES))) for item in shared) == 1
    assert numbers(mom) == sent(1001)


def test_who_goes_on_with_a_batch_after_a_crash_surveys_it_again(
    app: Dsn, mom: Dsn, made: list[str]
) -> None:
    rules = forwarding_rules(chunk_rows=100, mom=mom)
    with connect(app) as connection:
        connection.execute(FILL.format(1, 2000))
        with Cycle(app, rules) as crashed:
            crashed.open(parts=4)
            batch = crashed.work[0].batch.number
            crashed.deliver()
            connection.execute("UPDATE saf.cursor SET position = 700 WHERE open IS NOT NULL")
        with Cycle(app, rules) as cycle:
            cycle.open(parts=4)
            assert {item.batch.number for item in cycle.work} == {batch}
            cycle.close(cycle.deliver())
            assert cycle.open() == []
    assert made == ["driver"] * 2
    assert numbers(mom) == sent(2000)


def test_where_the_driver_cannot_survey_the_tasks_do(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch, made: list[str]
) -> None:
    monkeypatch.setattr(surveying, "EXPORT", "SELECT 1 / 0")
    with connect(app) as connection:
        connection.execute(FILL.format(1, 1000))
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            cycle.open(parts=3)
            cycle.close(cycle.deliver())
    assert made == ["driver", "task", "task", "task"]
    assert numbers(mom) == sent(1000)


@pytest.mark.slow
def test_a_source_that_takes_long_to_survey_holds_up_no_other(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveys, "OTHERS_SECONDS", 3.0)
    rules = forwarding_rules(mom=mom)
    with connect(app) as here, connect(mom) as there, mom.connect(role="test") as blocking:
        here.execute(FILL.format(1, 1000))
        there.execute(FILL.format(1, 1000))
        with Cycle(app, rules) as quick, Cycle(mom, rules) as slow:
            work = quick.open(parts=2) + [replace(one, broker="mom") for one in slow.open(parts=2)]
            blocking.execute("LOCK TABLE saf.outbox IN ACCESS EXCLUSIVE MODE")
            heard: list[None] = []
            with surveyed(work, meanwhile=lambda: heard.append(None)) as shared:
                assert len(heard) >= 3
                assert [item.survey is None for item in shared] == [False, False, True, True]
                assert sessions(there)  # which still waits
                blocking.rollback()
            until(lambda: not sessions(here) + sessions(there))  # also of what came too late


def test_no_session_is_left_when_the_work_fails(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        for number in range(200):
            send(connection, str(number), key=str(number))
        with opened(app, mom, 2) as work:
            with suppress(KeyError), surveyed(work):
                assert sessions(connection)
                raise KeyError
            until(lambda: not sessions(connection))
