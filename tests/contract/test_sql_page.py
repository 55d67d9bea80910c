"""The page of SQL statements has a plan for nearly all of them."""

from __future__ import annotations

import psycopg

from saf.database import Dsn
from tests.sql_page import page, plan, statements


def test_most_statements_have_a_plan_on_the_page(app: Dsn) -> None:
    whole = [statement for statement in statements() if statement.whole]
    with psycopg.connect(app.conninfo, autocommit=True) as connection:
        planned = [found for statement in whole if (found := plan(connection, statement))]
        text = page(connection)
    assert len(whole) > 200
    assert len(planned) > 0.9 * len(whole), "their tables and columns exist"
    assert all(found in text for found in planned)
