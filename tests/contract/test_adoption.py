"""Adoptions: each row of an old outbox is one message, in order, whatever happens meanwhile."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Event
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from saf.capture import adoption, stored
from saf.capture.adoption import Adopted, Declared
from saf.capture.drift import drift
from saf.capture.fields import pairs
from saf.capture.layouts import completed
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, Unavailable, UsageError
from tests import processes
from tests.adoptions import (
    DEBEZIUM,
    EVENTS,
    MAP,
    MASSTRANSIT,
    MODES,
    MODULITH_1,
    MODULITH_2,
    PENDING,
    adopt,
    adopt_in_process,
    bodies,
    declared,
    sent,
    write,
)
from tests.captures import capture
from tests.pipeline import connect
from tests.roles import as_user, forbidden
from tests.tiers import sized
from tests.waits import blocked, until

every_postgresql = pytest.mark.every_postgresql
every_mode = pytest.mark.parametrize("mode", [*MODES])


@pytest.fixture
def events(source: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    source.execute(EVENTS)
    return source


def rows(connection: psycopg.Connection[Any]) -> list[tuple[str, bool]]:
    """Bodies of the rows that the table has, and whether they are marked."""
    return fetch(
        connection, "SELECT body #>> '{}', sent_at IS NOT NULL FROM outbox_events ORDER BY id"
    )


def differences(connection: psycopg.Connection[Any]) -> list[str]:
    (found,) = adoption.listed(connection)
    return [item.what for item in drift(connection, found)]


@every_postgresql
@every_mode
def test_old_rows_are_sent_once_and_new_ones_as_they_are_written(
    events: psycopg.Connection[Any], mode: str
) -> None:
    write(events, 1, 2)
    assert adopt(events, **MODES[mode]) == Adopted(outcome="added", messages=2)
    write(events, 3)
    with events.transaction(force_rollback=True):
        write(events, 4)
    write(events, 5)
    assert sent(events) == [
        ("k", "Placed", "billing", json.dumps(body)) for body in ("1", "2", "3", "5")
    ]
    left = {
        "keep": [(body, False) for body in ("1", "2", "3", "5")],
        "mark": [(body, True) for body in ("1", "2", "3", "5")],
    }
    assert rows(events) == left.get(mode, [])
    assert fetch(events, "SELECT DISTINCT headers FROM saf.outbox") == [
        ({"content-type": "application/json"},)
    ]
    assert adopt(events, **MODES[mode]) == Adopted(outcome="unchanged", messages=0)
    assert differences(events) == []


@every_mode
def test_rows_of_one_statement_are_sent_in_their_order(
    events: psycopg.Connection[Any], mode: str
) -> None:
    adopt(events, **MODES[mode])
    events.execute(
        "INSERT INTO outbox_events (topic, aggregateid, type, body) "
        "SELECT 'billing', n % 3, 'Placed', to_jsonb(n) FROM generate_series(1, 200) AS n"
    )
    with (
        events.cursor() as cursor,
        cursor.copy("COPY outbox_events (topic, aggregateid, type, body) FROM STDIN") as copy,
    ):
        for number in range(201, 401):
            copy.write_row(("billing", "k", "Placed", str(number)))
    assert bodies(events) == [str(number) for number in range(1, 401)]


def test_a_writer_notices_nothing_unless_rows_are_not_written(
    events: psycopg.Connection[Any],
) -> None:
    insert = "INSERT INTO outbox_events (topic, body) VALUES ('billing', '1') RETURNING id"
    adopt(events, rows="delete")
    done = events.execute(insert)
    assert (done.rowcount, len(done.fetchall())) == (1, 1)
    stored.remove(events, adoption.listed(events)[0])
    adopt(events, rows="instead")
    done = events.execute(insert)
    assert (done.rowcount, done.fetchall()) == (0, [])
    assert len(sent(events)) == 2
    assert rows(events) == []


def test_rows_that_do_not_match_are_neither_sent_nor_touched(
    events: psycopg.Connection[Any],
) -> None:
    where = "type <> 'Draft' -- 100%"
    for mode in ("delete", "instead"):
        events.execute(
            "INSERT INTO outbox_events (topic, type, body) VALUES ('b', 'Draft', '1'), "
            "('b', 'Placed', '2')"
        )
        assert adopt(events, rows=mode, condition=where).messages == 1
        events.execute(
            "INSERT INTO outbox_events (topic, type, body) VALUES ('b', 'Draft', '3'), "
            "('b', 'Placed', '4'), ('b', 'Draft', '5')"
        )
        assert bodies(events)[-2:] == ["2", "4"]
        stored.remove(events, adoption.listed(events)[0])
    assert [body for body, _ in rows(events)] == ["1", "3", "5"] * 2


def test_old_rows_are_sent_in_the_order_of_a_column(events: psycopg.Connection[Any]) -> None:
    events.execute("ALTER TABLE outbox_events ADD created_at timestamptz")
    events.execute(
        "INSERT INTO outbox_events (topic, body, created_at) "
        "SELECT 'billing', to_jsonb(n), now() - n * interval '1 s' FROM generate_series(1, 9) AS n"
    )
    adopt(events, order="created_at", rows="delete")
    assert bodies(events) == [str(number) for number in range(9, 0, -1)]


@every_mode
def test_a_row_that_is_not_committed_when_a_table_is_adopted_is_sent_once(
    events: psycopg.Connection[Any], app: Dsn, mode: str
) -> None:
    def work() -> Adopted:
        with connect(app) as connection:
            return adopt(connection, **MODES[mode])

    with connect(app) as writer, ThreadPoolExecutor(1) as thread:
        writer.execute("BEGIN")
        write(writer, "old")
        running = thread.submit(work)
        until(lambda: waiting(events))
        writer.execute("COMMIT")
        write(writer, "new")
        assert running.result(timeout=20).messages == 1
    assert bodies(events) == ['"old"', '"new"']


def waiting(connection: psycopg.Connection[Any]) -> bool:
    """Whether a session waits for a lock of the table."""
    return bool(
        fetch(
            connection,
            "SELECT FROM pg_locks WHERE NOT granted AND relation = 'outbox_events'::regclass",
        )
    )


def test_a_table_that_is_locked_is_not_waited_for(
    events: psycopg.Connection[Any], app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "LOCK_SECONDS", 0.3)
    write(events, 1, 2)
    with connect(app) as writer, writer.transaction():
        write(writer, 3)
        with pytest.raises(Unavailable, match=r"had it locked for 0\.3 s"):
            adopt(events, rows="delete")
    # those that were there are sent; the others follow
    assert bodies(events) == ['"1"', '"2"']
    assert adoption.listed(events) == []
    assert adopt(events, rows="delete").messages == 1
    assert bodies(events) == ['"1"', '"2"', '"3"']


def test_old_rows_that_would_stop_writers_for_too_long_are_refused(
    events: psycopg.Connection[Any],
) -> None:
    events.execute(
        "INSERT INTO outbox_events (topic, body) "
        "SELECT 'billing', to_jsonb(n) FROM generate_series(1, 3000) AS n"
    )
    with pytest.raises(
        ConfigurationError, match=r"could not be sent within 0\.001 s, while its wri"
    ):
        adopt(events, hold_seconds=0.001)
    assert sent(events) == []
    assert adoption.listed(events) == []
    assert fetch(events, "SELECT FROM pg_trigger WHERE tgname LIKE 'saf%%'") == []
    assert adopt(events).messages == 3000


def test_most_old_rows_are_sent_before_writers_wait(
    events: psycopg.Connection[Any], app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "CHUNK_ROWS", 10)
    write(events, *range(25))
    review = adoption.review(events, declared(rows="delete"))
    with connect(app) as writer, writer.transaction():
        write(writer, 25)
        assert adoption.take(events, review) == 25
        assert fetch(events, "SELECT count(DISTINCT txid) FROM saf.outbox") == [(3,)]
    assert adoption.put(events, review).messages == 1
    assert bodies(events) == [json.dumps(str(number)) for number in range(26)]


RELAY = """
DELETE FROM outbox_events WHERE id IN (
    SELECT id FROM outbox_events ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING body #>> '{}'
"""


def test_a_relay_that_locks_its_rows_may_run_meanwhile(
    events: psycopg.Connection[Any], app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "CHUNK_ROWS", 5)
    write(events, *range(300))
    stopping = Event()

    def relay() -> list[str]:
        found: list[str] = []
        with connect(app) as connection:
            while not stopping.is_set():
                with connection.transaction():
                    found += [body for (body,) in fetch(connection, RELAY)]
                    time.sleep(0.002)
        return found

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(relay)
        try:
            until(lambda: len(rows(events)) < 290)
            adopt(events, rows="delete")
            write(events, *range(300, 320))
        finally:
            stopping.set()
        relayed = running.result()
    assert len(relayed) > 10
    here = [json.loads(body) for body in bodies(events)]
    assert sorted([*relayed, *here], key=int) == [str(number) for number in range(320)]


def test_a_relay_that_has_a_row_in_hand_is_waited_for(
    events: psycopg.Connection[Any], app: Dsn
) -> None:
    write(events, 1, 2)

    def work() -> Adopted:
        with connect(app) as connection:
            return adopt(connection, **PENDING)

    with connect(app) as relay, ThreadPoolExecutor(1) as thread:
        with relay.transaction():
            relay.execute("SELECT FROM outbox_events WHERE body = '\"1\"' FOR UPDATE SKIP LOCKED")
            running = thread.submit(work)
            until(lambda: blocked(events))
            relay.execute("UPDATE outbox_events SET sent_at = now() WHERE body = '\"1\"'")
        assert running.result(timeout=20).messages == 1
    assert bodies(events) == ['"2"']


def test_a_mark_that_leaves_rows_pending_is_refused(events: psycopg.Connection[Any]) -> None:
    write(events, 1)
    with pytest.raises(ConfigurationError, match="is still true for rows that --mark has marked"):
        adopt(events, condition="sent_at IS NULL", rows="mark", mark={"type": "'sent'"})
    assert (sent(events), rows(events)) == ([], [("1", False)])


class Writers:
    """Sessions that write rows of keys, each key under a lock, until they are stopped."""

    KEYS = 5

    def __init__(self, app: Dsn, old: int, count: int = 3) -> None:
        with connect(app) as connection:
            connection.execute("CREATE TABLE keys (key int PRIMARY KEY, written int)")
            connection.execute(
                "INSERT INTO keys SELECT n, %s FROM generate_series(1, %s) AS n", (old, self.KEYS)
            )
            connection.execute(
                "INSERT INTO outbox_events (topic, aggregateid, type, body) "
                "SELECT 'billing', key, 'Placed', to_jsonb(n::text) "
                "FROM generate_series(1, %s) AS n, generate_series(1, %s) AS key ORDER BY n, key",
                (old, self.KEYS),
            )
        self._app = app
        self._stopping = Event()
        self._threads = ThreadPoolExecutor(count)
        self._work = [self._threads.submit(self._write, seed) for seed in range(count)]

    def _write(self, seed: int) -> None:
        chance = random.Random(seed)
        with connect(self._app) as connection:
            while not self._stopping.is_set():
                with connection.transaction(force_rollback=chance.random() < 0.2):
                    key = chance.randint(1, self.KEYS)
                    for _ in range(chance.randint(1, 3)):
                        ((number,),) = fetch(
                            connection,
                            "UPDATE keys SET written = written + 1 WHERE key = %(key)s "
                            "RETURNING written",
                            {"key": key},
                        )
                        write(connection, number, key=str(key))
                time.sleep(chance.random() * 0.004)

    def stop(self) -> None:
        self._stopping.set()
        for done in self._work:
            done.result()
        self._threads.shutdown()


KILLS, OLD = sized(5, 40), sized(300, 2000)


@pytest.mark.slow
@every_postgresql
@every_mode
def test_each_row_is_one_message_in_order_after_kills_with_writers_at_work(
    events: psycopg.Connection[Any], app: Dsn, mode: str
) -> None:
    chance = random.Random(mode)
    writers = Writers(app, OLD)
    kills = 0
    try:
        while kills < KILLS and not adoption.listed(events):
            before = len(sent(events))
            process = processes.start(adopt_in_process, app, mode)
            if mode == "keep":
                time.sleep(chance.random() * 0.2)
            else:
                until(lambda before=before: len(sent(events)) > before)  # type: ignore[misc]
                time.sleep(chance.random() * 0.05)
            kills += process.exitcode is None
            process.kill()
            process.join()
        adopt(events, **MODES[mode])
        before = len(sent(events))
        until(lambda: len(sent(events)) > before + 100)
    finally:
        writers.stop()
    assert kills > 0
    found: dict[str, list[int]] = defaultdict(list)
    for key, _, _, body in sent(events):
        found[key].append(int(json.loads(body)))
    written = dict(fetch(events, "SELECT key::text, written FROM keys"))
    assert found == {key: [*range(1, last + 1)] for key, last in written.items()}
    if mode == "keep":
        assert len(rows(events)) == sum(written.values())
    elif mode == "mark":
        assert all(marked for _, marked in rows(events))
    else:
        assert rows(events) == []


def test_the_way_back_leaves_to_the_old_relay_what_saf_has_not_sent(
    events: psycopg.Connection[Any],
) -> None:
    for mode in ("mark", "delete", "instead"):
        write(events, f"{mode} old")
        adopt(events, **MODES[mode])
        write(events, f"{mode} new")
        stored.remove(events, adoption.listed(events)[0])
        write(events, f"{mode} after")
        pending = [body for body, marked in rows(events) if not marked]
        assert pending == [f"{mode} after"]
        events.execute("DELETE FROM outbox_events")
    assert len(sent(events)) == 6
    assert fetch(events, "SELECT FROM pg_proc WHERE proname LIKE 'capture\\_%%'") == []


def test_existing_rows_may_be_left_to_the_old_relay(events: psycopg.Connection[Any]) -> None:
    for mode in MODES:
        write(events, "old")
        assert adopt(events, **{**MODES[mode], "old": False}).messages == 0
        write(events, mode)
        assert ("old", False) in rows(events)
        stored.remove(events, adoption.listed(events)[0])
        events.execute("DELETE FROM outbox_events")
    assert bodies(events) == [json.dumps(mode) for mode in MODES]


def test_rows_that_were_missed_are_sent_when_a_table_is_adopted_again(
    events: psycopg.Connection[Any],
) -> None:
    adopt(events, rows="delete")
    events.execute("ALTER TABLE outbox_events DISABLE TRIGGER saf_capture_insert")
    write(events, "missed")
    assert differences(events) == [
        "table public.outbox_events: trigger saf_capture_insert is disabled"
    ]
    assert adopt(events, rows="delete") == Adopted(outcome="changed", messages=1)
    assert (bodies(events), rows(events), differences(events)) == (['"missed"'], [], [])
    events.execute("ALTER TABLE outbox_events RENAME body TO content")
    assert "column 'body' of table public.outbox_events was dropped or renamed" in str(
        differences(events)
    )
    with pytest.raises(psycopg.errors.UndefinedColumn):
        events.execute("INSERT INTO outbox_events (topic) VALUES ('billing')")
    adopt(events, rows="delete", fields={**MAP, "body": "content"})
    assert differences(events) == []


def test_rows_that_are_kept_are_not_sent_again(events: psycopg.Connection[Any]) -> None:
    write(events, 1)
    adopt(events)
    assert adopt(events, condition="topic <> ''") == Adopted(outcome="changed", messages=0)
    assert len(sent(events)) == 1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"rows": "delete"}, "is adopted with --keep, and rows that it has were sent"),
        ({"condition": "sent_at", "rows": None}, "--where 'sent_at': expected a condition"),
    ],
)
def test_a_change_that_could_send_rows_twice_is_refused(
    events: psycopg.Connection[Any], given: dict[str, Any], problem: str
) -> None:
    write(events, 1)
    adopt(events)
    with pytest.raises(ConfigurationError, match=problem):
        adopt(events, **given)
    assert len(sent(events)) == 1


def test_a_table_is_captured_or_adopted_and_not_both(events: psycopg.Connection[Any]) -> None:
    adopt(events)
    with pytest.raises(ConfigurationError, match="is adopted, so its rows are messages already"):
        capture(events, "outbox_events")
    stored.remove(events, adoption.listed(events)[0])
    capture(events, "outbox_events")
    with pytest.raises(ConfigurationError, match="is captured, so its rows would be sent twice"):
        adopt(events)
    assert (adoption.listed(events), len(stored.listed(events))) == ([], 1)


VALUES = """
CREATE TABLE box (
    id bigint PRIMARY KEY, message uuid, name text, key numeric, kind varchar(20), about {headers},
    content {body}, due timestamptz, ends timestamp)
"""
EACH = {
    "message_id": "message",
    "to_service": "name",
    "key": "key",
    "message_type": "kind",
    "headers": "about",
    "body": "content",
    "deliver_at": "due",
    "expires_at": "ends",
}
MESSAGE = UUID(int=7)
STORED = (
    "SELECT message_id, key, message_type, headers, body, deliver_at, expires_at FROM saf.outbox"
)
DAY = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)


@every_postgresql
@pytest.mark.parametrize(
    ("types", "value", "body", "content_type"),
    [
        (("jsonb", "jsonb"), '{"a": "é"}', '{"a": "é"}'.encode(), "application/json"),
        (("json", "json"), '{"a":1e400000}', b'{"a":1e400000}', "application/json"),
        (("text", "text"), "é", "é".encode(), "text/plain; charset=utf-8"),
        (("text", "bytea"), b"\x00\xff", b"\x00\xff", "application/octet-stream"),
        (("jsonb", "varchar(5)"), None, b"", "text/plain; charset=utf-8"),
    ],
)
def test_values_become_the_fields_of_messages(
    source: psycopg.Connection[Any],
    types: tuple[str, str],
    value: object,
    body: bytes,
    content_type: str,
) -> None:
    source.execute(VALUES.format(headers=types[0], body=types[1]))
    row = (1, MESSAGE, "billing", "1.50", "Placed", '{"trace": "x", "SAF-Whole": 1}', value)
    insert = "INSERT INTO box VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)"
    source.execute("SET TimeZone = 'America/New_York'")
    source.execute(insert, (*row, DAY, DAY.replace(tzinfo=None)))
    adopt(source, table="box", fields=EACH, rows="delete")
    source.execute(insert, (*row, DAY, DAY.replace(tzinfo=None)))
    source.execute(insert, (2, None, "billing", *[None] * 4, None, None))
    headers = {"content-type": content_type, "trace": "x"}
    first, second, third = fetch(source, STORED)
    assert first == second == (MESSAGE, "1.50", "Placed", headers, body, DAY, DAY)
    assert third[1:] == (None, None, {"content-type": content_type}, b"", None, None)
    assert third[0] != MESSAGE


def test_expressions_and_constants_become_fields(events: psycopg.Connection[Any]) -> None:
    fields = {
        "to_service": "(lower(topic) || '/' || coalesce(type, 'x'))",
        "body": "(jsonb_build_object('n', body))",
        "headers": "(jsonb_build_object('Content-Type', 'a/b', 'id', id))",
        "content_type": "('c/d')",
    }
    adopt(events, fields=fields, message_type="it's", from_service="%s $saf$")
    events.execute("INSERT INTO outbox_events (id, topic, body) VALUES (9, 'Shop', '1')")
    assert fetch(
        events,
        "SELECT to_service, message_type, from_service, headers, convert_from(body, 'UTF8') "
        "FROM saf.outbox",
    ) == [("shop/x", "it's", "%s $saf$", {"content-type": "a/b", "id": 9}, '{"n": 1}')]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"table": "nothing"}, "no table 'nothing'"),
        ({"table": "saf.outbox"}, "does not belong to the application"),
        ({"fields": {"to_service": "topic"}}, "no body: give its column"),
        ({"fields": {"body": "body"}}, "no service: give --service"),
        ({"service": "s"}, "--service and --map …=to_service: give one of them"),
        ({"fields": {**MAP, "key": "agregateid"}}, r"did you mean 'aggregateid'\?"),
        ({"fields": {**MAP, "message_id": "id"}}, "its type is int8, expected uuid"),
        (
            {"fields": {**MAP, "body": "id"}},
            "its type is int8, expected text, json, jsonb or bytea",
        ),
        ({"fields": {**MAP, "key": "(count(*))"}}, "aggregate functions are not allowed"),
        ({"fields": {**MAP, "key": "(generate_series(1, 2))"}}, "set-returning functions are not"),
        (
            {"fields": {**MAP, "key": "(1); DROP TABLE outbox_events; SELECT (1)"}},
            "syntax error",
        ),
        ({"condition": "true); DELETE FROM outbox_events; SELECT (true"}, "syntax error at"),
        ({"condition": "topik = 'a'"}, 'column "topik" does not exist'),
        ({"rows": "mark", "mark": {"sent_at": "now()"}}, "--mark needs --where"),
        ({"rows": "mark"}, "rows are marked by --mark COLUMN=SQL"),
        ({**PENDING, "mark": {"sent": "now()"}}, "--mark 'sent': no column"),
        ({**PENDING, "mark": {"sent_at": "now(), type = 'x'"}}, "pseudo-type record"),
        ({**PENDING, "mark": {"sent_at": "'x'"}}, "cannot be adopted so"),
        ({"order": "sentat"}, r"did you mean 'sent_at'\?"),
        ({"service": "", "fields": {"body": "body"}}, "service: is empty"),
    ],
)
def test_a_declaration_that_would_fail_at_the_first_row_is_refused(
    events: psycopg.Connection[Any], given: dict[str, Any], problem: str
) -> None:
    write(events, 1)
    with pytest.raises(UsageError, match=problem):
        adopt(events, **given)
    assert (sent(events), len(rows(events)), adoption.listed(events)) == ([], 1, [])


def test_a_primary_key_that_has_no_order_needs_a_column_that_has_one(
    source: psycopg.Connection[Any],
) -> None:
    source.execute("CREATE TABLE box (id uuid PRIMARY KEY, body text, at timestamptz)")
    given: dict[str, Any] = {"table": "box", "fields": {"body": "body"}, "service": "s"}
    with pytest.raises(ConfigurationError, match="does not tell in which order rows were written"):
        adopt(source, **given)
    adopt(source, **given, old=False)
    stored.remove(source, adoption.listed(source)[0])
    adopt(source, **given, order="at")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("topic", "expected COLUMN=FIELD"),
        ("topic=service", r"did you mean"),
        ("topic=key,body=key", "'key' appears twice"),
        ("=key", "expected COLUMN=FIELD"),
    ],
)
def test_pairs_that_are_none_are_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        pairs(text)


@every_mode
def test_a_value_that_saf_refuses_fails_the_writers_statement(
    events: psycopg.Connection[Any], mode: str
) -> None:
    adopt(events, **MODES[mode])
    with pytest.raises(psycopg.errors.NotNullViolation):
        events.execute("INSERT INTO outbox_events (body) VALUES ('1')")
    with pytest.raises(psycopg.errors.CheckViolation):
        events.execute(
            "INSERT INTO outbox_events (topic, aggregateid, body) "
            "VALUES ('billing', repeat('x', 1025), '1')"
        )
    assert (sent(events), rows(events)) == ([], [])


@every_mode
@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ("NULL, 'k', 'x', '\"secret\"'", "with id 2 of .*to_service is null"),
        ("repeat('x', 256), 'k', 'x', '\"secret\"'", "with id 2 .* 256 bytes, not 1 to 255"),
        ("'s', repeat('x', 1025), 'x', '\"secret\"'", "with id 2 .*key has 1025 bytes"),
    ],
)
def test_an_old_row_that_saf_refuses_is_named_and_not_shown(
    events: psycopg.Connection[Any], mode: str, values: str, problem: str
) -> None:
    write(events, 1)
    events.execute(f"INSERT INTO outbox_events (topic, aggregateid, type, body) VALUES ({values})")
    with pytest.raises(ConfigurationError, match=problem) as why:
        adopt(events, **MODES[mode])
    assert "secret" not in str(why.value)
    assert (sent(events), len(rows(events)), adoption.listed(events)) == ([], 2, [])


def test_an_error_of_an_expression_shows_no_value_of_a_row(
    events: psycopg.Connection[Any],
) -> None:
    write(events, "secret")
    with pytest.raises(ConfigurationError, match="InvalidTextRepresentation") as why:
        adopt(events, fields={**MAP, "key": "((body #>> '{}')::int)"})
    assert "secret" not in str(why.value)


PARTITIONED = """
CREATE TABLE outbox_events (
    id bigint, topic text, aggregateid text, type text, body jsonb, sent_at timestamptz,
    PRIMARY KEY (id, topic)) PARTITION BY LIST (topic);
CREATE TABLE outbox_eu PARTITION OF outbox_events FOR VALUES IN ('eu');
CREATE TABLE outbox_us PARTITION OF outbox_events FOR VALUES IN ('us');
"""


@every_postgresql
@every_mode
def test_rows_of_partitions_are_sent_whatever_table_the_statement_names(
    source: psycopg.Connection[Any], mode: str
) -> None:
    source.execute(PARTITIONED)
    source.execute(
        "INSERT INTO outbox_events (id, topic, body) VALUES (2, 'eu', '1'), (1, 'us', '2')"
    )
    adopt(source, **MODES[mode], order="id")
    source.execute(
        "INSERT INTO outbox_events (id, topic, body) VALUES (3, 'us', '3'), (4, 'eu', '4')"
    )
    source.execute("INSERT INTO outbox_eu (id, topic, body) VALUES (5, 'eu', '5')")
    assert bodies(source) == ["2", "1", "3", "4", "5"]
    assert differences(source) == []
    assert len(rows(source)) == (5 if mode in ("keep", "mark") else 0)


HOSTILE = 'we"ird, %s = {x} $saf$'


@every_mode
def test_names_with_any_characters_are_names(source: psycopg.Connection[Any], mode: str) -> None:
    name = sql.Identifier(HOSTILE, HOSTILE)
    column, marked = sql.Identifier(HOSTILE), sql.Identifier(f"{HOSTILE}2")
    source.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(HOSTILE)))
    source.execute(
        sql.SQL("CREATE TABLE {} (id int, {} text, {} text, PRIMARY KEY (id, {}))").format(
            name, column, marked, column
        )
    )
    insert = sql.SQL("INSERT INTO {} VALUES ({}, {})")
    source.execute(insert.format(name, 1, "a'b"))
    given: dict[str, Any] = {
        "table": name.as_string(source),
        "fields": pairs(f"{HOSTILE}=key,id=to_service,{HOSTILE}=body"),
        "order": "id",
        "message_type": "{t} %s '$saf$",
    }
    if mode == "mark":
        unmarked = sql.SQL("{} IS NULL").format(marked).as_string(source)
        given |= {"condition": unmarked, "mark": {f"{HOSTILE}2": "'%s {x} $saf$'"}}
    adopt(source, **given, rows=mode)
    source.execute(insert.format(name, 2, "c%"))
    assert sent(source) == [
        ("a'b", "{t} %s '$saf$", "1", "a'b"), ("c%", "{t} %s '$saf$", "2", "c%"),
    ]  # fmt: skip
    assert differences(source) == []
    stored.remove(source, adoption.listed(source)[0])


@every_mode
def test_writers_need_no_right_in_schema_saf_and_get_none(
    events: psycopg.Connection[Any], app: Dsn, mode: str
) -> None:
    events.execute("CREATE ROLE app_writer LOGIN")
    try:
        events.execute("GRANT INSERT ON outbox_events TO app_writer")
        events.execute("GRANT CREATE ON SCHEMA public TO app_writer")
        adopt(events, **MODES[mode])
        function = sql.Identifier("saf", adoption.listed(events)[0].function)
        with connect(as_user(app, "app_writer")) as writer:
            # its own operator comes first in its path, but not in the function's
            writer.execute(
                "CREATE FUNCTION public.yes(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS $$ "
                "BEGIN RAISE EXCEPTION 'as %', current_user; END $$; "
                "CREATE OPERATOR public.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = yes); "
                "SET search_path = public, pg_catalog"
            )
            write(writer, 1)
            assert forbidden(writer, "SELECT FROM saf.outbox")
            assert forbidden(writer, "DELETE FROM outbox_events")
            events.execute("GRANT USAGE ON SCHEMA saf TO app_writer")
            assert forbidden(writer, sql.SQL("SELECT {}()").format(function))
        assert bodies(events) == ['"1"']
    finally:
        events.execute("DROP OWNED BY app_writer; DROP ROLE app_writer")


def test_what_an_adoption_calls_may_not_be_changed_by_others(
    events: psycopg.Connection[Any],
) -> None:
    events.execute("CREATE ROLE stranger")
    try:
        events.execute(
            "CREATE FUNCTION public.odd(text) RETURNS text LANGUAGE sql AS 'SELECT $1'; "
            "CREATE TYPE odd AS (a int); CREATE FUNCTION public.odd_text(odd) RETURNS text "
            "LANGUAGE sql AS $$ SELECT 'x'::text $$; "
            "CREATE CAST (odd AS text) WITH FUNCTION public.odd_text(odd); "
            "ALTER TABLE outbox_events ADD odd odd; "
            "ALTER FUNCTION public.odd OWNER TO stranger; "
            "ALTER FUNCTION public.odd_text OWNER TO stranger"
        )
        for given in (
            {"fields": {**MAP, "key": "(public.odd(topic))"}},
            {"condition": "public.odd(topic) = 'x'"},
            {**PENDING, "mark": {"sent_at": "now()", "type": "public.odd(type)"}},
            {"fields": {**MAP, "key": "odd"}},
        ):
            with pytest.raises(
                ConfigurationError, match=r"calls public\.odd.*'stranger' may change"
            ):
                adopt(events, **given)
    finally:
        events.execute("DROP CAST (odd AS text)")
        events.execute("DROP OWNED BY stranger CASCADE; DROP ROLE stranger")


def test_the_owner_of_the_schema_needs_the_rights_that_the_trigger_uses(
    events: psycopg.Connection[Any],
) -> None:
    events.execute("CREATE ROLE saf_owner")
    try:
        events.execute("ALTER TABLE saf.outbox OWNER TO saf_owner")
        events.execute(
            "GRANT USAGE ON SCHEMA saf TO saf_owner; "
            "GRANT ALL ON ALL FUNCTIONS IN SCHEMA saf TO saf_owner"
        )
        adopt(events)
        stored.remove(events, adoption.listed(events)[0])
        for given, right in ((PENDING, "UPDATE"), ({"rows": "delete"}, "DELETE")):
            for needed in ("SELECT", right):
                with pytest.raises(
                    ConfigurationError, match=f"GRANT {needed} ON public.outbox_events TO .saf_ow"
                ):
                    adopt(events, **given)
                events.execute(f"GRANT {needed} ON outbox_events TO saf_owner")
            adopt(events, **given)
            write(events, right)
            stored.remove(events, adoption.listed(events)[0])
            events.execute("REVOKE ALL ON outbox_events FROM saf_owner")
            events.execute("DELETE FROM outbox_events")
        assert bodies(events) == ['"UPDATE"', '"DELETE"']
        events.execute("GRANT ALL ON outbox_events TO saf_owner")
        events.execute("ALTER TABLE outbox_events ENABLE ROW LEVEL SECURITY")
        with pytest.raises(ConfigurationError, match="hides rows from 'saf_owner'"):
            adopt(events, rows="delete")
    finally:
        events.execute("REASSIGN OWNED BY saf_owner TO CURRENT_USER")
        events.execute("DROP OWNED BY saf_owner; DROP ROLE saf_owner")


def test_rows_that_are_not_written_need_values_that_exist_before(
    events: psycopg.Connection[Any],
) -> None:
    events.execute(
        "ALTER TABLE outbox_events ADD low text GENERATED ALWAYS AS (lower(topic)) STORED"
    )
    with pytest.raises(ConfigurationError, match="'low' is a generated column"):
        adopt(events, rows="instead", fields={**MAP, "to_service": "low"})
    adopt(events, rows="delete", fields={**MAP, "to_service": "low"})
    stored.remove(events, adoption.listed(events)[0])
    events.execute(
        "CREATE FUNCTION z() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NEW.topic = 'z'; RETURN NEW; END $$; CREATE TRIGGER z BEFORE INSERT "
        "ON outbox_events FOR EACH ROW EXECUTE FUNCTION z()"
    )
    with pytest.raises(ConfigurationError, match=r"trigger 'z' of table .* fires after saf's"):
        adopt(events, rows="instead")
    events.execute("ALTER TRIGGER z ON outbox_events RENAME TO a")
    adopt(events, rows="instead")
    write(events, 1)
    assert [service for _, _, service, _ in sent(events)] == ["z"]


@contextmanager
def debezium_rows(connection: psycopg.Connection[Any]) -> Iterator[Any]:
    connection.execute(DEBEZIUM)
    yield lambda number, payload: connection.execute(
        "INSERT INTO outbox VALUES (%s, 'billing', 'A-1', 'Placed', %s)",
        (UUID(int=number), payload),
    )


@every_postgresql
def test_debeziums_rows_become_messages(source: psycopg.Connection[Any]) -> None:
    with debezium_rows(source) as insert:
        insert(1, '{"n": 1}')
        with pytest.raises(ConfigurationError, match="add --new-only, so that it sends the exist"):
            adopt(source, "debezium", table="outbox", fields={})
        adopt(source, "debezium", table="outbox", fields={}, rows="instead", old=False)
        insert(2, '{"n": 2}')
        insert(3, None)
    assert fetch(source, "SELECT count(*) FROM outbox") == [(1,)]
    assert sent(source) == [
        ("A-1", "Placed", "billing", '{"n": 2}'), ("A-1", "Placed", "billing", ""),
    ]  # fmt: skip
    assert fetch(source, "SELECT message_id, headers FROM saf.outbox LIMIT 1") == [
        (UUID(int=2), {"content-type": "application/json"})
    ]


def test_a_row_that_its_writer_deletes_at_once_is_sent(source: psycopg.Connection[Any]) -> None:
    with debezium_rows(source) as insert:
        adopt(source, "debezium", table="outbox", fields={}, old=False)
        with source.transaction():
            insert(1, '{"n": 1}')
            assert source.execute("DELETE FROM outbox").rowcount == 1
    assert bodies(source) == ['{"n": 1}']


PUBLISH = """
INSERT INTO event_publication (id, listener_id, event_type, serialized_event, publication_date,
                               completion_date)
VALUES (gen_random_uuid(), %s, 'shop.Placed', %s, now(), %s)
"""


@every_postgresql
@pytest.mark.parametrize("table", [MODULITH_1, MODULITH_2])
def test_modulith_publications_become_messages_and_are_completed(
    source: psycopg.Connection[Any], table: str
) -> None:
    source.execute(table)
    for listener, event, completed_at in (
        ("shop.Out", '{"n":1}', None),
        ("shop.Out", '{"n":2}', DAY),
        ("shop.Other", '{"n":3}', None),
    ):
        source.execute(PUBLISH, (listener, event, completed_at))
    where = "completion_date IS NULL AND listener_id = 'shop.Out'"
    key = {"key": "(serialized_event::jsonb ->> 'n')"}
    given: dict[str, Any] = {"table": "event_publication", "fields": key, "service": "billing"}
    assert adopt(source, "modulith", **given, condition=where).messages == 1
    source.execute(PUBLISH, ("shop.Out", '{"n":4}', None))
    assert sent(source) == [
        (number, "shop.Placed", "billing", f'{{"n":{number}}}') for number in ("1", "4")
    ]
    pending = "SELECT listener_id FROM event_publication WHERE completion_date IS NULL"
    assert fetch(source, pending) == [("shop.Other",)]
    if table is MODULITH_2:
        assert fetch(
            source,
            "SELECT status, count(*) FROM event_publication GROUP BY 1 ORDER BY 1 NULLS LAST",
        ) == [("COMPLETED", 2), (None, 2)]


SEND = """
INSERT INTO "OutboxMessage" (
    "SentTime", "Headers", "OutboxId", "MessageId", "ContentType", "MessageType", "Body",
    "ConversationId", "ExpirationTime")
VALUES (now(), %s, %s, %s, 'application/vnd.masstransit+json',
        'urn:message:Shop:OrderPlaced;urn:message:Shop:IOrder', %s, %s, %s)
RETURNING "SequenceNumber"
"""


@every_postgresql
def test_masstransits_rows_become_messages_and_are_gone(source: psycopg.Connection[Any]) -> None:
    source.execute(MASSTRANSIT)
    outbox_id, conversation = UUID(int=1), UUID(int=2)
    source.execute(
        'INSERT INTO "OutboxState" VALUES (%s, %s, NULL, now())', (outbox_id, UUID(int=9))
    )

    def insert(number: int, headers: str | None) -> list[tuple[Any, ...]]:
        values = (headers, outbox_id, UUID(int=number), f'{{"n":{number}}}', conversation, DAY)
        return source.execute(SEND, values).fetchall()

    insert(11, '{"trace": "a"}')
    given: dict[str, Any] = {"table": '"OutboxMessage"', "fields": {}, "service": "billing"}
    assert adopt(source, "masstransit", **given).messages == 1
    # Entity Framework reads the number back
    assert insert(12, "") == [(2,)]
    insert(13, None)
    assert sent(source) == [
        (str(conversation), "urn:message:Shop:OrderPlaced", "billing", f'{{"n":{number}}}')
        for number in (11, 12, 13)
    ]
    content = {"content-type": "application/vnd.masstransit+json"}
    assert fetch(source, "SELECT message_id, headers, expires_at FROM saf.outbox ORDER BY id") == [
        (UUID(int=11), {**content, "trace": "a"}, DAY),
        (UUID(int=12), content, DAY),
        (UUID(int=13), content, DAY),
    ]
    assert fetch(source, 'SELECT count(*) FROM "OutboxMessage"') == [(0,)]


def test_a_layout_finds_columns_of_other_spelling_and_what_is_declared_takes_precedence(
    source: psycopg.Connection[Any],
) -> None:
    source.execute(
        'CREATE TABLE box (id uuid PRIMARY KEY, aggregate_type text, "AggregateId" text, '
        "type text, payload text, at timestamptz)"
    )
    given = Declared(table="box", fields={"key": "type"}, service="s", condition="true", order="at")
    found = completed(source, given, "debezium")
    assert found.fields == {
        "message_id": "id",
        "key": "type",
        "message_type": "type",
        "content_type": "('application/json')",
        "body": "payload",
    }
    assert (found.rows, found.order, found.condition) == ("keep", "at", "true")
    source.execute("ALTER TABLE box DROP payload")
    with pytest.raises(ConfigurationError, match="no column 'payload', only id, aggregate_type"):
        completed(source, given, "debezium")
