"""Guarantee 1, atomic: a message exists if and only if the transaction that sent it committed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from saf import Message, Outbox, UsageError
from saf.database import Dsn

pytestmark = pytest.mark.every_postgresql

outbox = Outbox()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[str] = mapped_column(primary_key=True)


@pytest.fixture
def engines(shop: Dsn) -> Iterator[tuple[sa.Engine, sa.Engine]]:
    """Two engines of one database: one for orders, and the default of a session."""
    engines = shop.engine(), shop.engine()
    yield engines
    for engine in engines:
        engine.dispose()


@pytest.fixture
def shop(app: Dsn) -> Dsn:
    """A broker with a business table."""
    with app.connect(role="test") as connection:
        connection.execute("CREATE TABLE orders (number text PRIMARY KEY)")
    return app


def rows(dsn: Dsn) -> tuple[list[str], list[str]]:
    """The committed orders, and the keys of the committed messages."""
    with dsn.connect(role="test") as connection:
        orders = connection.execute("SELECT number FROM orders ORDER BY 1").fetchall()
        keys = connection.execute("SELECT key FROM saf.outbox ORDER BY id").fetchall()
    return [row[0] for row in orders], [row[0] for row in keys]


def place(connection: psycopg.Connection[Any], number: str) -> None:
    """The business transaction: the order's row and its message."""
    connection.execute("INSERT INTO orders VALUES (%s)", [number])
    outbox.send(connection, "billing", {"order": number}, key=number)


def test_a_message_exists_once_its_transaction_has_committed(shop: Dsn) -> None:
    with shop.connect(role="test") as connection:
        place(connection, "A")
        assert rows(shop) == ([], [])
        connection.commit()
        assert rows(shop) == (["A"], ["A"])


def test_a_rollback_takes_the_message_with_it(shop: Dsn) -> None:
    with shop.connect(role="test") as connection:
        place(connection, "A")
        connection.rollback()
    assert rows(shop) == ([], [])


def test_an_exception_in_the_business_code_takes_the_message_with_it(shop: Dsn) -> None:
    engine = shop.engine()

    def business() -> None:
        with Session(engine) as session, session.begin():
            session.execute(sa.text("INSERT INTO orders VALUES ('A')"))
            outbox.send(session, "billing", b"", key="A")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        business()
    engine.dispose()
    assert rows(shop) == ([], [])


def test_a_rolled_back_savepoint_takes_only_its_own_messages(shop: Dsn) -> None:
    with shop.connect(role="test") as connection:
        place(connection, "A")
        with connection.transaction(), connection.transaction() as savepoint:
            place(connection, "B")
            raise psycopg.Rollback(savepoint)
        with connection.transaction():
            place(connection, "C")
    assert rows(shop) == (["A", "C"], ["A", "C"])


def test_a_savepoint_that_is_kept_goes_when_its_transaction_rolls_back(shop: Dsn) -> None:
    with shop.connect(role="test") as connection, connection.transaction() as outer:
        with connection.transaction():
            place(connection, "A")
        raise psycopg.Rollback(outer)
    assert rows(shop) == ([], [])


def test_a_nested_session_transaction_takes_only_its_own_messages(shop: Dsn) -> None:
    engine = shop.engine()
    with Session(engine) as session, session.begin():
        outbox.send(session, "billing", b"", key="A")
        with session.begin_nested() as nested:
            outbox.send(session, "billing", b"", key="B")
            nested.rollback()
        outbox.send(session, "billing", b"", key="C")
    engine.dispose()
    assert rows(shop) == ([], ["A", "C"])


def test_a_failed_insert_into_the_outbox_rolls_the_business_transaction_back(shop: Dsn) -> None:
    with shop.connect(role="test") as connection:
        # a fault that only the database can see
        connection.execute("ALTER TABLE saf.outbox ADD CONSTRAINT fault CHECK (key <> 'B')")
    with shop.connect(role="test") as connection:
        place(connection, "A")
    with pytest.raises(psycopg.errors.CheckViolation), shop.connect(role="test") as connection:
        place(connection, "B")
    assert rows(shop) == (["A"], ["A"])


def test_a_swallowed_failure_of_the_outbox_still_cannot_commit_the_business_row(shop: Dsn) -> None:
    with shop.connect(role="test") as connection:
        connection.execute("ALTER TABLE saf.outbox ADD CONSTRAINT fault CHECK (key <> 'B')")
    with shop.connect(role="test") as connection:
        with pytest.raises(psycopg.errors.CheckViolation):
            place(connection, "B")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            connection.execute("INSERT INTO orders VALUES ('C')")
        connection.commit()
    assert rows(shop) == ([], [])


