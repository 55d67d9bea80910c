"""Sending through whatever connection the application has."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row, namedtuple_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from saf import (
    AutocommitError,
    InvalidMessage,
    Message,
    Outbox,
    SchemaMismatch,
    SchemaMissing,
    Sent,
    UsageError,
)
from saf.broker.embedded import EmbeddedServer, programs
from saf.database import Dsn
from saf.message import FIRST_MOMENT, LAST_DAY, MAX_KEY, MAX_NAME
from tests.programs import run

SOON = datetime.now(UTC) + timedelta(hours=1)
PAST = datetime.now(UTC) - timedelta(hours=1)


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def engine(app: Dsn) -> Iterator[sa.Engine]:
    engine = app.engine()
    yield engine
    engine.dispose()


def stored(dsn: Dsn) -> list[dict[str, Any]]:
    with (
        dsn.connect(role="test") as connection,
        psycopg.Cursor[Any](connection, row_factory=dict_row) as cursor,
    ):
        return cursor.execute("SELECT * FROM saf.outbox ORDER BY id").fetchall()


def keys(dsn: Dsn) -> list[str | None]:
    return [row["key"] for row in stored(dsn)]


def many(count: int) -> list[Message]:
    return [Message(service="billing", body=b"", key=str(number)) for number in range(count)]


# Through each kind of connection


@pytest.mark.parametrize("count", [1, 2, 150])
@pytest.mark.parametrize("way", ["psycopg", "SQLAlchemy", "asyncio"])
def test_a_key_may_be_an_integer_or_a_uuid_however_many_are_sent_and_by_whatever(
    app: Dsn, engine: sa.Engine, outbox: Outbox, way: str, count: int
) -> None:
    given: list[str | int | UUID] = [7, UUID(int=7), "7"]
    messages = [Message(service="billing", body=b"", key=key) for key in given * count]

    async def send() -> None:
        async with await psycopg.AsyncConnection.connect(app.conninfo) as connection:
            await outbox.asend(connection, "billing", b"", key=given[0])
            await outbox.asend_many(connection, messages)

    if way == "asyncio":
        asyncio.run(send())
    elif way == "psycopg":
        with app.connect(role="test") as connection:
            outbox.send(connection, "billing", b"", key=given[0])
            outbox.send_many(connection, messages)
    else:
        with engine.begin() as sqlalchemy_connection:
            outbox.send(sqlalchemy_connection, "billing", b"", key=given[0])
            outbox.send_many(sqlalchemy_connection, messages)
    assert keys(app) == ["7", *["7", "00000000-0000-0000-0000-000000000007", "7"] * count]
    with app.connect(role="test") as connection:
        shards = connection.execute("SELECT DISTINCT key, shard FROM saf.outbox").fetchall()
    assert len(shards) == 2, "equal texts are one key, in one shard"


def test_of_many_messages_the_key_of_another_type_is_named_and_nothing_is_written(
    app: Dsn, outbox: Outbox
) -> None:
    key: Any = 7.5
    messages = [*many(200), Message(service="billing", body=b"", key=key)]
    with (
        app.connect(role="test") as connection,
        pytest.raises(InvalidMessage, match=r"messages\[200\]\.key: .*int or UUID, got float 7\.5"),
    ):
        outbox.send_many(connection, messages)
    assert keys(app) == []


def test_a_psycopg_connection_sends_every_field(app: Dsn, outbox: Outbox) -> None:
    broker = uuid4()
    with app.connect(role="test") as connection:
        sent = outbox.send(
            connection,
            "billing",
            {"order": 7},
            key="7",
            headers={"trace": "abc"},
            message_type="order placed",
            deliver_at=PAST,
            expires_at=SOON,
            to_broker=broker,
            from_service="shop",
        )
    (row,) = stored(app)
    assert row["message_id"] == sent
    assert (row["from_service"], row["to_service"], row["to_broker"]) == ("shop", "billing", broker)
    assert (row["key"], row["message_type"], row["body"]) == ("7", "order placed", b'{"order":7}')
    assert row["headers"] == {"content-type": "application/json", "trace": "abc"}
    assert (row["deliver_at"], row["expires_at"]) == (PAST, SOON)


def test_a_psycopg_cursor_sends_and_keeps_its_own_results(app: Dsn, outbox: Outbox) -> None:
    with app.connect(role="test") as connection, connection.cursor() as cursor:
        cursor.execute("SELECT generate_series(1, 3)")
        outbox.send(cursor, "billing", b"", key="A")
        outbox.send_many(cursor, many(2))
        assert cursor.fetchall() == [(1,), (2,), (3,)]
    assert keys(app) == ["A", "0", "1"]


@pytest.mark.parametrize("row_factory", [dict_row, namedtuple_row])
def test_a_row_factory_of_the_caller_is_no_hindrance(
    app: Dsn, outbox: Outbox, row_factory: Any
) -> None:
    with app.connect(role="test") as connection:
        connection.row_factory = row_factory
        outbox.send(connection, "billing", b"", key="A")
    assert keys(app) == ["A"]


def test_a_cursor_factory_of_the_caller_is_no_hindrance(app: Dsn, outbox: Outbox) -> None:
    with psycopg.connect(app.conninfo, cursor_factory=psycopg.RawCursor) as connection:
        outbox.send(connection, "billing", b"", key="A")
        outbox.send_many(connection, many(2))
    assert keys(app) == ["A", "0", "1"]


def test_a_pipeline_of_the_caller_is_no_hindrance(app: Dsn, outbox: Outbox) -> None:
    with app.connect(role="test") as connection, connection.pipeline():
        outbox.send(connection, "billing", b"", key="A")
        outbox.send_many(connection, many(2))
    assert keys(app) == ["A", "0", "1"]


def test_a_sqlalchemy_connection_sends_every_field(
    app: Dsn, engine: sa.Engine, outbox: Outbox
) -> None:
    broker = uuid4()
    with engine.begin() as connection:
        sent = outbox.send(
            connection,
            "billing",
            "grüezi",
            key="ü:x%s",
            headers={"a": [1, None]},
            message_type="t",
            deliver_at=PAST,
            expires_at=SOON,
            to_broker=broker,
            from_service="shop",
        )
    (row,) = stored(app)
    assert row["message_id"] == sent
    assert (row["from_service"], row["to_service"], row["to_broker"]) == ("shop", "billing", broker)
    assert (row["key"], row["message_type"], row["body"]) == ("ü:x%s", "t", "grüezi".encode())
    assert row["headers"] == {"content-type": "text/plain; charset=utf-8", "a": [1, None]}
    assert (row["deliver_at"], row["expires_at"]) == (PAST, SOON)


def test_a_session_sends_before_and_after_its_first_query(
    app: Dsn, engine: sa.Engine, outbox: Outbox
) -> None:
    with Session(engine) as session, session.begin():
        outbox.send(session, "billing", b"", key="A")
        session.execute(sa.text("SELECT 1"))
        outbox.send_many(session, many(2))
    assert keys(app) == ["A", "0", "1"]


def test_a_scoped_session_sends(app: Dsn, engine: sa.Engine, outbox: Outbox) -> None:
    session = scoped_session(sessionmaker(engine))
    outbox.send(session, "billing", b"", key="A")
    session.commit()
    session.remove()
    assert keys(app) == ["A"]


def test_a_session_without_a_commit_sends_nothing(
    app: Dsn, engine: sa.Engine, outbox: Outbox
) -> None:
    with Session(engine) as session:
        outbox.send(session, "billing", b"", key="A")
    assert keys(app) == []


def test_an_asyncio_session_sends(app: Dsn, outbox: Outbox) -> None:
    async def business() -> list[UUID]:
        engine = create_async_engine(
            "postgresql+psycopg://",
            async_creator=lambda: psycopg.AsyncConnection.connect(app.conninfo),
        )
        async with AsyncSession(engine) as session, session.begin():
            first = await session.run_sync(outbox.send, "billing", {"a": 1}, key="A")
            rest = await session.run_sync(outbox.send_many, many(2))
        async with AsyncSession(engine) as session:
            await session.run_sync(outbox.send, "billing", b"", key="rolled back")
        await engine.dispose()
        return [first, *rest]

    sent = asyncio.run(business())
    assert [row["message_id"] for row in stored(app)] == sent
    assert keys(app) == ["A", "0", "1"]


def test_django_sends_inside_an_atomic_block(app: Dsn) -> None:
    done = run(
        [sys.executable, "-c", DJANGO], env={"DATABASE": app.database, "HOST": app.parts["host"]}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["AutocommitError"]
    assert keys(app) == ["A", "0", "1"]


DJANGO = """
import os
import django
from django.conf import settings

