"""What a lane waits for a handler of stands in columns, and nothing is forgotten up and down."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from alembic import command

from saf.broker.migrate import config
from saf.database import Dsn, fetch
from tests.pipeline import connect

INSERT = """
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, error, next_attempt_at,
                         awaits_handler, message_type)
SELECT subscription_id, '', %s, 'k', %s, 'it waits', %s, %s, %s FROM saf.subscription
WHERE name = 'forwarder'
"""
NEVER = "9999-01-01 00:00:00+00"
DUE = "SELECT subject, next_attempt_at <= now() FROM saf.backoff ORDER BY 1"


@pytest.mark.every_postgresql
def test_what_waits_for_a_handler_is_due_after_a_migration_up_or_down(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(INSERT, ["key", 7, NEVER, True, "New"])
    command.downgrade(config(app), "0017")
    with connect(app) as connection:
        assert fetch(connection, DUE) == [("k", True)]
        connection.execute("UPDATE saf.backoff SET next_attempt_at = '6543-02-01'")
        connection.execute(
            "INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, error, "
            "next_attempt_at) SELECT subscription_id, '', kind, other, shard, '', time "
            "FROM saf.backoff, (VALUES ('later', timestamptz '3000-01-01'), "
            "                          ('person', timestamptz '9999-01-01')) AS v (other, time)"
        )
    command.upgrade(config(app), "head")
    with connect(app) as connection:
        assert fetch(connection, DUE) == [("k", True), ("later", False), ("person", False)]
        assert fetch(
            connection, "SELECT DISTINCT awaits_handler, message_type FROM saf.backoff"
        ) == [(False, None)]


@pytest.mark.parametrize(
    "row",
    [
        ["key", None, NEVER, True, "New"],
        ["service", 7, NEVER, True, "New"],
        ["key", 7, "2026-01-01 00:00:00+00", True, "New"],
        ["key", 7, NEVER, False, "New"],
    ],
    ids=["no shard", "not of a key", "has a time", "a type, and no wait for it"],
)
def test_a_wait_for_a_handler_that_means_nothing_is_refused(app: Dsn, row: list[Any]) -> None:
    with connect(app) as connection, pytest.raises(psycopg.errors.CheckViolation) as refused:
        connection.execute(INSERT, row)
    assert refused.value.diag.constraint_name == "backoff_awaits_possible"
