"""The examples of docs/sending.md do what the page says."""

from __future__ import annotations

import re
import sys

import psycopg
import pytest

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.receiving.link import switch
from saf.routing.routes import add_route
from tests.pipeline import connect
from tests.programs import ROOT, run, url

pytestmark = pytest.mark.full

PAGE = (ROOT / "docs" / "sending.md").read_text()


def block(kind: str) -> str:
    (code,) = re.findall(rf"<!-- test: {kind} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    return str(code)


def sent(app: Dsn, code: str, driver: str = "psycopg") -> list[tuple[object, ...]]:
    env = {"DATABASE_URL": url(app).replace("psycopg", driver), "DSN": app.conninfo}
    done = run([sys.executable, "-c", code], env=env)
    assert done.returncode == 0, done.stderr
    with connect(app) as connection:
        return fetch(
            connection,
            "SELECT key, headers ->> 'content-type', convert_from(body, 'UTF8') "
            "FROM saf.outbox ORDER BY id",
        )


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_the_block_under_asyncio_sends(app: Dsn, driver: str) -> None:
    found = sent(app, block("asyncio"), driver)
    assert found == [("A-1", "application/json", '{"order":"A-1","total":90}')]


def test_the_block_without_asyncio_sends_one_and_many(app: Dsn) -> None:
    assert [key for key, *_ in sent(app, block("sync"))] == ["A-1", "A-2", "A-3"]


def test_a_session_of_several_engines_sends_on_the_connection_of_its_rows(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("CREATE TABLE orders (number text PRIMARY KEY)")
    assert [key for key, *_ in sent(app, block("several engines"))] == ["A-1"]
    with connect(app) as connection:
        assert fetch(connection, "SELECT number FROM orders") == [("A-1",)]


@pytest.mark.every_postgresql
def test_a_transaction_that_notifies_cannot_be_prepared_as_the_page_says(app: Dsn) -> None:
    with connect(app) as connection:
        create_service(connection, "billing")
        add_route(connection, "here", service="billing", local=True)
        switch(connection, True)
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="cannot PREPARE a trans"):
            prepare(app, "told")
        switch(connection, False)
        prepare(app, "not told")
        connection.execute(f"COMMIT PREPARED '{app.database}'")
        assert fetch(connection, "SELECT key FROM saf.inbox") == [("not told",)]


def prepare(app: Dsn, key: str) -> None:
    with app.connect(role="test") as connection:
        connection.execute("BEGIN")
        saf.Outbox().send(connection, "billing", b"", key=key)
        connection.execute(f"PREPARE TRANSACTION '{app.database}'")


def test_a_copy_sends_in_bulk(app: Dsn) -> None:
    total, kind = '{"total":90}', "application/json"
    assert sent(app, block("bulk")) == [(f"A-{number}", kind, total) for number in (1, 2, 3)]


def test_the_encoder_and_the_content_type_are_the_applications(app: Dsn) -> None:
    assert sent(app, block("encoder")) == [
        (None, "application/json", '{"price":1.5}'),
        (None, "application/xml", "<order/>"),
    ]


def test_by_name_a_message_is_held_once_moved_and_taken_back(app: Dsn) -> None:
    env = {"DSN": app.conninfo}
    done = run([sys.executable, "-c", block("by-name")], env=env)
    assert done.stdout == "True False True\nTrue\n", done.stderr
    with connect(app) as connection:
        assert fetch(connection, "SELECT to_service, name FROM saf.held WHERE due > now()") == [
            ("search", "reindex-42")
        ]
        assert fetch(connection, "SELECT FROM saf.outbox") == []


def test_sql_holds_moves_and_takes_back_by_name(app: Dsn) -> None:
    with connect(app) as connection:
        answers = [
            fetch(connection, statement)[0][0]
            for statement in block("sql-by-name").split(";")
            if statement.strip()
        ]
        assert answers[1:] == [True, True]
        assert fetch(connection, "SELECT FROM saf.held") == []