settings.configure(DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": os.environ["DATABASE"], "HOST": os.environ["HOST"], "USER": "postgres", "PORT": 5432,
}})
django.setup()
from django.db import connection, transaction
import saf

outbox = saf.Outbox()
with transaction.atomic():
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        outbox.send(connection.connection, "billing", {"a": 1}, key="A")
    try:
        with transaction.atomic():
            outbox.send(connection.connection, "billing", b"", key="rolled back")
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    outbox.send_many(connection.connection, [
        saf.Message(service="billing", body=b"", key=str(n)) for n in range(2)])
try:
    outbox.send(connection.connection, "billing", b"", key="outside")
except saf.AutocommitError as refused:
    print(type(refused).__name__)
connection.close()
"""


def test_a_plain_insert_from_psql_is_a_send(app: Dsn, server: EmbeddedServer) -> None:
    insert = "INSERT INTO saf.outbox (to_service, key, body) VALUES ('billing', 'A', 'grüezi')"
    psql = programs(server.version) / "psql"
    subprocess.run([psql, "-X", "-q", "-d", app.conninfo, "-c", insert], check=True)
    (row,) = stored(app)
    assert (row["to_service"], row["key"], row["body"]) == ("billing", "A", "grüezi".encode())
    assert isinstance(row["message_id"], UUID)
    assert row["shard"] is not None
    assert row["txid"] is not None


def test_a_trigger_sends_in_the_transaction_that_fired_it(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        connection.execute(TRIGGER)
        connection.commit()
        connection.execute("INSERT INTO orders VALUES ('A'), ('B')")
        connection.commit()
        connection.execute("INSERT INTO orders VALUES ('rolled back')")
        connection.rollback()
    assert keys(app) == ["A", "B"]
    assert [row["body"] for row in stored(app)] == [b'{"number": "A"}', b'{"number": "B"}']


TRIGGER = """
CREATE TABLE orders (number text PRIMARY KEY);
CREATE FUNCTION announce() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO saf.outbox (to_service, key, headers, body)
    VALUES ('billing', NEW.number, '{"content-type": "application/json"}',
            convert_to(jsonb_build_object('number', NEW.number)::text, 'UTF8'));
    RETURN NEW;
