"""Backfills: a replica that is built from messages equals its table, whatever happens meanwhile."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any

import psycopg
import pytest

from saf.capture import backfill, stored
from saf.capture.backfill import Ran, Wanted
from saf.capture.stored import named
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, Unavailable, UsageError
from tests import processes
from tests.captures import capture, ops, run_in_process, sent
from tests.pipeline import connect
from tests.roles import as_user
from tests.tiers import sized
from tests.waits import until

every_postgresql = pytest.mark.every_postgresql

ROWS = """
CREATE TABLE orders (number bigint PRIMARY KEY, status text, total numeric);
INSERT INTO orders SELECT n, 'old', n FROM generate_series(1, {rows}) AS n;
"""


STOPPED = Event()
STOPPED.set()


def prepared(connection: psycopg.Connection[Any], rows: int, **given: Any) -> None:
    connection.execute(ROWS.replace("{rows}", str(rows)))
    capture(connection, **given)


def begin(connection: psycopg.Connection[Any], stopping: Event | None = None, **wanted: Any) -> Ran:
    given = () if stopping is None else (stopping.is_set,)
    return backfill.run(connection, named(connection, "orders"), Wanted(**wanted), *given)


def replica(connection: psycopg.Connection[Any]) -> dict[str | None, Any]:
    """What a receiver has that applies messages as they come."""
    rows: dict[str | None, Any] = {}
    for key, op, before, after in sent(connection):
        if op == "delete":
            assert rows.pop(key, None) in (before, None)
        else:
            rows[key] = after
    return rows


def table(connection: psycopg.Connection[Any]) -> dict[str | None, Any]:
    found = fetch(connection, "SELECT number::text, row_to_json(o)::text FROM orders AS o")
    return {key: json.loads(text) for key, text in found}


@contextmanager
def in_background(app: Dsn, **wanted: Any) -> Iterator[Future[Ran]]:
    """A backfill that runs beside the block, and stops at its end at the latest."""
    stopping = Event()

    def work() -> Ran:
        with connect(app) as connection:
            return begin(connection, stopping, **wanted)

    with ThreadPoolExecutor(1) as thread:
        try:
            yield thread.submit(work)
        finally:
            stopping.set()


@every_postgresql
def test_the_rows_of_a_table_are_sent_once_each_in_chunks_and_marked(
    source: psycopg.Connection[Any],
) -> None:
    prepared(source, 25, columns=("number", "total"))
    done = begin(source, chunk_rows=10)
    assert (done.state, done.messages, done.backfill.messages) == ("done", 25, 25)
    assert sent(source) == [
        (str(number), "read", None, {"number": number, "total": float(number)})
        for number in range(1, 26)
    ]
    found = fetch(
        source, "SELECT DISTINCT headers ->> 'saf-backfill', message_type FROM saf.outbox"
    )
    assert found == [(str(done.backfill.backfill_id), "orders.read")]
    assert fetch(source, "SELECT count(DISTINCT txid) FROM saf.outbox") == [(3,)]


def test_only_the_rows_of_where_and_of_the_captures_condition_are_sent(
    source: psycopg.Connection[Any],
) -> None:
    source.execute(ROWS.replace("{rows}", "10"))
    source.execute("UPDATE orders SET status = 'paid %' WHERE number > 6")
    capture(source, condition="new.status LIKE 'paid %' AND old.status IS DISTINCT FROM 'paid %'")
    assert begin(source, condition="total < 9 -- 100%", chunk_rows=3).messages == 2
    assert [key for key, _ in ops(source)] == ["7", "8"]


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("totel > 1", 'column "totel" does not exist'),
        ("true); DELETE FROM orders; SELECT (true", "syntax error"),
        ("total", "argument of .* must be type boolean"),
        ("", "expected an SQL expression"),
    ],
)
def test_a_where_that_is_none_is_refused(
    source: psycopg.Connection[Any], where: str, problem: str
) -> None:
    prepared(source, 2)
    with pytest.raises(UsageError, match=problem):
        begin(source, condition=where)
    assert fetch(source, "SELECT count(*) FROM orders") == [(2,)]
    assert backfill.backfills(source) == []


@every_postgresql
def test_a_row_that_a_session_is_changing_is_left_over_and_sent_as_it_is_then(
    source: psycopg.Connection[Any], app: Dsn
) -> None:
    prepared(source, 10)
    with connect(app) as writer, connect(app) as holder:
        with writer.transaction():
            writer.execute("UPDATE orders SET status = 'new' WHERE number = 5")
            with holder.transaction():
                holder.execute("SELECT FROM orders WHERE number = 7 FOR UPDATE")
                with in_background(app, chunk_rows=4) as running:
                    until(lambda: len(ops(source)) == 8)
                    (found,) = backfill.backfills(source)
                    until(lambda: backfill.backfills(source)[0].last_key == ["10"])
                    assert (found.state, backfill.backfills(source)[0].left_over) == ("open", 2)
                    # a writer that waits for nothing else goes on: the chunk holds no lock
                    writer.execute("UPDATE orders SET total = 0 WHERE number IN (2, 9)")
                    assert not running.done()
        # both have ended
        assert begin(source).state == "done"
    assert replica(source) == table(source)
    assert {key for key, op in ops(source) if op == "read"} == {
        str(number) for number in range(1, 11)
    }


def test_a_row_that_is_deleted_or_moved_while_it_is_left_over_is_not_sent(
    source: psycopg.Connection[Any], app: Dsn
) -> None:
    prepared(source, 4)
    with connect(app) as writer:
        with writer.transaction():
            writer.execute("DELETE FROM orders WHERE number = 2")
            writer.execute("UPDATE orders SET number = 30 WHERE number = 3")
            with in_background(app) as running:
                until(lambda: len(ops(source)) == 2)
                assert not running.done()
        assert begin(source).state == "done"
    assert replica(source) == table(source)
    assert {"1", "4"} <= {key for key, op in ops(source) if op == "read"} <= {"1", "4", "30"}


class Writers:
    """Sessions that change rows in every way, until they are stopped."""

    def __init__(self, app: Dsn, count: int = 3) -> None:
        self._app = app
        self._stopping = Event()
        self._threads = ThreadPoolExecutor(count)
        self._work = [self._threads.submit(self._change, seed) for seed in range(count)]

    def _change(self, seed: int) -> int:
        chance = random.Random(seed)
        changes = 0
        with connect(self._app) as connection:
            while not self._stopping.is_set():
                try:
                    with connection.transaction():
                        for _ in range(chance.randint(1, 3)):
                            self._once(connection, chance)
                        if chance.random() < 0.2:
                            raise psycopg.Rollback
                    changes += 1
                except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
                    continue
                time.sleep(chance.random() * 0.004)
        return changes

    def _once(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        number = chance.randint(1, ROWS_OF_KILLS)
        statement = chance.choice(
            (
                "UPDATE orders SET total = total + 1 WHERE number = %(number)s",
                "UPDATE orders SET status = 'b' WHERE number %% 50 = %(number)s %% 50",
                "DELETE FROM orders WHERE number = %(number)s",
                "UPDATE orders SET number = number + 10000 WHERE number = %(number)s",
                "UPDATE orders SET number = number - 10000 WHERE number = %(number)s + 10000",
                "SELECT FROM orders WHERE number = %(number)s FOR UPDATE",
                "INSERT INTO orders VALUES (%(number)s, 'up', 1) ON CONFLICT (number) "
                "DO UPDATE SET total = orders.total + 1",
            )
        )
        connection.execute(statement, {"number": number})

    def stop(self) -> int:
        self._stopping.set()
        changes = sum(done.result() for done in self._work)
        self._threads.shutdown()
        return changes


ROWS_OF_KILLS, KILLS = sized(1500, 4000), sized(12, 50)
END_HOLDERS = """
SELECT pg_terminate_backend(l.pid, 10000) FROM pg_locks l
WHERE l.locktype = 'advisory' AND l.pid <> pg_backend_pid()
"""
"""The server notices only after a while that a client was killed."""


@pytest.mark.slow
@every_postgresql
def test_a_replica_equals_the_table_after_kills_with_writers_at_work(
    source: psycopg.Connection[Any], app: Dsn
) -> None:
    prepared(source, ROWS_OF_KILLS)
    chance = random.Random(1)
    capture_ = named(source, "orders")
    begin(source, STOPPED, chunk_rows=3)
    writers = Writers(app)
    kills = 0

    def sent_more_than(before: int) -> bool:
        return backfill.backfills(source)[0].messages > before

    try:
        while kills < KILLS and backfill.open_backfill(source, capture_) is not None:
            before = backfill.backfills(source)[0].messages
            process = processes.start(run_in_process, app)
            until(partial(sent_more_than, before))
            time.sleep(chance.random() * 0.03)
            kills += process.exitcode is None
            process.kill()
            process.join()
            source.execute(END_HOLDERS)
        changes = writers.stop()
    finally:
        writers.stop()
    if backfill.open_backfill(source, capture_) is not None:
        assert begin(source, chunk_rows=1000).state == "done"
    assert kills == KILLS
    assert changes > 50
    (found,) = backfill.backfills(source)
    reads = [key for key, op in ops(source) if op == "read"]
    assert found.messages == len(reads)
    assert replica(source) == table(source)


def test_a_second_run_continues_where_the_first_was_stopped(
    source: psycopg.Connection[Any],
) -> None:
    prepared(source, 30)
    assert begin(source, STOPPED, chunk_rows=10).state == "stopped"
    calls = iter((False, False, True))
    first = backfill.run(source, named(source, "orders"), Wanted(), lambda: next(calls, True))
    assert (first.state, first.messages) == ("stopped", 10)
    second = begin(source)
    assert (second.state, second.messages, second.backfill.messages) == ("done", 20, 30)
    assert [key for key, _ in ops(source)] == [str(number) for number in range(1, 31)]
    assert begin(source).backfill.backfill_id != second.backfill.backfill_id


def test_a_second_run_at_the_same_time_is_refused_with_who_has_it(
    source: psycopg.Connection[Any], app: Dsn
) -> None:
    prepared(source, 100)
    with in_background(app, chunk_rows=1, rate="5/s") as running:
        until(lambda: ops(source))
        with pytest.raises(Unavailable, match=r"another session runs it: pid \d+ \(.*saf test"):
            begin(source)
        assert not running.done()
    assert running.result().state == "stopped"
    # other backfills are not affected by it
    assert begin(source, rate="100000/s").state == "done"


def test_a_pause_ends_the_run_and_a_resumed_one_continues(
    source: psycopg.Connection[Any], app: Dsn
) -> None:
    prepared(source, 100)
    with in_background(app, chunk_rows=1, rate="1/h") as running:
        until(lambda: ops(source))
        (found,) = backfill.backfills(source)
        backfill.pause(source, found)
        assert running.result(timeout=20).state == "paused"
    with pytest.raises(ConfigurationError, match=r"was paused by .* `saf backfill resume pub"):
        begin(source)
    backfill.resume(source, found)
    assert begin(source, rate="100000/s", chunk_rows=50).state == "done"
    assert [key for key, _ in ops(source)] == [str(number) for number in range(1, 101)]


def test_a_cancelled_backfill_ends_and_the_next_begins_with_the_first_row(
    source: psycopg.Connection[Any], app: Dsn
) -> None:
    prepared(source, 50)
    with in_background(app, chunk_rows=1, rate="5/s") as running:
        until(lambda: ops(source))
        backfill.cancel(source, backfill.backfills(source)[0])
        assert running.result(timeout=20).state == "cancelled"
    before = len(ops(source))
    assert begin(source).messages == 50
    assert len(ops(source)) == before + 50
    assert [found.state for found in backfill.backfills(source)] == ["cancelled", "done"]


def test_a_removed_capture_ends_its_backfill(source: psycopg.Connection[Any], app: Dsn) -> None:
    prepared(source, 50)
    with in_background(app, chunk_rows=1, rate="5/s") as running:
        until(lambda: ops(source))
        stored.remove(source, named(source, "orders"))
        assert running.result(timeout=20).state == "cancelled"
    assert backfill.backfills(source) == []


def test_an_open_backfill_keeps_its_where(source: psycopg.Connection[Any]) -> None:
    prepared(source, 10)
    begin(source, STOPPED, condition="total > 3")
    with pytest.raises(ConfigurationError, match="that is open has --where 'total > 3'"):
        begin(source, condition="total > 4")
    assert begin(source, condition=" total > 3 ").messages == 7


def test_a_rate_is_kept(source: psycopg.Connection[Any]) -> None:
    prepared(source, 120)
    started = time.monotonic()
    begin(source, rate="100/s")
    # half a second is allowed at once
    assert 0.6 < time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"rate": "fast"}, "--rate 'fast' is not a rate such as '100/s'"),
        ({"rate": "0/s"}, "is not a rate"),
        ({"chunk_rows": 0}, "--chunk 0: expected 1 to 100,000"),
    ],
)
def test_options_that_make_no_sense_are_refused(wanted: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Wanted(**wanted)


KEYS = """
CREATE TABLE orders (
    "a %" timestamptz, b text COLLATE "C", c double precision, number int,
    PRIMARY KEY ("a %", b, c));
