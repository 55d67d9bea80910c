"""No single message holds up another's, whatever it is: at the source, and on the way.

What no schema would take is put in as by an older one, whose logs had no bounds.
"""

from __future__ import annotations

import random
import resource
from typing import Any

import psycopg
import pytest

import saf
from saf.database import Dsn
from saf.errors import InvalidMessage
from saf.message import MAX_HEADERS, MAX_KEY, MAX_NAME
from saf.routing.routers import add_router
from tests.hostile import LONG_KEY, dead, error_of, send, unbounded
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass, run

LONG_SERVICE = random.Random(13).randbytes(3000).hex()


# Bounds


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", "好" * (MAX_KEY // 3 + 1)),
        ("service", "好" * (MAX_NAME // 3 + 1)),
        ("message_type", "ü" * (MAX_NAME // 2 + 1)),
        ("from_service", "ü" * (MAX_NAME // 2 + 1)),
        ("headers", {"x": "y" * MAX_HEADERS}),
        ("headers", {"x": [1e300] * 5000}),
        ("headers", {"x": [1e-300] * 5000}),
    ],
)
def test_send_refuses_what_is_too_long_in_bytes(app: Dsn, field: str, value: Any) -> None:
    message: dict[str, Any] = {"service": "billing", "body": b"", field: value}
    with app.connect(role="test") as connection, pytest.raises(InvalidMessage, match=field) as said:
        saf.Outbox().send(connection, **message)
    assert "bytes are more than" in str(said.value)


@pytest.mark.parametrize("deep", ["headers", "body"])
def test_send_refuses_what_is_too_deep(app: Dsn, deep: str) -> None:
    value: list[Any] = []
    for _ in range(3000):
        value = [value]
    message: dict[str, Any] = {"service": "billing", "body": b"", deep: {"x": value}}
    with app.connect(role="test") as connection, pytest.raises(InvalidMessage, match=deep):
        saf.Outbox().send(connection, **message)


def test_what_send_accepts_is_what_both_logs_take(app: Dsn) -> None:
    largest: dict[str, Any] = {
        "service": "好" * (MAX_NAME // 3),
        "key": "好" * (MAX_KEY // 3) + "x",
        "message_type": "ü" * (MAX_NAME // 2),
        "headers": {"x": "好" * ((MAX_HEADERS - 40_000) // 6), "y": [1e300] * 100, "z": 1e-300},
    }
    with connect(app) as connection, connection.transaction():
        saf.Outbox().send(connection, body=b"", **largest)
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, message_type, headers, body) "
            "SELECT to_service, key, message_type, headers, body FROM saf.outbox"
        )


@pytest.mark.parametrize("log", ["outbox", "inbox"])
@pytest.mark.parametrize(
    "columns",
    [
        {"key": "好" * 342},
        {"to_service": "x" * 256},
        {"headers": f"[{','.join(['1e100000'] * 100)}]"},
        {"headers": f'{{"x": "{"y" * MAX_HEADERS}"}}'},
    ],
)
def test_a_log_refuses_what_is_too_long_from_any_language(
    app: Dsn, log: str, columns: dict[str, Any]
) -> None:
    row = {"to_service": "billing", "body": b"", **columns}
    insert = f"INSERT INTO saf.{log} ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})"
    with connect(app) as connection, pytest.raises(psycopg.errors.CheckViolation, match=f"{log}_"):
        connection.execute(insert, list(row.values()))


# At the source


def share(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.route (destination) VALUES ('mom'), ('other')")


HOSTILE: dict[str, dict[str, Any]] = {
    "a key that no index takes": {"key": LONG_KEY},
    "a service that no index takes": {"to_service": LONG_SERVICE},
    "a type that is too large to be read": {"message_type": "x" * 100_000},
    "a key that is too large to be read": {"key": "x" * 100_000},
    "numbers that grow as text": {"headers": f"[{','.join(['1e100000'] * 10_000)}]"},
    "many decimals": {"headers": f"[{','.join(['1.' + '0' * 16_000] * 1_000)}]"},
    "large headers": {"headers": f'{{"x": "{"y" * 2 * MAX_HEADERS}"}}'},
}


@pytest.mark.slow
@pytest.mark.parametrize("columns", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_message_is_a_dead_letter_and_its_neighbours_arrive(
    app: Dsn, mom: Dsn, other: Dsn, columns: dict[str, Any]
) -> None:
    unbounded(app)
    share(app)
    neighbours = [f"{name} {number}" for name in "abc" for number in range(4)]
    with connect(app) as connection:
        for number in range(4):
            for name in "ab":
                send(connection, f"{name} {number}", key=name)
            send(connection, f"hostile {number}", **columns)
            send(connection, f"c {number}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(app, mom=mom, other=other)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    arrived = [body for there in (mom, other) for body in bodies(there)]
    assert sorted(arrived) == sorted(neighbours)
    for name in "ab":
        assert [body for body in arrived if body[0] == name] == [f"{name} {n}" for n in range(4)]
    assert sorted(body for body, _ in dead(app)) == [f"hostile {n}" for n in range(4)]
    assert grown < 300 * 1024, f"{grown} kB"


def test_what_no_index_takes_does_not_jam_those_that_wait_for_a_route(app: Dsn, mom: Dsn) -> None:
    unbounded(app)
    with connect(app) as connection:
        send(connection, "hostile", to_service=LONG_SERVICE)
        send(connection, "good")
    run(app)
    assert dead(app) == [("hostile", "rejected")]
    assert "index row" in error_of(app)
    let_time_pass(app)
    run(app, mom=mom)
    assert bodies(mom) == ["good"]


def test_a_key_that_no_index_takes_does_not_jam_a_router_that_answers_once_per_key(
    app: Dsn, mom: Dsn
) -> None:
    unbounded(app)
    with connect(app) as connection:
        add_router(connection, "router", "python", "tests.classifiers:by_origin", once_per="key")
        for number, key in enumerate(("a", LONG_KEY, "b")):
            send(connection, f'{{"origin": "S{number}"}}', to_service="router", key=key)
    run(app, mom=mom)
    assert bodies(mom) == ['{"origin": "S0"}', '{"origin": "S2"}']
    assert dead(app) == [('{"origin": "S1"}', "rejected")]


def test_at_most_once_goes_on_beside_what_raises(app: Dsn, mom: Dsn) -> None:
    unbounded(app)
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route (service, destination, quality) "
            "VALUES ('billing', 'mom', 'at_most_once'), ('stock', 'mom', 'exactly_once')"
        )
        for number in range(4):
            for service in ("billing", "stock"):
                send(connection, f"{service} {number}", to_service=service)
            send(connection, f"hostile {number}", to_service=f"{number}{LONG_SERVICE}")
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        cycle.default = None
        cycle.run()
    assert len(dead(app)) == 4
    assert sorted(bodies(mom)) == [f"{s} {n}" for s in ("billing", "stock") for n in range(4)]
