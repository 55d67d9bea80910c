"""`saf.migrate`: by a connection string, or on a connection in the caller's transaction."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import saf
from saf.broker.migrate import BEFORE_BASELINE
from saf.database import REVISION, Dsn, check_schema
from saf.errors import ConfigurationError, RowsGone, UsageError
from tests.earlier import put_back
from tests.pipeline import connect
from tests.programs import run, url

NewDatabase = Callable[[str], Dsn]


@pytest.fixture
def empty(new_database: NewDatabase) -> Dsn:
    return new_database("empty")


def has_schema(dsn: Dsn) -> bool:
    with dsn.connect(role="test") as connection:
        exists = connection.execute("SELECT to_regclass('saf.broker') IS NOT NULL").fetchone()
        if exists == (True,):
            check_schema(connection)
        return exists == (True,)


@pytest.mark.parametrize("form", [lambda dsn: dsn, lambda dsn: dsn.conninfo, url])
def test_a_connection_string_is_enough_and_it_says_what_it_has_done(
    empty: Dsn, form: Callable[[Dsn], Any]
) -> None:
    first = saf.migrate(form(empty), shards=7)
    assert first == saf.Migrated(database=empty.database, before=None, revision=REVISION, shards=7)
    again = saf.migrate(form(empty))
    assert (again.changed, again.before, again.revision, again.shards) == (
        *(False, REVISION, REVISION),
        7,
    )
    assert str(again) == f"{empty.database}: saf schema {REVISION}, unchanged"
    assert has_schema(empty)


@contextmanager
def by_psycopg(dsn: Dsn) -> Iterator[tuple[Any, Callable[[str], Any]]]:
    with psycopg.connect(dsn.conninfo) as connection:
        yield connection, connection.execute


@contextmanager
def by_cursor_of_dicts(dsn: Dsn) -> Iterator[tuple[Any, Callable[[str], Any]]]:
    with psycopg.connect(dsn.conninfo, row_factory=dict_row) as connection:
        yield connection.cursor(), connection.execute
        assert connection.execute("SELECT 1 AS one").fetchone() == {"one": 1}


@contextmanager
def by_block_in_autocommit(dsn: Dsn) -> Iterator[tuple[Any, Callable[[str], Any]]]:
    with (
        psycopg.connect(dsn.conninfo, autocommit=True) as connection,
        connection.transaction() as block,
    ):
        yield (
            connection,
            lambda statement: (
                connection.execute(statement) if statement != "ROLLBACK" else rolled_back(block)
            ),
        )


def rolled_back(block: psycopg.Transaction) -> None:
    raise psycopg.Rollback(block)


@contextmanager
def by_sqlalchemy(dsn: Dsn) -> Iterator[tuple[Any, Callable[[str], Any]]]:
    with sa.create_engine(url(dsn), poolclass=sa.pool.NullPool).connect() as connection:
        yield connection, lambda statement: ended(connection, statement)


@contextmanager
def by_session(dsn: Dsn) -> Iterator[tuple[Any, Callable[[str], Any]]]:
    with Session(sa.create_engine(url(dsn), poolclass=sa.pool.NullPool)) as session:
        yield session, lambda statement: ended(session, statement)


def ended(connection: sa.Connection | Session, statement: str) -> None:
    if statement == "ROLLBACK":
        connection.rollback()
    elif statement == "COMMIT":
        connection.commit()
    else:
        connection.execute(sa.text(statement))


WAYS = [by_psycopg, by_cursor_of_dicts, by_block_in_autocommit, by_sqlalchemy, by_session]


@pytest.mark.parametrize("way", WAYS)
def test_on_a_connection_the_schema_exists_when_the_caller_commits(empty: Dsn, way: Any) -> None:
    with way(empty) as (connection, execute):
        execute("CREATE TABLE orders (number text)")
        assert saf.migrate(connection).before is None
        execute("ROLLBACK")
    assert not has_schema(empty)

    with way(empty) as (connection, execute):
        execute("CREATE TABLE orders (number text)")
        assert saf.migrate(connection, shards=16).shards == 16
        assert not has_schema(empty), "another session sees nothing before the commit"
        execute("INSERT INTO orders VALUES ('A-1')")
        assert not saf.migrate(connection).changed
        if way is not by_block_in_autocommit:
            execute("COMMIT")
    assert has_schema(empty)
    with connect(empty) as other:
        assert other.execute("SELECT number FROM orders").fetchall() == [("A-1",)]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("revision", [None, *BEFORE_BASELINE])
def test_under_asyncio_sqlalchemy_runs_it(empty: Dsn, driver: str, revision: str | None) -> None:
    if revision:
        saf.migrate(empty)
        put_back(empty, revision)

    async def migrate() -> None:
        engine = create_async_engine(url(empty).replace("+psycopg", f"+{driver}"))
        for commits in (False, True):
            async with engine.connect() as connection:
                done = await connection.run_sync(saf.migrate)
                assert (done.before, done.revision) == (revision, REVISION)
                if commits:
                    await connection.commit()
        await engine.dispose()

    asyncio.run(migrate())
    assert has_schema(empty)


IN_DJANGO = """
import os, saf
import django
from django.conf import settings