def test_one_bad_message_of_many_leaves_none(shop: Dsn) -> None:
    with shop.connect(role="test") as connection:
        connection.execute("ALTER TABLE saf.outbox ADD CONSTRAINT fault CHECK (key <> 'B')")
        connection.commit()
        connection.execute("INSERT INTO orders VALUES ('A')")
        messages = [Message(service="billing", body=b"", key=key) for key in "ABC"]
        with pytest.raises(psycopg.errors.CheckViolation):
            outbox.send_many(connection, messages)
        connection.rollback()
    assert rows(shop) == ([], [])


def test_a_prepared_transaction_has_its_message_from_its_commit_on(shop: Dsn) -> None:
    for number, end in (("kept", "COMMIT"), ("dropped", "ROLLBACK")):
        # the name is the whole server's
        gid = f"{shop.database} {number}"
        with shop.connect(role="test") as connection:
            place(connection, number)
            connection.execute(f"PREPARE TRANSACTION '{gid}'")
        assert number not in rows(shop)[1]
        with shop.connect(role="test", autocommit=True) as connection:
            connection.execute(f"{end} PREPARED '{gid}'")
    assert rows(shop) == (["kept"], ["kept"])


def test_a_killed_application_leaves_no_message(shop: Dsn) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, shop.for_role("test")], check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    assert rows(shop) == ([], [])


def test_a_transaction_whose_connection_breaks_leaves_no_message(shop: Dsn) -> None:
    with shop.connect(role="test") as victim, shop.connect(role="test") as killer:
        place(victim, "A")
        killer.execute("SELECT pg_terminate_backend(%s)", [victim.info.backend_pid])
        with pytest.raises(psycopg.OperationalError):
            outbox.send(victim, "billing", b"", key="B")
        victim.close()
    assert rows(shop) == ([], [])


KILLED = """
import os, signal, sys, psycopg, saf

connection = psycopg.connect(sys.argv[1])
connection.execute("INSERT INTO orders VALUES ('A')")
saf.Outbox().send(connection, "billing", b"", key="A")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_session_whose_rows_are_on_another_connection_sends_nothing(
    shop: Dsn, engines: tuple[sa.Engine, sa.Engine]
) -> None:
    orders, default = engines
    with Session(default, binds={Order: orders}) as session:
        session.add(Order(number="A"))
        session.flush()
        with pytest.raises(UsageError, match=r"bind_arguments"):
            outbox.send(session, "billing", b"", key="A")
    assert rows(shop) == ([], [])


@pytest.mark.parametrize("nested", [False, True])
def test_a_message_does_not_outlive_rows_that_a_session_writes_later_on_another_connection(
    shop: Dsn, engines: tuple[sa.Engine, sa.Engine], *, nested: bool
) -> None:
    orders, default = engines
    with shop.connect(role="test") as connection:
        connection.execute("INSERT INTO orders VALUES ('A')")
    with Session(default, binds={Order: orders}) as session:
        if nested:
            session.begin_nested()
        outbox.send(session, "billing", b"", key="A")
        session.add(Order(number="A"))  # exists, so the business transaction fails at commit
        with pytest.raises(UsageError, match=r"bind_arguments"):
            session.commit()
    assert rows(shop) == (["A"], [])


def test_a_session_of_several_engines_sends_on_the_connection_that_it_is_given(
    shop: Dsn, engines: tuple[sa.Engine, sa.Engine]
) -> None:
    orders, default = engines
    with Session(default, binds={Order: orders}) as session, session.begin():
        session.execute(sa.text("SELECT 1"))  # on the default
        session.add(Order(number="A"))
        where = session.connection(bind_arguments={"mapper": Order})
        outbox.send(where, "billing", b"", key="A")
    assert rows(shop) == (["A"], ["A"])


def test_a_session_of_several_engines_that_are_prepared_together_sends(
    shop: Dsn, engines: tuple[sa.Engine, sa.Engine]
) -> None:
    orders, default = engines
    with Session(default, binds={Order: orders}, twophase=True) as session, session.begin():
        outbox.send(session, "billing", b"", key="A")
        session.add(Order(number="A"))
    assert rows(shop) == (["A"], ["A"])


def test_a_session_that_has_sent_writes_elsewhere_in_its_next_transaction(
    shop: Dsn, engines: tuple[sa.Engine, sa.Engine]
) -> None:
    orders, default = engines
    with Session(default, binds={Order: orders}) as session:
        outbox.send(session, "billing", b"", key="A")
        session.commit()
        session.add(Order(number="B"))
        session.commit()
    assert rows(shop) == (["B"], ["A"])


def test_a_session_without_a_default_engine_is_told_how_to_pass_its_connection(
    engines: tuple[sa.Engine, sa.Engine],
) -> None:
    with (
        Session(binds={Order: engines[0]}) as session,
        pytest.raises(UsageError, match=r"bind_arguments"),
    ):
        outbox.send(session, "billing", b"")
