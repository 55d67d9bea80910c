"""Lanes that mean nothing are refused by the database."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest

from saf.database import Dsn
from saf.setaside.lane import NO_BROKER
from saf.setaside.parking import BLOCKED
from tests.pipeline import connect

AT = UUID("00000000-0000-4000-8000-000000000007")


@pytest.mark.parametrize("table", ["parked", "backoff"])
@pytest.mark.parametrize(
    ("kind", "subject", "broker"),
    [("nothing", "", NO_BROKER), ("main", "s", NO_BROKER), ("service", "s", AT)],
)
def test_a_lane_that_means_nothing_is_refused(
    app: Dsn, table: str, kind: str, subject: str, broker: UUID
) -> None:
    more = "shard, id, batch, position, to_service, body" if table == "parked" else "error"
    values = "0, 1, 1, 1, 's', ''" if table == "parked" else "'it waits'"
    with connect(app) as connection, pytest.raises(psycopg.errors.CheckViolation) as refused:
        connection.execute(
            f"INSERT INTO saf.{table} (subscription_id, destination, kind, subject, broker, {more})"
            f" SELECT subscription_id, 'mom', %s, %s, %s, {values} FROM saf.subscription",
            [kind, subject, broker],
        )
    assert refused.value.diag.constraint_name == f"{table}_lane_possible"


AWAIT = """
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, error, next_attempt_at,
                         awaits_handler, message_type)
SELECT subscription_id, '', %s, 'k', %s, 'it waits', %s, %s, %s FROM saf.subscription
WHERE name = 'forwarder'
"""


@pytest.mark.every_postgresql
@pytest.mark.parametrize(
    "row",
    [
        ["key", None, BLOCKED, True, "New"],
        ["service", 7, BLOCKED, True, "New"],
        ["key", 7, "2026-01-01 00:00:00+00", True, "New"],
        ["key", 7, BLOCKED, False, "New"],
    ],
    ids=["no shard", "not of a key", "has a time", "a type, and no wait for it"],
)
def test_a_wait_for_a_handler_that_means_nothing_is_refused(app: Dsn, row: list[Any]) -> None:
    with connect(app) as connection:
        with pytest.raises(psycopg.errors.CheckViolation) as refused:
            connection.execute(AWAIT, row)
        assert refused.value.diag.constraint_name == "backoff_awaits_possible"
        connection.execute(AWAIT, ["key", 7, BLOCKED, True, "New"])