settings.configure(DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": os.environ["NAME"], "HOST": os.environ["HOST"], "USER": os.environ["DB_USER"],
}})
django.setup()
from django.db import connection, transaction

try:
    saf.migrate(connection)
except saf.UsageError as refused:
    print(refused)
with transaction.atomic():
    print(saf.migrate(connection))
    transaction.set_rollback(True)
with transaction.atomic():
    print(saf.migrate(connection))
with connection.cursor() as cursor:
    cursor.execute("SELECT shards FROM saf.broker")
    print(cursor.fetchone())
"""


def test_djangos_connection_migrates_inside_an_atomic_block(empty: Dsn) -> None:
    parts = empty.parts
    env = {"NAME": parts["dbname"], "HOST": parts["host"], "DB_USER": parts["user"]}
    done = run([sys.executable, "-c", IN_DJANGO], env=env)
    assert done.returncode == 0, done.stderr
    refused, first, second, shards = done.stdout.splitlines()
    assert "is in autocommit and no transaction is open" in refused
    assert first == second == f"{empty.database}: saf schema {REVISION}, created with 64 shards"
    assert shards == "(64,)"


def test_a_connection_in_autocommit_is_refused_because_half_a_schema_could_stay(
    empty: Dsn,
) -> None:
    engine = sa.create_engine(url(empty), isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool)
    with (
        psycopg.connect(empty.conninfo, autocommit=True) as bare,
        engine.connect() as connection,
    ):
        for one in (bare, connection):
            with pytest.raises(UsageError, match=r"half done. Open a transaction first"):
                saf.migrate(one)
    assert not has_schema(empty)


def test_what_is_no_connection_is_named() -> None:
    with pytest.raises(UsageError, match=r"cannot use a builtins\.int: expected a SQLAlchemy"):
        saf.migrate(7)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="names no database"):
        saf.migrate("host=localhost")


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_missing_right_is_explained_on_a_connection_too(empty: Dsn, driver: str) -> None:
    name = f"stranger_{empty.database}"
    with connect(empty) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN")

    async def migrate() -> None:
        as_stranger = url(empty).replace(f"//{empty.parts['user']}@", f"//{name}@")
        engine = create_async_engine(as_stranger.replace("+psycopg", f"+{driver}"))
        try:
            async with engine.connect() as connection:
                await connection.run_sync(saf.migrate)
        finally:
            await engine.dispose()

    try:
        with pytest.raises(ConfigurationError, match=r"may not migrate database '.*GRANT CREATE"):
            asyncio.run(migrate())
    finally:
        with connect(empty) as connection:
            connection.execute(f"DROP ROLE {name}")


def test_a_refused_migration_leaves_the_callers_connection_usable(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("DELETE FROM saf.alembic_version")
    with psycopg.connect(app.conninfo) as connection:
        connection.execute("CREATE TABLE orders (number text)")
        with pytest.raises(RowsGone):
            saf.migrate(connection)
        connection.execute("INSERT INTO orders VALUES ('A-1')")
    with connect(app) as connection:
        assert connection.execute("SELECT number FROM orders").fetchall() == [("A-1",)]


def test_threads_may_migrate_at_the_same_time(new_database: NewDatabase) -> None:
    databases = [new_database(f"thread{number}") for number in range(3)]
    begun, done = threading.Barrier(len(databases)), list[saf.Migrated]()

    def migrate(dsn: Dsn) -> None:
        begun.wait(30)
        done.append(saf.migrate(dsn))

    threads = [threading.Thread(target=migrate, args=[dsn]) for dsn in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(one.database for one in done) == sorted(dsn.database for dsn in databases)
    assert all(has_schema(dsn) for dsn in databases)


ENV = textwrap.dedent(
    """
    import os
    import saf
    import sqlalchemy as sa
    from alembic import context

    saf.migrate(os.environ["SAF_DSN"], shards=16)
    with sa.create_engine(os.environ["URL"]).connect() as connection:
        context.configure(connection=connection)
        with context.begin_transaction():
            context.run_migrations()
    """
)
ORDERS = textwrap.dedent(
    """
    import saf
    import sqlalchemy as sa
    from alembic import op

    revision = "0001"
    down_revision = None

    def upgrade():
        op.create_table("before", sa.Column("number", sa.Text))
        assert not saf.migrate(op.get_bind()).changed
        op.create_table("orders", sa.Column("number", sa.Text))
    """
)


def test_an_alembic_that_runs_around_it_goes_on(empty: Dsn, tmp_path: Any) -> None:
    versions = tmp_path / "mine" / "versions"
    versions.mkdir(parents=True)
    (tmp_path / "alembic.ini").write_text(
        "[alembic]\nscript_location = %(here)s/mine\npath_separator = os\n"
    )
    (tmp_path / "mine" / "env.py").write_text(ENV)
    (versions / "0001_orders.py").write_text(ORDERS)
    env = {"SAF_DSN": empty.conninfo, "URL": url(empty)}
    done = run([sys.executable, "-m", "alembic", "upgrade", "head"], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with connect(empty) as connection:
        assert connection.execute("SELECT shards FROM saf.broker").fetchone() == (16,)
        assert connection.execute("SELECT FROM orders CROSS JOIN before").fetchall() == []
