"""An application of the older package sends at a database of the schema's next revision.

So an instance that restarts between `saf migrate` and the roll-out of the new package still sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from alembic import command
from psycopg import sql
from psycopg.conninfo import make_conninfo

import saf
from saf.broker.grants import Kind, grant
from saf.broker.migrate import config, migrate
from saf.broker.services import create_service
from saf.database import REVISION, Dsn, check_schema, fetch
from saf.database.queries import following
from saf.errors import SchemaMismatch
from tests.next_package import NEXT, next_package, python
from tests.pipeline import connect
from tests.programs import ROOT, configuration, received
from tests.recorded_senders import ROLE, recorded, revisions, send_as, today

NewDatabase = Callable[[str], Dsn]

UPGRADE = "upgrade the saf-outbox package"


def put_at(dsn: Dsn, revision: str) -> None:
    with connect(dsn) as connection:
        connection.execute("UPDATE saf.alembic_version SET version_num = %s", [revision])


@pytest.fixture(scope="module")
def new_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return next_package(tmp_path_factory.mktemp("next"))


@pytest.fixture
def sender(app: Dsn) -> Iterator[Dsn]:
    """A login of its own, without any right yet."""
    name = f"sender_{app.database}"
    with connect(app) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
    yield Dsn(make_conninfo(app.conninfo, user=name))
    with connect(app) as connection:
        connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def migrate_by(package: Path, dsn: Dsn) -> None:
    done = python(package, "-m", "saf", "migrate", "--dsn", dsn.conninfo)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{dsn.database}: saf schema {NEXT}, was {REVISION}\n"


@pytest.mark.slow
def test_an_instance_that_restarts_after_the_migration_sends_and_all_is_delivered(
    app: Dsn, mom: Dsn, sender: Dsn, new_package: Path, tmp_path: Path
) -> None:
    with connect(app) as connection:
        grant(connection, sender.parts["user"], [Kind.WRITER])
    with connect(mom) as connection:
        create_service(connection, "billing")
    for dsn in (app, mom):
        migrate_by(new_package, dsn)

    outbox = saf.Outbox()  # restarted: it has not sent before
    with psycopg.connect(sender.conninfo) as connection:
        outbox.send(connection, "billing", "1", key="A")
        numbers = [[str(n) for n in range(2, 5)], [str(n) for n in range(5, 205)]]
        for bodies in numbers:  # by INSERT, and by COPY
            outbox.send_many(
                connection, [saf.Message(service="billing", body=b, key="A") for b in bodies]
            )

    async def send() -> None:
        async with await psycopg.AsyncConnection.connect(sender.conninfo) as connection:
            await saf.Outbox().asend(connection, "billing", "205", key="A")

    asyncio.run(send())

    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    done = python(new_package, "-m", "saf", "forward", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert received(mom) == [("A", str(n)) for n in range(1, 206)]

    # everything else of the old package waits for the new one
    done = python(ROOT, "-m", "saf", "forward", cwd=tmp_path)
    assert done.returncode == 2
    assert UPGRADE in done.stderr


@pytest.mark.parametrize("before", revisions()[-2:])
def test_what_senders_of_a_revision_run_works_at_the_next(
    app: Dsn, sender: Dsn, new_package: Path, before: str
) -> None:
    record = recorded(before)
    if before != REVISION:
        command.downgrade(config(app), before)
    name = sql.Identifier(sender.parts["user"]).as_string(None)
    with connect(app) as connection:
        for right in record["rights"]:
            connection.execute(right.replace(f'"{ROLE}"', name))
    if before == REVISION:
        migrate_by(new_package, app)
    else:
        migrate(app)
    with psycopg.connect(sender.conninfo) as connection:
        sent = send_as(record, connection)
    with connect(app) as connection:
        assert fetch(connection, "SELECT version_num FROM saf.alembic_version") == [
            (following(before),)
        ]
        assert fetch(connection, "SELECT count(*) FROM saf.outbox") == [(sent,)]
        bodies = fetch(connection, "SELECT body, headers FROM saf.outbox ORDER BY id")
    third = len(bodies) // 3
    assert bodies[:third] == bodies[third : 2 * third] == bodies[2 * third :]


def test_what_senders_of_this_revision_run_is_recorded() -> None:
    assert today() == recorded(REVISION), "run python -m tests.recorded_senders"


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE saf.outbox RENAME COLUMN key TO shard_key",
        "ALTER TABLE saf.outbox ADD COLUMN priority smallint NOT NULL",
        "ALTER TABLE saf.outbox ADD CHECK (message_type IS NOT NULL)",
        "CREATE FUNCTION saf.priced(text) RETURNS boolean LANGUAGE sql RETURN true;"
        "REVOKE ALL ON FUNCTION saf.priced FROM PUBLIC;"
        "ALTER TABLE saf.outbox ADD CHECK (saf.priced(to_service))",
        "ALTER TABLE saf.alembic_version RENAME TO version",
    ],
)
def test_a_change_that_senders_before_it_cannot_bear_is_noticed(
    app: Dsn, sender: Dsn, change: str
) -> None:
    with connect(app) as connection:
        grant(connection, sender.parts["user"], [Kind.WRITER])
    record = recorded(REVISION)
    with psycopg.connect(sender.conninfo) as connection:
        send_as(record, connection)
        connection.rollback()
    with connect(app) as connection:
        connection.execute(change.encode())
    with psycopg.connect(sender.conninfo) as connection, pytest.raises(psycopg.Error):
        send_as(record, connection)


def test_two_revisions_ahead_are_refused(app: Dsn) -> None:
    put_at(app, following(NEXT))
    with connect(app) as connection, pytest.raises(SchemaMismatch, match=UPGRADE):
        saf.Outbox(allow_autocommit=True).send(connection, "billing", "")


def test_only_an_outbox_may_be_one_revision_behind(app: Dsn) -> None:
    with connect(app) as connection:
        create_service(connection, "shop")
    put_at(app, NEXT)
    with app.connect(role="test") as connection:
        with pytest.raises(SchemaMismatch, match=UPGRADE):
            saf.begin_dialog(connection, from_service="shop", to_service="billing")
        with pytest.raises(SchemaMismatch, match=UPGRADE):
            check_schema(connection)
        assert saf.Outbox().send(connection, "billing", "")


def test_a_sender_of_the_new_package_says_that_the_migration_is_missing(
    app: Dsn, new_package: Path
) -> None:
    program = f"""
import psycopg, saf
with psycopg.connect({app.conninfo!r}) as connection:
    try:
        saf.Outbox().send(connection, "billing", "")
    except saf.SchemaMismatch as refused:
        print(refused)
"""
    said = python(new_package, "-c", program).stdout
    assert f"has saf schema {REVISION}, this library needs {NEXT}: run `saf migrate" in said
