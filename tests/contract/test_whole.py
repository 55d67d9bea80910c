"""What other tools do to a broker is refused by name: rows gone or hidden, publications."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql

import saf
from saf import Message, Outbox
from saf.broker import whole
from saf.broker.grants import Kind, grant
from saf.broker.senders import add_senders, remove_senders
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.database.sqlstates import Meaning, meaning, translated
from saf.destinations.postgresql import known_at
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.errors import ConfigurationError, RowsGone, UsageError
from saf.operating.maintenance import purge_broker
from saf.operating.repair.rebase import rebase
from saf.routing.routes import add_route
from tests.pipeline import Cycle, bodies, connect, drain, forward, forwarding_rules, run, send
from tests.programs import ROOT, configuration
from tests.programs import saf as run_saf
from tests.roles import as_user

every_postgresql = pytest.mark.every_postgresql


def execute(dsn: Dsn, *statements: str) -> None:
    with connect(dsn) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def send_ten(app: Dsn) -> list[str]:
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key=str(number))
    return [str(number) for number in range(10)]


@pytest.fixture
def login(app: Dsn, mom: Dsn) -> Iterator[str]:
    """A role that forwards and receives, and is neither an owner nor a superuser."""
    name = f"whole_{app.database}"
    execute(app, f"CREATE ROLE {name} LOGIN")
    for dsn in (app, mom):
        with connect(dsn) as connection:
            grant(connection, name, [Kind.WRITER, Kind.FORWARDER, Kind.RECEIVER])
    yield name
    for dsn in (app, mom):
        execute(dsn, f"DROP OWNED BY {name}")
    execute(app, f"DROP ROLE {name}")


# Rows that are gone


def empty(dsn: Dsn, *, but: tuple[str, ...] = ()) -> None:
    """What a cleaner of tests does: it truncates every table."""
    with connect(dsn) as connection:
        tables = fetch(
            connection,
            "SELECT relname FROM pg_class WHERE relnamespace = 'saf'::regnamespace "
            "AND relkind IN ('r', 'p') AND relname <> ALL (%(but)s)",
            {"but": [*but]},
        )
        names = sql.SQL(", ").join(sql.Identifier("saf", name) for (name,) in tables)
        connection.execute(sql.SQL("TRUNCATE {} CASCADE").format(names))


@every_postgresql
@pytest.mark.parametrize("but", [(), ("alembic_version",)])
def test_a_broker_whose_tables_were_truncated_is_named_by_everything_that_meets_it(
    app: Dsn, mom: Dsn, tmp_path: Path, but: tuple[str, ...]
) -> None:
    send_ten(app)
    empty(app, but=but)
    with connect(app) as connection:
        with pytest.raises(RowsGone, match="rows are gone"), connection.transaction():
            Outbox().send(connection, "billing", b"")
        with pytest.raises(RowsGone, match="rows are gone"):
            rebase(connection, {})
        assert fetch(connection, "SELECT count(*) FROM saf.outbox") == [(0,)]
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    for command in (
        *("status", "rebase", "forward", "purge", "doctor", "reconcile", "outbox list"),
        *("members", "dead list", "route add mom", "sender list"),
    ):
        done = run_saf(*command.split(), "--config", file)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode in (1, 2), (command, said)
        assert "rows are gone" in said, (command, said)
    found = json.loads(run_saf("doctor", "--json", "--config", file).stdout)["findings"]
    (error,) = [one for one in found if "rows are gone" in one["what"]]
    assert (error["severity"], "DROP SCHEMA saf CASCADE" in error["cure"]) == ("error", True)
    migrated = run_saf("migrate", "--dsn", app.conninfo)
    assert (migrated.returncode, "rows are gone" in migrated.stderr) == (2, True)


@pytest.mark.parametrize("but", [(), ("alembic_version",), ("alembic_version", "broker")])
def test_a_truncated_store_is_for_a_person_to_mend_and_no_message_is_given_up(
    app: Dsn, mom: Dsn, tmp_path: Path, but: tuple[str, ...]
) -> None:
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    send_ten(app)
    empty(mom, but=but)
    done = run_saf("forward", "--json", "--config", file)
    assert done.returncode == 2, done.stderr
    (problem,) = json.loads(done.stdout.splitlines()[-1])["problems"]
    assert (problem["kind"], "rows are gone" in problem["error"]) == ("RowsGone", True)
    found = json.loads(run_saf("doctor", "--json", "--config", file).stdout)["findings"]
    errors = [one for one in found if one["severity"] == "error" and "mom" in one["where"]]
    assert any("saf's own rows are gone" in one["what"] for one in errors)
    with connect(app) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.dead_letter") == [(0,)]


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        ("DELETE FROM saf.broker", "saf.broker has no row"),
        ("TRUNCATE saf.timeline", "saf.timeline is empty"),
        ("TRUNCATE saf.actual_key", "saf.actual_key is empty"),
        ("DELETE FROM saf.subscription", "lacks 'forwarder'"),
        ("DELETE FROM saf.cursor WHERE shard = 7", "63 of the 64 rows of subscription 'forwarder'"),
    ],
)
def test_each_of_saf_s_own_rows_that_is_gone_is_named(
    app: Dsn, mom: Dsn, loss: str, named: str
) -> None:
    execute(app, loss)
    with connect(app) as connection:
        assert [named in one for one in whole.missing(connection)] == [True]
    with pytest.raises(RowsGone, match=named):
        forward(app, mom=mom)


@pytest.mark.parametrize(
    "ask",
    [
        lambda mom: saf.begin_dialog(mom, from_service="a", to_service="b"),
        lambda mom: known_at(mom, uuid4()),
    ],
)
def test_what_asks_who_the_broker_is_says_that_its_row_is_gone(
    mom: Dsn, ask: Callable[[psycopg.Connection[Any]], object]
) -> None:
    execute(mom, "DELETE FROM saf.broker")
    with mom.connect(role="test") as connection, pytest.raises(RowsGone, match="rows are gone"):
        ask(connection)


# Rows that are hidden


HIDE = (
    "ALTER TABLE saf.{0} ENABLE ROW LEVEL SECURITY",
    "CREATE POLICY everything ON saf.{0} USING (true)",
    "CREATE POLICY tenant ON saf.{0} AS RESTRICTIVE USING ({1})",
)
SHOW = ("DROP POLICY tenant ON saf.{0}", "ALTER TABLE saf.{0} DISABLE ROW LEVEL SECURITY")


def apply(dsn: Dsn, statements: tuple[str, ...], *values: str) -> None:
    execute(dsn, *(one.format(*values) for one in statements))


@every_postgresql
@pytest.mark.parametrize(
    ("table", "which"), [("outbox", "id % 2 = 0"), ("cursor", "shard % 2 = 0")]
)
def test_rows_that_a_policy_hides_from_a_forwarder_are_not_passed_over(
    app: Dsn, mom: Dsn, login: str, table: str, which: str
) -> None:
    sent = send_ten(app)
    apply(app, HIDE, table, which)
    with pytest.raises(ConfigurationError, match=rf"saf.{table} applies to user '{login}'"):
        forward(as_user(app, login), mom=mom)
    apply(app, SHOW, table)
    run(as_user(app, login), mom=mom)
    assert sorted(bodies(mom)) == sent


def test_rows_that_a_policy_hides_from_a_forwarder_at_work_are_not_passed_over(
    app: Dsn, mom: Dsn, login: str
) -> None:
    with Cycle(as_user(app, login), forwarding_rules(mom=mom)) as cycle:
        drain(cycle)
        sent = send_ten(app)
        cycle.open()
        apply(app, HIDE, "outbox", "id % 2 = 0")
        receipts = cycle.deliver()
        assert [one.complete for one in receipts] == [False] * len(receipts) != []
        cycle.close(receipts)
        assert bodies(mom) == []
        apply(app, SHOW, "outbox")
        drain(cycle)
    assert sorted(bodies(mom)) == sent


def test_rows_that_a_policy_hides_from_a_receiver_are_not_passed_over(mom: Dsn, login: str) -> None:
    with connect(mom) as connection:
        create_service(connection, "billing")
    apply(mom, HIDE, "inbox", "false")
    with (
        pytest.raises(ConfigurationError, match=r"saf.inbox applies"),
        saf.receive(as_user(mom, login), "billing"),
    ):
        pass


@pytest.mark.parametrize("table", ["inbox", "cursor"])
def test_rows_that_a_policy_hides_at_a_store_are_named_before_anything_is_stored(
    mom: Dsn, login: str, table: str
) -> None:
    apply(mom, HIDE, table, "false")
    with pytest.raises(ConfigurationError, match=rf"saf.{table} applies to user '{login}'"):
        PostgresInbox("mom", as_user(mom, login)).connect()


def test_the_rules_of_saf_sender_hide_nothing_and_other_policies_beside_them_are_named(
    app: Dsn, mom: Dsn, login: str
) -> None:
    sent = send_ten(app)
    with connect(app) as connection:
        add_senders(connection, login, "shop", refuse_others=True)
        with connect(as_user(app, login)) as forwarder:
            assert whole.narrowed(forwarder) == []
        run(as_user(app, login), mom=mom)
        assert sorted(bodies(mom)) == sent
        connection.execute("CREATE POLICY tenant ON saf.outbox AS RESTRICTIVE USING (false)")
    with pytest.raises(ConfigurationError, match="but outbox_read and outbox_sender"):
        forward(as_user(app, login), mom=mom)


def test_a_policy_that_is_added_beside_the_rules_of_saf_sender_is_noticed_by_the_next_cycle(
    app: Dsn, mom: Dsn, login: str
) -> None:
    with connect(app) as connection:
        add_senders(connection, login, "shop", refuse_others=True)
        with Cycle(as_user(app, login), forwarding_rules(mom=mom)) as cycle:
            before = send_ten(app)
            drain(cycle)
            assert sorted(bodies(mom)) == sorted(before)
            connection.execute(
                "CREATE POLICY tenant ON saf.outbox AS RESTRICTIVE USING (id % 2 = 0)"
            )
            after = send_ten(app)
            for _ in range(2):
                with pytest.raises(ConfigurationError, match="but outbox_read and outbox_sender"):
                    cycle.run()
            assert sorted(bodies(mom)) == sorted(before)
            connection.execute("DROP POLICY tenant ON saf.outbox")
            drain(cycle)
    assert sorted(bodies(mom)) == sorted(before + after)


# Publications


@pytest.fixture
def published(app: Dsn, mom: Dsn) -> None:
    """Source and store publish all tables, as Debezium does by default."""
    for dsn in (app, mom):
        execute(dsn, "CREATE PUBLICATION everything FOR ALL TABLES")


@every_postgresql
@pytest.mark.usefixtures("published")
def test_all_goes_on_where_a_publication_publishes_all_tables(
    app: Dsn, mom: Dsn, other: Dsn, login: str
) -> None:
    with connect(app) as source, connect(mom) as store:
        for destination in ("mom", "other"):
            add_route(source, destination, service="billing")
        create_service(store, "billing")
        for _ in range(2):
            sent = send_ten(app)
            run(app, mom=mom, other=other)
        assert set(bodies(mom)) | set(bodies(other)) == set(sent)
        assert fetch(source, "SELECT count(*) FROM saf.route_choice") == [(10,)]
        with saf.receive(mom, "billing") as delivery:
            assert [message.body.decode() for message in delivery] == bodies(mom)[: len(delivery)]
        add_senders(source, login, "shop", refuse_others=True)
        assert remove_senders(source, login, allow_others=True) == 1
        for connection in (source, store):
            purge_broker(connection, retention_seconds=0, rotate_after_seconds=0)
        send_ten(app)
        ((broker,),) = fetch(source, "SELECT broker_id FROM saf.broker")
        rebased = rebase(source, {"mom": known_at(store, broker)}, force=True)
        assert rebased is not None
        assert rebased.rows >= 10
        assert fetch(source, "SELECT FROM pg_class WHERE relname ~ 'identity'") == []
        assert whole.without_identity(source) == []
    run(app, mom=mom, other=other)


COLUMNS = "id, txid, message_id, to_service, key, body"
DOUBLE = f"""
INSERT INTO saf.outbox ({COLUMNS}) OVERRIDING SYSTEM VALUE SELECT {COLUMNS} FROM saf.outbox
"""


@every_postgresql
@pytest.mark.usefixtures("published")
def test_a_repair_removes_doubled_rows_that_a_publication_publishes(
    app: Dsn, mom: Dsn, login: str
) -> None:
    sent = send_ten(app)
    run(app, mom=mom)
    sent += send_ten(app)
    execute(app, "CREATE PUBLICATION logs FOR TABLE saf.outbox WITH (publish = 'delete')", DOUBLE)
    with connect(app) as source:
        with (
            connect(as_user(app, login)) as other,
            pytest.raises(
                UsageError, match=r"publication 'everything'.*drop the publication first"
            ),
            whole.deletable_doubles(other),
        ):
            pass
        published = fetch(source, "SELECT * FROM pg_publication ORDER BY 1")
        rebased = rebase(source, {})
        assert rebased is not None
        assert rebased.doubled == 20
        assert fetch(source, "SELECT * FROM pg_publication ORDER BY 1") == published
    run(app, mom=mom)
    assert sorted(bodies(mom)) == sorted(sent)


@every_postgresql
@pytest.mark.usefixtures("published")
def test_a_repair_gives_new_ids_to_messages_that_a_publication_publishes(
    app: Dsn, mom: Dsn
) -> None:
    sent = send_ten(app)
    run(app, mom=mom)
    with connect(app) as source:
        fetch(source, "SELECT setval('saf.outbox_id_seq', 1, false)")
        sent += send_ten(app)
        rebased = rebase(source, {})
        assert rebased is not None
        assert rebased.new_ids == 10
    run(app, mom=mom)
    assert sorted(bodies(mom)) == sorted(sent)


@pytest.mark.usefixtures("published")
def test_a_published_table_without_an_identity_is_named_with_the_cure(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    execute(app, "ALTER TABLE saf.route_choice REPLICA IDENTITY DEFAULT")
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    found = json.loads(run_saf("doctor", "--json", "--config", file).stdout)["findings"]
    (one,) = [one for one in found if one["check"] == "publications" and one["what"]]
    assert "saf.route_choice is published" in one["what"]
    purged = run_saf("purge", "--retention", "0s", "--config", file)
    assert (purged.returncode, "saf doctor" in purged.stderr + purged.stdout) == (2, True)
    execute(app, one["cure"].removeprefix("as the owner, "))
    assert run_saf("purge", "--retention", "0s", "--config", file).returncode == 0


def test_a_table_that_cannot_be_changed_for_want_of_an_identity_has_a_meaning() -> None:
    assert meaning("55000") is Meaning.PUBLISHED
    assert "replica identity" in str(translated("broker 'app'", "55000", "cannot delete"))


# The search_path


@pytest.fixture
def named_saf(app: Dsn) -> Iterator[Dsn]:
    """A login named saf, which may create schemas, as in a tutorial."""
    execute(app, "CREATE ROLE saf LOGIN", f"GRANT CREATE ON DATABASE {app.database} TO saf")
    yield as_user(app, "saf")
    execute(app, "DROP OWNED BY saf CASCADE", "DROP ROLE saf")


@every_postgresql
def test_a_role_for_which_schema_saf_is_the_first_is_named_at_migrating_and_by_the_doctor(
    app: Dsn, mom: Dsn, named_saf: Dsn, tmp_path: Path
) -> None:
    execute(app, "DROP SCHEMA saf CASCADE")
    done = run_saf("migrate", "--dsn", named_saf.conninfo)
    assert done.returncode == 0
    said = " ".join(done.stderr.split())
    assert "the first in the search_path of role 'saf'" in said
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})

    def found() -> list[str]:
        findings = json.loads(run_saf("doctor", "--json", "--config", file).stdout)["findings"]
        return [
            f"{one['severity']}: {one['cure']}"
            for one in findings
            if one["check"] == "search_path" and one["what"]
        ]

    (cure,) = found()
    assert cure.startswith("warning: use another role, such as saf_owner, or ALTER ROLE")
    execute(app, cure.partition(", or ")[2])
    assert found() == []
    execute(app, f'ALTER DATABASE {app.database} SET search_path = nowhere, "saf", public')
    assert "SET search_path = public" in found()[0]


def test_no_file_that_people_copy_logs_in_as_saf() -> None:
    text = re.compile(
        r"postgresql(\+\w+)?://saf[:@]|\buser=saf\b|POSTGRES_USER: saf$|-U saf\b", re.M
    )
    folders = ("docs", "docker", "jobs", "examples", "airflow", "ops", "saf", "README.md")
    files = [
        path
        for name in folders
        for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
        if path.suffix in (".md", ".yaml", ".yml", ".toml", ".py", ".sh", ".service", ".env")
        and "reference" not in path.parts
    ]
    assert len(files) > 100
    assert [str(path) for path in files if text.search(path.read_text())] == []


# Arrays


@every_postgresql
def optional(number: int) -> Message:
    """A message with some of its optional columns: one bit each, so 0 has none and 127 has all."""
    later = datetime.now(UTC) + timedelta(days=1)
    given: dict[str, Any] = {
        "key": "NULL",
        "message_type": "null",
        "from_service": "shop",
        "to_broker": UUID(int=7),
        "deliver_at": datetime(2001, 1, 1, tzinfo=UTC),
        "expires_at": later + timedelta(days=1),
        "headers": {"trace": None},
    }
    kept = [name for place, name in enumerate(given) if number >> place & 1]
    return Message(service="billing", body=f"{number}", **{name: given[name] for name in kept})


@every_postgresql
@pytest.mark.parametrize("driver", ["psycopg", "SQLAlchemy", "asyncpg"])
def test_where_array_nulls_is_off_many_messages_are_sent_as_they_are(app: Dsn, driver: str) -> None:
    """From a session that is not saf's own."""
    execute(app, f"ALTER DATABASE {app.database} SET array_nulls = off")
    together = [[optional(n) for n in numbers] for numbers in ((0,), (127,), range(99), range(128))]
    engine = sa.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(app.conninfo)
    )
    for messages in together:
        if driver == "psycopg":
            with psycopg.connect(app.conninfo) as connection:
                Outbox().send_many(connection, messages)
        elif driver == "SQLAlchemy":
            with engine.begin() as its:
                Outbox().send_many(its, messages)
        else:
            asyncio.run(send_by_asyncpg(app, messages))
    engine.dispose()
    names = ("key", "message_type", "from_service", "to_broker", "deliver_at", "expires_at")
    query = f"SELECT convert_from(body, 'utf8'), {', '.join(names)} FROM saf.outbox ORDER BY id"
    with connect(app) as connection:
        assert fetch(connection, query) == [
            (one.body, *(getattr(one, name) for name in names))
            for messages in together
            for one in messages
        ]


async def send_by_asyncpg(dsn: Dsn, messages: list[Message]) -> None:
    place = {name: dsn.parts[name] for name in ("host", "port", "user") if name in dsn.parts}
    connection = await asyncpg.connect(database=dsn.database, **place)
    async with connection.transaction():
        await Outbox().asend_many(connection, messages)
    await connection.close()


def test_where_array_nulls_is_off_messages_are_forwarded_and_received(app: Dsn, mom: Dsn) -> None:
    for dsn in (app, mom):
        execute(dsn, f"ALTER DATABASE {dsn.database} SET array_nulls = off")
    with connect(mom) as connection:
        create_service(connection, "billing")
    sent = send_ten(app)
    run(app, mom=mom)
    received = []
    while True:
        with saf.receive(mom, "billing", max_messages=3) as delivery:
            received += [message.body.decode() for message in delivery]
        if not delivery:
            break
    assert sorted(received) == sent
