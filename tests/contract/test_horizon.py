"""A transaction that is never ended: PostgreSQL then keeps every version of every row."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from saf.database import Dsn
from saf.destinations.postgresql import inbox
from saf.log import backlog
from saf.log.shards import NEWEST
from tests.pipeline import Cycle, connect, forwarding_rules, send

CYCLES = 40
SHARDS = 64

ONE = {"subscription_id": 1}
PLAINLY = "SELECT * FROM saf.cursor WHERE subscription_id = %(subscription_id)s"


@pytest.fixture
def held(app: Dsn, mom: Dsn) -> Any:
    """Transactions that have begun before all, at both ends."""
    connections = [dsn.connect(role="test") for dsn in (app, mom)]
    for connection in connections:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT pg_current_xact_id()")
    yield
    for connection in connections:
        connection.close()


def _pages(connection: psycopg.Connection[Any], query: str, params: Any = None) -> int:
    """How many pages a query looks at."""
    explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query}"
    ((plan,),) = connection.execute(explain, params).fetchall()
    plan = json.loads(plan) if isinstance(plan, str) else plan
    return int(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])


def _lock(source: str) -> str:
    values = {
        "source": source,
        "shards": list(range(SHARDS)),
        "lanes": [""] * SHARDS,
    }
    literals = {name: psycopg.sql.Literal(value) for name, value in values.items()}
    return psycopg.sql.SQL(inbox.LOCK).format(**literals).as_string(None)


@pytest.mark.slow
@pytest.mark.usefixtures("held")
def test_versions_that_cannot_be_removed_are_not_looked_at(app: Dsn, mom: Dsn) -> None:
    with (
        Cycle(app, forwarding_rules(mom=mom)) as cycle,
        connect(app) as source,
        connect(mom) as there,
    ):
        for number in range(CYCLES):
            send(source, str(number), key=str(number))
            assert [receipt.error for receipt in cycle.run()] == [None, None]
        ((broker_id,),) = source.execute("SELECT broker_id::text FROM saf.broker").fetchall()

        cursors = _pages(source, f"SELECT * FROM {NEWEST} AS c", ONE)
        plainly = _pages(source, PLAINLY, ONE)
        figures = _pages(source, backlog.SHARDS)
        with there.transaction():
            watermarks = _pages(there, _lock(broker_id))

    # some pages of the index and one of the table for each, and one more for each lock
    assert cursors <= 5 * SHARDS
    assert figures <= 6 * SHARDS
    assert watermarks <= 6 * SHARDS
    assert plainly > CYCLES * 2, "without this way of asking, each cycle adds to it"
