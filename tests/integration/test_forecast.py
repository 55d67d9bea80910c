"""`saf forward --explain`: what would go where, by which route, without anything being done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saf.database import Dsn, fetch
from saf.routing.routers import add_router
from saf.routing.routes import add_route, add_topic
from tests.pipeline import connect, forward, send
from tests.programs import configuration, saf

SEND = "INSERT INTO saf.outbox (to_service, body) SELECT %s, '' FROM generate_series(1, %s)"
TABLES = ("cursor", "member", "route_version", "route_choice", "parked", "backoff")


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    return configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})


def explained(config: Path) -> dict[str, Any]:
    done = saf("forward", "--explain", "--json", "--config", config)
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["brokers"]
    assert isinstance(one, dict)
    return one


def test_pending_messages_are_counted_by_where_they_would_go_and_by_which_route(
    app: Dsn, config: Path
) -> None:
    with connect(app) as connection:
        add_route(connection, "erp", service="billing")
        add_route(connection, "erp", service="shared")
        add_route(connection, "mom", service="shared")
        add_topic(connection, "prices")
        add_route(connection, "erp", service="prices")
        add_router(connection, "router", "sql", "'billing'")
        for service, count in (("billing", 3), ("prices", 2), ("other", 1), ("shared", 4)):
            connection.execute(SEND, (service, count))
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('router', '')")
        before = [fetch(connection, f"TABLE saf.{name}") for name in TABLES]
        found = explained(config)
        assert before == [fetch(connection, f"TABLE saf.{name}") for name in TABLES]
    assert (found["pending"], found["exact"]) == (11, True)
    going = {one["service"]: one for one in found["going"]}
    assert going["billing"]["messages"] == 3
    assert going["billing"]["destinations"] == ["erp"]
    assert sorted(going["shared"]["destinations"]) == ["erp", "mom"]
    assert "each message takes one" in going["shared"]["how"]
    assert going["other"]["how"] == "by the default destination"
    assert going["router"]["destinations"] == []
    assert "classifier" in going["router"]["how"]
    assert found["by_route"]["service 'billing' to 'erp'"] == 3
    said = saf("forward", "--explain", "--config", config).stdout
    assert "service 'billing' to 'erp'" in said


def test_what_waits_and_what_would_wait_behind_it_is_said(app: Dsn, config: Path) -> None:
    gone = Dsn("host=/nonexistent dbname=gone")
    with connect(app) as connection:
        add_route(connection, "erp", service="billing")
        for _ in range(3):
            send(connection, "x")
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('other', '')")
        forward(app, mom=app, erp=gone)
        send(connection, "behind")
    found = explained(config)
    assert [lane["messages"] for lane in found["lanes"] if lane["destination"] == "erp"] == [3]
    (behind,) = [one for one in found["going"] if one["service"] == "billing"]
    assert "behind 3 parked for erp" in behind["how"]
    text = saf("forward", "--explain", "--config", config).stdout
    assert "3 messages parked in 1 lane" in text or "parked in" in text


def test_a_source_with_nothing_to_do_says_so(config: Path) -> None:
    done = saf("forward", "--explain", "--config", config)
    assert (done.returncode, done.stdout) == (0, "No pending messages at shop.\n")
