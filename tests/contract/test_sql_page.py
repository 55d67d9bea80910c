"""docs/sql.md has each statement as it is."""

from __future__ import annotations

import psycopg

from saf.database import Dsn
from tests.sql_page import PAGE, page, plan, statements, without_plans


def test_the_page_has_every_statement_as_a_server_gets_it() -> None:
    same = without_plans(PAGE.read_text()) == page()
    assert same, "run `python -m tests.sql_page`, which writes docs/sql.md"


def test_most_statements_have_a_plan(app: Dsn) -> None:
    whole = [one for one in statements() if one.whole]
    with psycopg.connect(app.conninfo, autocommit=True) as connection:
        planned = [one for one in whole if plan(connection, one)]
    assert len(whole) > 200
    assert len(planned) > 0.9 * len(whole), "their tables and columns are there"
