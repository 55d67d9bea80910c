"""Lanes that stood in one text stand in columns, and back again; what is parked stays in them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from alembic import command

from saf.broker.migrate import config
from saf.database import Dsn, fetch
from saf.setaside.lane import NO_BROKER
from tests.pipeline import connect

AT = UUID("00000000-0000-4000-8000-000000000007")
CONVERSATION = "8c0ffee0-0000-4000-8000-000000000001"

Row = tuple[str, str, str, UUID | None, str, str, UUID | None]

# Text; destination; the service and broker of its message; kind, subject, broker
LANES: list[Row] = [
    ("", "mom", "s", None, "main", "", None),
    ("retry", "mom", "s", None, "retry", "", None),
    ("retry", "", "s", None, "retry", "", None),
    ("replay", "mom", "s", None, "replay", "", None),
    ("doubt", "mom", "s", None, "doubt", "", None),
    ("service:s", "mom", "s", None, "service", "s", None),
    (f"service:s@{AT}", "mom", f"s@{AT}", None, "service", f"s@{AT}", None),
    ("route:s", "", "s", None, "route", "s", None),
    (f"route:s@{AT}", "", "s", AT, "route", "s", AT),
    (f"route:s@{AT}", "", f"s@{AT}", None, "route", f"s@{AT}", None),
    ("route:a@b", "", "a@b", None, "route", "a@b", None),
    ("found:route:s", "mom", "s", None, "found_route", "s", None),
    (f"found:route:s@{AT}", "mom", "s", AT, "found_route", "s", AT),
    (f"found:route:s@{AT}", "mom", f"s@{AT}", None, "found_route", f"s@{AT}", None),
    ("found:retry", "mom", "s", None, "found_retry", "", None),
    ("found:replay", "mom", "s", None, "found_replay", "", None),
    ("key:A-1", "", "s", None, "key", "A-1", None),
    ("key:", "", "s", None, "key", "", None),
    ("key:route:s", "", "s", None, "key", "route:s", None),
    ("later:7", "", "s", None, "later", "7", None),
    (f"ahead:{CONVERSATION}", "", "s", None, "ahead", CONVERSATION, None),
]
# Nothing is parked in these: a lane that waits for its destination alone, and others that are left
EMPTY: list[Row] = [
    ("", "down", "", None, "main", "", None),
    ("service:gone", "down", "", None, "service", "gone", None),
    (f"route:gone@{AT}", "", "", None, "route", "gone", AT),
]

PARK = """
INSERT INTO saf.parked (subscription_id, destination, lane, shard, id, batch, position, to_service,
                        to_broker, body)
SELECT subscription_id, %s, %s, 0, %s, 1, 1, %s, %s, '' FROM saf.subscription
WHERE name = 'forwarder'
"""
WAIT = """
INSERT INTO saf.backoff (subscription_id, destination, lane, attempts, error)
SELECT subscription_id, %s, %s, %s, 'it waits' FROM saf.subscription WHERE name = 'forwarder'
ON CONFLICT DO NOTHING
"""


def parked(connection: psycopg.Connection[Any], *columns: str) -> list[tuple[Any, ...]]:
    return fetch(connection, f"SELECT id, {', '.join(columns)} FROM saf.parked ORDER BY id")


def waiting(connection: psycopg.Connection[Any], *columns: str) -> set[tuple[Any, ...]]:
    return {*fetch(connection, f"SELECT {', '.join(columns)} FROM saf.backoff")}


@pytest.mark.every_postgresql
def test_each_lane_keeps_what_is_parked_in_it_and_its_time_up_down_and_up(app: Dsn) -> None:
    command.downgrade(config(app), "0016")
    with connect(app) as connection:
        for number, (text, destination, service, broker, *_) in enumerate(LANES):
            connection.execute(PARK, [destination, text, number, service, broker])
            connection.execute(WAIT, [destination, text, len(text)])
        for text, destination, *_ in EMPTY:
            connection.execute(WAIT, [destination, text, len(text)])
        before = parked(connection, "destination", "lane")
        waited = waiting(connection, "destination", "lane", "attempts", "error")

    columns = ("destination", "kind", "subject", "broker")
    lanes = [
        (number, destination, kind, subject, broker or NO_BROKER)
        for number, (_, destination, _, _, kind, subject, broker) in enumerate(LANES)
    ]
    wait = {
        (destination, kind, subject, broker or NO_BROKER, len(text), "it waits")
        for text, destination, _, _, kind, subject, broker in [*LANES, *EMPTY]
    }
    command.upgrade(config(app), "head")
    with connect(app) as connection:
        assert parked(connection, *columns) == lanes
        assert waiting(connection, *columns, "attempts", "error") == wait
    command.downgrade(config(app), "0016")
    with connect(app) as connection:
        assert parked(connection, "destination", "lane") == before
        assert waiting(connection, "destination", "lane", "attempts", "error") == waited
    command.upgrade(config(app), "head")
    with connect(app) as connection:
        assert parked(connection, *columns) == lanes
        assert waiting(connection, *columns, "attempts", "error") == wait


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
