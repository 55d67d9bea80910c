"""The migrations: what they accept, that nothing is half done, and whom they live beside."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy.exc import ProgrammingError

from saf import Outbox
from saf.broker.embedded import DEFAULT_VERSION, programs
from saf.broker.migrate import BASELINE, BEFORE_BASELINE, config, migrate, revisions
from saf.database import REVISION, Dsn, check_schema, fetch
from saf.errors import ConfigurationError, RowsGone, SafError, SchemaMismatch, Unavailable
from saf.operating.maintenance import purge_broker
from tests.earlier import put_back
from tests.pipeline import bodies, connect, forward, send

NewDatabase = Callable[[str], Dsn]

ROOT = Path(__file__).parents[2]

# What the catalogs say about a schema, in words that do not depend on oids
CATALOG = {
    "tables": """
        SELECT c.relname, c.relkind, c.relpersistence, c.reloptions,
               pg_get_partkeydef(c.oid), pg_get_expr(c.relpartbound, c.oid),
               obj_description(c.oid, 'pg_class'), c.relrowsecurity, c.relreplident, am.amname
        FROM pg_class c LEFT JOIN pg_am am ON am.oid = c.relam
        WHERE c.relnamespace = 'saf'::regnamespace AND c.relkind IN ('r', 'p', 'i', 'I', 'S', 'v')
    """,
    "columns": """
        SELECT c.relname, row_number() OVER (PARTITION BY c.oid ORDER BY a.attnum), a.attname,
               format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity, a.attgenerated,
               pg_get_expr(d.adbin, d.adrelid), co.collname,
               a.attstorage, a.attcompression, col_description(c.oid, a.attnum)
        FROM pg_class c
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        LEFT JOIN pg_collation co ON co.oid = a.attcollation
        WHERE c.relnamespace = 'saf'::regnamespace AND c.relkind IN ('r', 'p')
    """,
    "constraints": """
        SELECT c.relname, k.conname, k.contype, pg_get_constraintdef(k.oid), k.convalidated
        FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
        WHERE k.connamespace = 'saf'::regnamespace
    """,
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'saf'",
    "sequences": """
        SELECT sequencename, data_type::text, start_value, min_value, max_value, increment_by,
               cycle, cache_size
        FROM pg_sequences WHERE schemaname = 'saf'
    """,
    "functions": """
        SELECT proname, pg_get_functiondef(oid), proacl::text FROM pg_proc
        WHERE pronamespace = 'saf'::regnamespace
    """,
    "triggers": """
        SELECT pg_get_triggerdef(t.oid), t.tgenabled
        FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
        WHERE c.relnamespace = 'saf'::regnamespace AND NOT t.tgisinternal
    """,
    "policies": """
        SELECT tablename, policyname, cmd, qual, with_check FROM pg_policies
        WHERE schemaname = 'saf'
    """,
    "views": "SELECT viewname, definition FROM pg_views WHERE schemaname = 'saf'",
}

# Alembic's own table is not the library's
IGNORED = "alembic_version"


def catalog(dsn: Dsn) -> dict[str, list[tuple[Any, ...]]]:
    with dsn.connect(role="test") as connection:
        return {
            what: sorted(
                (row for row in connection.execute(query) if IGNORED not in str(row)), key=str
            )
            for what, query in CATALOG.items()
        }


def saf_objects(dsn: Dsn) -> list[str]:
    with dsn.connect(role="test") as connection:
        rows = connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace('saf')"
        ).fetchall()
    return sorted(row[0] for row in rows if IGNORED not in row[0])


def put_at(dsn: Dsn, revision: str) -> None:
    """Let a database say that it is at another revision."""
    with dsn.connect(role="test") as connection:
        connection.execute("UPDATE saf.alembic_version SET version_num = %s", [revision])


def shards(dsn: Dsn) -> int:
    with dsn.connect(role="test") as connection:
        row = connection.execute("SELECT shards FROM saf.broker").fetchone()
    assert row is not None
    return int(row[0])


def usable(dsn: Dsn) -> bool:
    with dsn.connect(role="test") as connection:
        Outbox().send(connection, "billing", b"")
        return connection.execute("SELECT FROM saf.outbox_status").rowcount == 1


@pytest.mark.every_postgresql
def test_what_follows_the_first_revision_goes_up_down_and_up_again(app: Dsn) -> None:
    first = catalog(app)
    command.downgrade(config(app), BASELINE)
    command.upgrade(config(app), "head")
    assert catalog(app) == first
    assert usable(app)


def test_messages_that_are_held_keep_a_database_from_going_back(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        connection.execute("SELECT saf.send('a', 'x', name => 'n', deliver_at => '2199-01-01')")
    before = catalog(app)
    with pytest.raises(ProgrammingError, match="messages are held"):
        command.downgrade(config(app), BASELINE)
    assert catalog(app) == before
    with app.connect(role="test") as connection:
        check_schema(connection)
        connection.execute("SELECT saf.cancel('a', 'n')")
    command.downgrade(config(app), BASELINE)
    migrate(app)
    assert catalog(app) == before


def test_the_oldest_revision_is_not_undone(app: Dsn) -> None:
    before = catalog(app)
    with pytest.raises(CommandError, match=r"oldest revision.* run DROP SCHEMA saf CASCADE"):
        command.downgrade(config(app), "base")
    assert catalog(app) == before
    with app.connect(role="test") as connection:
        check_schema(connection)


def test_the_library_knows_the_newest_revision() -> None:
    scripts = ScriptDirectory.from_config(config(Dsn("dbname=none")))
    assert scripts.get_current_head() == REVISION


def test_every_revision_can_be_ordered_by_its_name() -> None:
    # errors tell older from newer by comparing names
    scripts = ScriptDirectory.from_config(config(Dsn("dbname=none")))
    downwards = [script.revision for script in scripts.walk_revisions()]
    assert downwards == sorted(downwards, reverse=True)


def test_revisions_have_consecutive_numbers() -> None:
    # a sender accepts the revision whose number follows
    known = revisions()
    assert known == [f"{int(known[0]) + n:04}" for n in range(len(known))]


# Shards


def test_the_number_of_shards_is_64_unless_chosen(new_database: NewDatabase) -> None:
    unasked, chosen = new_database("unasked"), new_database("chosen")
    migrate(unasked)
    migrate(chosen, shards=7)
    assert (shards(unasked), shards(chosen)) == (64, 7)
    with chosen.connect(role="test") as connection:
        cursors = connection.execute("SELECT shard FROM saf.cursor ORDER BY shard").fetchall()
        assert [row[0] for row in cursors] == list(range(7))


def test_the_number_of_shards_is_fixed_by_the_first_migration(app: Dsn) -> None:
    migrate(app)
    migrate(app, shards=64)
    with pytest.raises(ConfigurationError, match=r"has 64 shards, fixed by its first migration"):
        migrate(app, shards=65)
    assert shards(app) == 64


@pytest.mark.parametrize("number", [0, -1, 1025, "many", 6.5])
def test_a_number_of_shards_out_of_range_is_refused_before_connecting(number: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^shards: expected a number from 1 to 1024, got"):
        migrate(Dsn("host=/nowhere dbname=none"), shards=number)


# Repeating, failing, waiting


def test_migrating_again_changes_nothing(app: Dsn) -> None:
    before = catalog(app)
    migrate(app)
    assert catalog(app) == before


def test_a_newer_database_is_refused_as_such(app: Dsn) -> None:
    put_at(app, "9999")
    with pytest.raises(SchemaMismatch, match=r"saf schema 9999.*upgrade the saf-outbox package"):
        migrate(app)


@pytest.mark.every_postgresql
@pytest.mark.parametrize("revision", BEFORE_BASELINE)
@pytest.mark.parametrize("by_hand", [False, True], ids=["saf migrate", "alembic"])
def test_a_database_at_a_step_before_the_first_revision_is_taken_over(
    app: Dsn, revision: str, by_hand: bool
) -> None:
    assert usable(app)
    expected = catalog(app)
    put_back(app, revision)
    assert catalog(app) != expected
    with (
        app.connect(role="test") as connection,
        pytest.raises(SchemaMismatch, match=f"schema {revision}"),
    ):
        check_schema(connection)
    if by_hand:
        assert alembic("upgrade", "head", dsn=app).returncode == 0
    else:
        migrate(app)
    with app.connect(role="test") as connection:
        check_schema(connection)
        assert connection.execute("SELECT FROM saf.outbox").rowcount == 1
    assert catalog(app) == expected


def contents(dsn: Dsn) -> dict[str, str]:
    """Return the rows of each table as text."""
    with connect(dsn) as connection:
        names = fetch(connection, "SELECT tablename FROM pg_tables WHERE schemaname = 'saf'")
        return {
            name: fetch(
                connection, f"SELECT string_agg(t::text, ' ' ORDER BY t::text) FROM saf.{name} t"
            )[0][0]
            for (name,) in names
            if name != IGNORED
        }


@pytest.mark.every_postgresql
def test_a_database_that_is_taken_over_keeps_its_rows_and_their_keys(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        for number in range(20):
            send(connection, str(number), key=f"key {number}")
    forward(app, mom=mom)
    with connect(app) as connection:
        send(connection, "last", key="key 0")
    before = contents(app), contents(mom)
    assert "watermark" in before[1]["actual_key"]
    for dsn in (app, mom):
        put_back(dsn)
        with connect(dsn) as connection:
            connection.execute("INSERT INTO saf.staging DEFAULT VALUES")
            connection.execute(
                "INSERT INTO saf.staged (attempt, number, to_service, body) "
                "SELECT attempt, 0, 'billing', '' FROM saf.staging"
            )
        migrate(dsn)
        with connect(dsn) as connection:
            outcome = purge_broker(connection, retention_seconds=86400, rotate_after_seconds=86400)
        assert outcome.orphans == 1
    assert (contents(app), contents(mom)) == before
    forward(app, mom=mom)
    assert bodies(mom) == [*map(str, range(20)), "last"]


def test_an_older_step_is_refused_with_the_way_out(app: Dsn) -> None:
    before = catalog(app)
    put_at(app, "0012")
    with pytest.raises(ConfigurationError) as refused:
        migrate(app)
    for words in ("has saf schema 0012", "forward its", "DROP SCHEMA saf CASCADE"):
        assert words in str(refused.value)
    assert catalog(app) == before
    with app.connect(role="test") as connection, pytest.raises(SchemaMismatch, match="schema 0012"):
        check_schema(connection)


def test_no_server_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as refused:
        migrate(Dsn(f"host={tmp_path} dbname=none password=hush"))
    assert "hush" not in str(refused.value)


@pytest.fixture
def stranger(new_database: NewDatabase) -> Iterator[Dsn]:
    """A database, and a user without any rights in it."""
    dsn = new_database("foreign")
    name = sql.Identifier(f"stranger_{dsn.database}")
    with dsn.connect(role="test", autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
        yield Dsn(f"{dsn.conninfo} user=stranger_{dsn.database}")
        connection.execute(sql.SQL("DROP OWNED BY {}").format(name))
        connection.execute(sql.SQL("DROP ROLE {}").format(name))


def test_missing_rights_are_explained(stranger: Dsn) -> None:
    with pytest.raises(ConfigurationError, match=r"may not migrate database.*GRANT CREATE"):
        migrate(stranger)
    assert saf_objects(stranger) == []


def test_a_prepared_schema_is_all_the_right_that_a_user_needs(stranger: Dsn, server: Any) -> None:
    with server.dsn(stranger.database).connect(role="test") as connection:
        role = sql.Identifier(stranger.parts["user"])
        connection.execute(sql.SQL("CREATE SCHEMA saf AUTHORIZATION {}").format(role))
    migrate(stranger)
    assert usable(stranger)


def test_a_read_only_server_is_explained(new_database: NewDatabase) -> None:
    dsn = new_database("standby")
    read_only = Dsn(f"{dsn.conninfo} options='-c default_transaction_read_only=on'")
    with pytest.raises(ConfigurationError, match="read-only: migrate on the primary"):
        migrate(read_only)


def test_a_foreign_schema_of_that_name_is_left_alone(new_database: NewDatabase) -> None:
    dsn = new_database("taken")
    with dsn.connect(role="test") as connection:
        connection.execute("CREATE SCHEMA saf")
        connection.execute("CREATE TABLE saf.outbox (mine int)")
    with pytest.raises(ConfigurationError, match="schema saf that these migrations did not make"):
        migrate(dsn)
    assert saf_objects(dsn) == ["outbox"]


def test_a_copy_of_the_schema_alone_is_told_what_to_do_whoever_asks(
    app: Dsn, new_database: NewDatabase
) -> None:
    copy = new_database("copy")
    dumped = run([programs(DEFAULT_VERSION) / "pg_dump", "--schema-only", "-d", app.conninfo])
    run([programs(DEFAULT_VERSION) / "psql", "-q", "-d", copy.conninfo], input=dumped)
    with copy.connect(role="test") as connection, pytest.raises(RowsGone):
        check_schema(connection)
    with copy.connect(role="test") as connection, pytest.raises(RowsGone):
        Outbox().send(connection, "billing", "1")
    with pytest.raises(RowsGone, match=r"alembic_version is empty.* DROP SCHEMA saf CASCADE"):
        migrate(copy)
    with copy.connect(role="test") as connection:
        connection.execute("DROP SCHEMA saf CASCADE")
    migrate(copy)
    with copy.connect(role="test") as connection:
        check_schema(connection)


def run(program: list[Any], input: str = "") -> str:  # noqa: A002 - as subprocess has it
    done = subprocess.run(program, input=input, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_database_in_another_encoding_is_refused(server: Any, app: Dsn) -> None:
    name = f"latin_{app.database}"
    with app.connect(role="test", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'LATIN1'")
        try:
            with pytest.raises(ConfigurationError, match="encoded in LATIN1: saf needs one"):
                migrate(server.dsn(name))
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_failed_migration_leaves_nothing_behind(new_database: NewDatabase) -> None:
    dsn = new_database("failed")
    with dsn.connect(role="test") as connection:
        # a late statement of the migration meets it
        connection.execute("CREATE SCHEMA saf")
        connection.execute("CREATE VIEW saf.outbox_status AS SELECT 1 AS mine")
    with pytest.raises(ConfigurationError):
        migrate(dsn)
    assert saf_objects(dsn) == ["outbox_status"]


@pytest.mark.parametrize("revision", [None, "0037"])
def test_two_migrations_at_once_wait_for_each_other(
    new_database: NewDatabase, revision: str | None
) -> None:
    dsn = new_database("raced")
    if revision:
        migrate(dsn)
        put_back(dsn, revision)
    environment = {**os.environ, "SAF_DSN": dsn.conninfo}
    once = [sys.executable, "-c", MIGRATE]
    racers = [
        subprocess.Popen(once, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    said = [racer.communicate(timeout=60)[1] for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 4, said
    assert usable(dsn)


MIGRATE = """
import os
from saf.database import Dsn
from saf.broker.migrate import migrate
migrate(Dsn(os.environ["SAF_DSN"]))
"""


def test_a_migration_waits_for_one_under_way(app: Dsn) -> None:
    done = threading.Event()

    def migrate_then_tell() -> None:
        migrate(app)
        done.set()

    with app.connect(role="test") as connection:
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('saf migrate', 0))")
        waiting = threading.Thread(target=migrate_then_tell)
        waiting.start()
        wait_for_lock(app)
        assert not done.is_set()
        connection.rollback()
    waiting.join(timeout=30)
    assert done.is_set()


def wait_for_lock(dsn: Dsn) -> None:
    with dsn.connect(role="test", autocommit=True) as connection:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if connection.execute(
                "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = "
                "(SELECT oid FROM pg_database WHERE datname = current_database())"
            ).fetchone():
                return
            time.sleep(0.02)
    pytest.fail("nobody waits for the lock")


# The plain alembic command


def alembic(
    *arguments: str, dsn: Dsn | None = None, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "SAF_DSN"}
    if dsn:
        environment["SAF_DSN"] = dsn.conninfo
    return subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_alembic_command_migrates_from_a_checkout(new_database: NewDatabase) -> None:
    dsn = new_database("checkout")
    done = alembic("upgrade", "head", dsn=dsn)
    assert done.returncode == 0, done.stderr
    assert shards(dsn) == 64
    assert f"{REVISION} (head)" in alembic("current", dsn=dsn).stdout
    assert usable(dsn)
    back = alembic("downgrade", "base", dsn=dsn)
    assert back.returncode != 0
    assert "run DROP SCHEMA saf CASCADE" in back.stdout + back.stderr
    assert "Traceback" not in back.stderr
    with dsn.connect(role="test") as connection:
        connection.execute("DROP SCHEMA saf CASCADE")
    assert alembic("-x", "shards=7", "upgrade", "head", dsn=dsn).returncode == 0
    assert shards(dsn) == 7
    assert usable(dsn)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-x", "shards=many"], "shards: expected a number from 1 to 1024, got 'many'"),
        (["-x", "shards=0"], "shards: expected a number from 1 to 1024, got '0'"),
        (["-x", "shards="], "shards: expected a number from 1 to 1024, got ''"),
        (["-x", "shards=65"], "has 64 shards, fixed by its first migration"),
        (["-x", "dsn=nonsense"], "a dsn is not a PostgreSQL connection string"),
        (["-x", "dsn=host=/nowhere dbname=none"], "database dbname=none host=/nowhere is unavail"),
    ],
)
def test_the_alembic_command_fails_with_a_sentence(
    app: Dsn, arguments: list[str], said: str
) -> None:
    done = alembic(*arguments, "upgrade", "head", dsn=app)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_alembic_command_asks_for_a_database() -> None:
    done = alembic("upgrade", "head")
    assert done.returncode != 0
    assert "Set SAF_DSN" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_migration_as_sql_builds_the_same(new_database: NewDatabase, app: Dsn) -> None:
    by_hand = new_database("byhand")
    script = alembic("upgrade", "head", "--sql")
    assert script.returncode == 0, script.stderr
    with by_hand.connect(role="test", autocommit=True) as connection:
        connection.execute(script.stdout.encode())
    assert catalog(by_hand) == catalog(app)
    assert usable(by_hand)


# Beside the application's own Alembic


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """An application with migrations of its own, as `alembic init` leaves them."""
    versions = tmp_path / "alembic" / "versions"
    versions.mkdir(parents=True)
    (tmp_path / "alembic.ini").write_text(
        "[alembic]\nscript_location = %(here)s/alembic\npath_separator = os\n"
    )
    (tmp_path / "alembic" / "env.py").write_text(APPLICATION_ENV)
    # the same name as one of ours, on purpose
    (versions / "0001_orders.py").write_text(APPLICATION_REVISION)
    return tmp_path


APPLICATION_ENV = textwrap.dedent(
    """
    import os
    import sqlalchemy as sa
    from alembic import context
    from saf.database import Dsn

    engine = Dsn(os.environ["SAF_DSN"]).engine(poolclass=sa.pool.NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection)
        with context.begin_transaction():
            context.run_migrations()
    """
)

APPLICATION_REVISION = textwrap.dedent(
    """
    import sqlalchemy as sa
    from alembic import op

    revision = "0001"
    down_revision = None

    def upgrade():
        op.create_table("orders", sa.Column("number", sa.Text, primary_key=True))

    def downgrade():
        op.drop_table("orders")
    """
)


def tables(dsn: Dsn) -> set[str]:
    with dsn.connect(role="test") as connection:
        return {
            row[0]
            for row in connection.execute(
                "SELECT schemaname || '.' || tablename FROM pg_tables "
                "WHERE tablename IN ('orders', 'alembic_version', 'outbox')"
            )
        }


@pytest.mark.parametrize("ours_first", [True, False])
def test_ours_and_the_applications_migrations_do_not_meet(
    new_database: NewDatabase, application: Path, ours_first: bool
) -> None:
    dsn = new_database("beside")
    if ours_first:
        migrate(dsn)
    done = alembic("upgrade", "head", dsn=dsn, folder=application)
    assert done.returncode == 0, done.stderr
    migrate(dsn)
    both = {"public.orders", "public.alembic_version", "saf.alembic_version", "saf.outbox"}
    assert tables(dsn) == both

    # each way back touches its own only
    assert alembic("downgrade", "base", dsn=dsn, folder=application).returncode == 0
    assert tables(dsn) == both - {"public.orders"}
    assert usable(dsn)
    assert alembic("upgrade", "head", dsn=dsn, folder=application).returncode == 0
    with dsn.connect(role="test") as connection:
        connection.execute("DROP SCHEMA saf CASCADE")
    assert tables(dsn) == {"public.orders", "public.alembic_version"}


def test_a_user_error_is_one_of_ours(new_database: NewDatabase) -> None:
    dsn = new_database("lost")
    gone = Dsn(make_conninfo(dsn.conninfo, dbname="saf_gone"))
    with pytest.raises(SafError):
        migrate(gone)
    with pytest.raises(psycopg.Error), psycopg.connect(gone.conninfo):
        pass