INSERT INTO orders
SELECT '2026-03-29 00:00:00.123456+00'::timestamptz + n * interval '1 h', chr(64 + m),
       n / 3.0::double precision, n
FROM generate_series(1, 5) AS n, generate_series(1, 4) AS m;
"""


@every_postgresql
def test_a_primary_key_of_several_columns_is_walked_exactly(
    source: psycopg.Connection[Any],
) -> None:
    source.execute(KEYS)
    capture(source, key="number", columns=("number", "b"))
    source.execute("SET TimeZone = 'Europe/Berlin'; SET extra_float_digits = -15")
    assert begin(source, chunk_rows=3).messages == 20
    assert [(body["number"], body["b"]) for _, _, _, body in sent(source)] == [
        (number, letter) for number in range(1, 6) for letter in "ABCD"
    ]


def test_policies_hide_no_rows_from_a_backfill(source: psycopg.Connection[Any], app: Dsn) -> None:
    source.execute(ROWS.replace("{rows}", "3"))
    source.execute("CREATE ROLE keeper LOGIN")
    try:
        source.execute("ALTER TABLE orders ENABLE ROW LEVEL SECURITY")
        source.execute("CREATE POLICY few ON orders USING (number = 1)")
        source.execute(
            "GRANT ALL ON orders TO keeper; GRANT USAGE ON SCHEMA saf TO keeper; "
            "GRANT ALL ON ALL TABLES IN SCHEMA saf TO keeper; "
            "GRANT ALL ON ALL FUNCTIONS IN SCHEMA saf TO keeper"
        )
        capture(source)
        with (
            connect(as_user(app, "keeper")) as keeper,
            pytest.raises(ConfigurationError, match="row-level security policy"),
        ):
            begin(keeper)
        assert begin(source).messages == 3
    finally:
        source.execute("DROP OWNED BY keeper; DROP ROLE keeper")


def test_a_table_whose_capture_drifted_is_not_read(source: psycopg.Connection[Any]) -> None:
    prepared(source, 3)
    source.execute("ALTER TABLE orders DISABLE TRIGGER saf_capture_update")
    with pytest.raises(ConfigurationError, match="would be overtaken: table public"):
        begin(source)
    assert ops(source) == []
