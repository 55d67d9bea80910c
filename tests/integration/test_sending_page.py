"""The examples of docs/sending.md do what the page says."""

from __future__ import annotations

import re
import sys

import pytest

from saf.database import Dsn, fetch
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


def test_a_copy_sends_in_bulk(app: Dsn) -> None:
    total, kind = '{"total":90}', "application/json"
    assert sent(app, block("bulk")) == [(f"A-{number}", kind, total) for number in (1, 2, 3)]


def test_the_encoder_and_the_content_type_are_the_applications(app: Dsn) -> None:
    assert sent(app, block("encoder")) == [
        (None, "application/json", '{"price":1.5}'),
        (None, "application/xml", "<order/>"),
    ]