END $$;
CREATE TRIGGER announce AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION announce();
"""


def test_another_thing_than_a_connection_is_refused_by_name(outbox: Outbox) -> None:
    with pytest.raises(UsageError, match=r"cannot use a builtins\.str: expected a SQLAlchemy"):
        outbox.send("postgresql://", "billing", b"")  # type: ignore[arg-type]


# Many at once


@contextmanager
def statements(server: EmbeddedServer, dsn: Dsn) -> Iterator[list[str]]:
    """What the server itself says it was asked to execute meanwhile, in that database."""
    log = server.data_dir / "server.log"
    found: list[str] = []
    with dsn.connect(role="test", autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE \"{dsn.database}\" SET log_statement = 'all'")
    begin = log.stat().st_size
    yield found
    text = log.read_bytes()[begin:].decode()
    found += re.findall(r"LOG:  (?:execute [^:]*|statement): (.*)", text)


def test_a_thousand_messages_are_one_copy(app: Dsn, outbox: Outbox, server: EmbeddedServer) -> None:
    with statements(server, app) as found, app.connect(role="test") as connection:
        outbox.send(connection, "billing", b"", key="first")
        connection.commit()
        sent = outbox.send_many(connection, many(1000))
    assert [row["message_id"] for row in stored(app)][1:] == sent
    assert len([text for text in found if "INSERT" in text.upper()]) == 1
    # the first send looks at the schema; from then on a COPY only asks whether it may
    assert [text.split()[0] for text in found[-4:]] == ["BEGIN", "SELECT", "COPY", "COMMIT"]


def test_a_hundred_messages_but_one_are_one_insert(
    app: Dsn, outbox: Outbox, server: EmbeddedServer
) -> None:
    with statements(server, app) as found, app.connect(role="test") as connection:
        outbox.send(connection, "billing", b"", key="first")
        connection.commit()
        outbox.send_many(connection, many(99))
    assert [text.split()[0] for text in found[-3:]] == ["BEGIN", "INSERT", "COMMIT"]


def test_a_thousand_messages_through_sqlalchemy_are_in_its_transaction(
    app: Dsn, outbox: Outbox, server: EmbeddedServer
) -> None:
    engine = app.engine()
    with statements(server, app) as found:
        with Session(engine) as session, session.begin():
            sent = outbox.send_many(session, many(1000))
        with engine.connect() as connection:  # its first statement of all begins the transaction
            sent += outbox.send_many(connection, many(1000))
            connection.commit()
            outbox.send_many(connection, many(1000))
            connection.rollback()
        with engine.connect() as connection:
            outbox.send_many(connection, many(1000))
    engine.dispose()
    assert [row["message_id"] for row in stored(app)] == sent
    assert len([text for text in found if "COPY" in text.upper()]) == 4


def test_many_messages_are_sent_in_a_pipeline(app: Dsn, outbox: Outbox) -> None:
    with app.connect(role="test") as connection, connection.pipeline():
        sent = outbox.send_many(connection, many(1000))
    assert [row["message_id"] for row in stored(app)] == sent


def test_what_a_copy_stores_is_what_an_insert_stores(app: Dsn, outbox: Outbox) -> None:
    messages = [
        Message(
            service="a\\b\tc\nd",
            body=bytes(range(256)) * (number % 3),
            key=[None, "", "\\N", "\\.", "ü\r\n\t"][number % 5] or None,
            headers=[{}, {"x": "\\N\t\n", "y": {"z": [1, None]}}][number % 2],
            message_type=[None, "\\x41"][number % 2],
            expires_at=[None, SOON][number % 2],
            to_broker=[None, UUID(int=3)][number % 2],
        )
        for number in range(200)
    ]
    with app.connect(role="test") as connection:
        outbox.send_many(connection, messages)
        for start in range(0, 200, 50):
            outbox.send_many(connection, messages[start : start + 50])
    rows = [
        {
            name: value
            for name, value in row.items()
            if name not in ("id", "message_id", "created_at", "shard")
        }
        for row in stored(app)
    ]
    assert rows[:200] == rows[200:]


def test_ids_rise_in_the_order_of_sending(app: Dsn, outbox: Outbox) -> None:
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", b"", key="first")
        outbox.send_many(connection, many(1000))
        outbox.send(connection, "billing", b"", key="last")
    assert keys(app) == ["first", *map(str, range(1000)), "last"]


def test_many_messages_keep_their_optional_fields_apart(app: Dsn, engine: sa.Engine) -> None:
    outbox = Outbox(from_service="shop")
    messages = [
        Message(service="a", body=b"1"),
        Message(service="b", body="2", key="k", deliver_at=PAST, from_service="other"),
        Message(service="c", body=[3], headers={"x": {"y": 1}}, to_broker=UUID(int=3)),
    ]
    with app.connect(role="test") as connection:
        outbox.send_many(connection, messages)
    with engine.begin() as sqlalchemy_connection:
        outbox.send_many(sqlalchemy_connection, messages)
    rows = stored(app)
    for three in (rows[:3], rows[3:]):
        assert [row["to_service"] for row in three] == ["a", "b", "c"]
        assert [row["key"] for row in three] == [None, "k", None]
        assert [row["body"] for row in three] == [b"1", b"2", b"[3]"]
        assert [row["deliver_at"] for row in three] == [None, PAST, None]
        assert [row["from_service"] for row in three] == ["shop", "other", "shop"]
        assert [row["to_broker"] for row in three] == [None, None, UUID(int=3)]
        assert three[2]["headers"] == {"content-type": "application/json", "x": {"y": 1}}


@pytest.fixture
def small_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("saf.outbox", "saf.transaction"):
        monkeypatch.setattr(f"{module}.LARGEST_STATEMENT", 1000)


def large(*sizes: int) -> list[Message]:
    """Messages of about so many bytes, with their headers."""
    return [
        Message(service="billing", body=b"x" * (size - 50), key=str(number))
        for number, size in enumerate(sizes)
    ]


@pytest.mark.usefixtures("small_statements")
@pytest.mark.parametrize("way", ["psycopg", "SQLAlchemy", "asyncio"])
def test_large_messages_are_several_statements_and_stay_in_their_order(
    app: Dsn, outbox: Outbox, engine: sa.Engine, server: EmbeddedServer, way: str
) -> None:
    messages = large(300, 300, 300, 300, 3000, 300)

    async def send() -> list[Sent]:
        async with await psycopg.AsyncConnection.connect(app.conninfo) as connection:
            return await outbox.asend_many(connection, messages)

    with statements(server, app) as found:
        if way == "asyncio":
            sent = asyncio.run(send())
        elif way == "psycopg":
            with app.connect(role="test") as connection:
                sent = outbox.send_many(connection, messages)
        else:
            with engine.begin() as sqlalchemy_connection:
                sent = outbox.send_many(sqlalchemy_connection, messages)
    assert [row["message_id"] for row in stored(app)] == sent
    assert keys(app) == list("012345")
    assert len([text for text in found if text.startswith("INSERT")]) == 4


@pytest.mark.usefixtures("small_statements")
def test_large_messages_are_refused_where_each_statement_would_be_a_transaction(app: Dsn) -> None:
    outbox, messages = Outbox(allow_autocommit=True), large(600, 600)

    async def send() -> None:
        async with await psycopg.AsyncConnection.connect(app.conninfo, autocommit=True) as one:
            await outbox.asend_many(one, messages)

    with app.connect(role="test", autocommit=True) as connection:
        with pytest.raises(InvalidMessage, match="messages: more than 1,000 bytes need several"):
            outbox.send_many(connection, messages)
        with pytest.raises(InvalidMessage, match="open a transaction, or send fewer messages"):
            asyncio.run(send())
        assert stored(app) == []
        with connection.transaction():
            outbox.send_many(connection, messages)
    assert keys(app) == ["0", "1"]


def test_no_messages_are_no_statement_at_all(app: Dsn, outbox: Outbox) -> None:
    with app.connect(role="test") as connection:
        assert outbox.send_many(connection, []) == []
    assert stored(app) == []


# Autocommit


def test_a_psycopg_connection_in_autocommit_is_refused(app: Dsn, outbox: Outbox) -> None:
    with app.connect(role="test", autocommit=True) as connection:
        with pytest.raises(AutocommitError, match="autocommit and no transaction is open"):
            outbox.send(connection, "billing", b"")
        with pytest.raises(AutocommitError):
            outbox.send_many(connection.cursor(), many(1))
    assert stored(app) == []


def test_an_open_transaction_makes_autocommit_acceptable(app: Dsn, outbox: Outbox) -> None:
    with app.connect(role="test", autocommit=True) as connection:
        with connection.transaction():
            outbox.send(connection, "billing", b"", key="A")
        connection.execute("BEGIN")
        outbox.send(connection, "billing", b"", key="B")
        connection.execute("COMMIT")
    assert keys(app) == ["A", "B"]


def test_a_sqlalchemy_connection_in_autocommit_is_refused(app: Dsn, outbox: Outbox) -> None:
    engine = app.engine(isolation_level="AUTOCOMMIT")
    with Session(engine) as session:
        with pytest.raises(AutocommitError):
            outbox.send(session, "billing", b"")
        with pytest.raises(AutocommitError):
            outbox.send(session.connection(), "billing", b"")
    engine.dispose()
    assert stored(app) == []


def test_who_means_it_may_send_in_autocommit(app: Dsn) -> None:
    outbox = Outbox(allow_autocommit=True)
    engine = app.engine(isolation_level="AUTOCOMMIT")
    with app.connect(role="test", autocommit=True) as connection:
        outbox.send(connection, "billing", b"", key="A")
    with engine.connect() as sqlalchemy_connection:
        outbox.send(sqlalchemy_connection, "billing", b"", key="B")
    engine.dispose()
    assert keys(app) == ["A", "B"]


# The schema

USABLE = "INSERT INTO orders VALUES ('A')"


def orders(dsn: Dsn) -> int:
    with dsn.connect(role="test") as connection:
        return len(connection.execute("SELECT FROM orders").fetchall())


def refused_in_a_business_transaction(dsn: Dsn, outbox: Outbox, error: type[Exception]) -> str:
    """Send amid a business transaction, which must survive the refusal; return its words."""
    with dsn.connect(role="test") as connection:
        connection.execute("CREATE TABLE orders (number text)")
        connection.commit()
        connection.execute(USABLE)
        with pytest.raises(error) as refused:
            outbox.send(connection, "billing", b"")
        connection.execute(USABLE)
    assert orders(dsn) == 2
    engine = dsn.engine()
    with Session(engine) as session, session.begin():
        session.execute(sa.text(USABLE))
        with pytest.raises(error):
            outbox.send_many(session, many(2))
        session.execute(sa.text(USABLE))
    engine.dispose()
    assert orders(dsn) == 4
    return str(refused.value)


def test_a_database_without_the_schema_is_refused_and_the_transaction_survives(
    new_database: Callable[[str], Dsn], outbox: Outbox
) -> None:
    dsn = new_database("plain")
    said = refused_in_a_business_transaction(dsn, outbox, SchemaMissing)
    assert dsn.database in said
    assert "run `saf migrate" in said


@pytest.mark.parametrize(
    ("revision", "way_out"),
    [("0000", "run `saf migrate"), ("9999", "upgrade the saf-outbox package")],
)
def test_an_older_or_newer_schema_is_refused_and_the_transaction_survives(
    app: Dsn, outbox: Outbox, revision: str, way_out: str
) -> None:
    with app.connect(role="test") as connection:
        connection.execute("UPDATE saf.alembic_version SET version_num = %s", [revision])
    said = refused_in_a_business_transaction(app, outbox, SchemaMismatch)
    assert revision in said
    assert way_out in said
    assert stored(app) == []


def test_a_refused_database_is_accepted_once_it_is_migrated(app: Dsn, outbox: Outbox) -> None:
    with app.connect(role="test") as connection:
        connection.execute("UPDATE saf.alembic_version SET version_num = '0000'")
        with pytest.raises(SchemaMismatch):
            outbox.send(connection, "billing", b"")
        connection.rollback()
        outbox.send(connection, "billing", b"", key="A")
    assert keys(app) == ["A"]


# Bad input, and its limits

BAD: list[dict[str, Any]] = [
    {"service": ""},
    {"service": "x" * (MAX_NAME + 1)},
    {"key": ""},
    {"key": "x" * (MAX_KEY + 1)},
    {"key": "a\0b"},
    {"body": "x" * 101},
    {"body": object()},
    {"headers": {"x": "\0"}},
    {"deliver_at": datetime(2026, 1, 1)},
    {"expires_at": datetime(2026, 1, 1)},
    {"expires_at": datetime.max.replace(tzinfo=UTC)},
    {"headers": {"content-type": "\0"}},
]


@pytest.mark.parametrize("fields", BAD, ids=lambda fields: next(iter(fields)))
def test_bad_input_writes_nothing_and_leaves_the_transaction_usable(
    app: Dsn, fields: dict[str, Any]
) -> None:
    outbox = Outbox(max_bytes=100)
    arguments = {"service": "billing", "body": b"", **fields}
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", b"", key="before")
        with pytest.raises(InvalidMessage) as refused:
            outbox.send(connection, **arguments)
        assert refused.value.field == next(iter(fields))
        with pytest.raises(InvalidMessage):
            outbox.send_many(connection, [*many(3), Message(**arguments)])
        outbox.send(connection, "billing", b"", key="after")
    assert keys(app) == ["before", "after"]


def test_bad_input_opens_no_transaction(app: Dsn, outbox: Outbox) -> None:
    with app.connect(role="test") as connection:
        with pytest.raises(InvalidMessage):
            outbox.send(connection, "", b"")
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_the_largest_accepted_names_and_bodies_are_stored(app: Dsn) -> None:
    outbox = Outbox(max_bytes=1 << 20)
    with app.connect(role="test") as connection:
        outbox.send(
            connection,
            "ü" * (MAX_NAME // 2),
            b"\xff" * (1 << 20),
            key="😀" * (MAX_KEY // 4),
            message_type="t" * MAX_NAME,
        )
    (row,) = stored(app)
    assert len(row["body"]) == 1 << 20
    assert row["key"] == "😀" * (MAX_KEY // 4)


def test_every_time_zone_is_stored_as_the_same_moment(app: Dsn, outbox: Outbox) -> None:
    from zoneinfo import ZoneInfo

    with app.connect(role="test") as connection:
        connection.execute("SET TIME ZONE 'Asia/Tokyo'")
        outbox.send(connection, "a", b"", deliver_at=PAST.astimezone(ZoneInfo("America/New_York")))
    assert stored(app)[0]["deliver_at"] == PAST


def test_the_first_and_the_last_moment_of_the_calendar_are_stored(app: Dsn) -> None:
    first, last = FIRST_MOMENT, LAST_DAY - timedelta(microseconds=1)
    message = Message(service="billing", body=b"", deliver_at=first, expires_at=last)
    with app.connect(role="test") as connection:
        Outbox().send_many(connection, [message])
        Outbox().send_many(connection, [message] * 100)
        connection.execute("SET TIME ZONE 'UTC'")
        rows = connection.execute("SELECT deliver_at, expires_at FROM saf.outbox").fetchall()
    assert rows == [(first, last)] * 101


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME + 1), "a\0b", 7])
def test_who_sends_has_a_name_that_a_service_can_have(app: Dsn, name: Any) -> None:
    with pytest.raises(InvalidMessage, match="from_service: "):
        Outbox(from_service=name)
    outbox = Outbox(from_service="shop")
    with app.connect(role="test") as connection:
        with pytest.raises(InvalidMessage, match="from_service: "):
            outbox.send(connection, "billing", b"", from_service=name)
        with pytest.raises(InvalidMessage, match="from_service: "):
            outbox.send_many(connection, [Message(service="billing", body=b"", from_service=name)])


def test_hostile_text_is_data(app: Dsn, engine: sa.Engine, outbox: Outbox) -> None:
    hostile = """'; DROP TABLE saf.outbox; -- \\ %s :key {} "$1\""""
    with app.connect(role="test") as connection:
        outbox.send(connection, hostile, hostile, key=hostile, headers={hostile: hostile})
    with engine.begin() as sqlalchemy_connection:
        outbox.send(sqlalchemy_connection, hostile, hostile, key=hostile)
        outbox.send_many(sqlalchemy_connection, [Message(service=hostile, body=b"", key=hostile)])
    assert keys(app) == [hostile] * 3


def test_the_first_send_checks_the_schema_and_later_ones_do_not(
    app: Dsn, outbox: Outbox, server: EmbeddedServer
) -> None:
    with statements(server, app) as found, app.connect(role="test") as connection:
        for _ in range(3):
            outbox.send(connection, "billing", b"")
    assert len([text for text in found if text.startswith("SELECT version_num")]) == 1
    assert len(found) == len(set(found)) + 2, "only the INSERT came three times"
    assert len([text for text in found if text.startswith("INSERT")]) == 3


def test_a_role_that_only_sends_needs_three_rights(app: Dsn, outbox: Outbox) -> None:
    role = f"sender_{app.database}"
    with app.connect(role="test", autocommit=True) as connection:
        connection.execute(
            f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA saf TO {role}; "
            f"GRANT SELECT ON saf.alembic_version TO {role}; GRANT INSERT ON saf.outbox TO {role}"
        )
        with connection.transaction():
            connection.execute(f"SET LOCAL ROLE {role}")
            outbox.send(connection, "billing", b"", key="A")
            outbox.send_many(connection, many(2))
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert keys(app) == ["A", "0", "1"]


def test_the_package_is_typed() -> None:
    import saf

    assert (Path(saf.__file__).parent / "py.typed").exists()
