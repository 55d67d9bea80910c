"""However many lanes wait, they cost few statements, hold up nobody, and each has its turn."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import adbc_driver_manager.dbapi as adbc
import psycopg
import pytest

from saf.database import Dsn, fetch
from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.engine import releasing
from saf.errors import Unavailable
from saf.operating import decide
from saf.setaside import backoff
from saf.setaside.backoff import rank
from saf.setaside.lane import Kind, Lane
from saf.setaside.selection import DeadLetters
from tests.destinations import NOWHERE, count, know, route, send_to
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass
from tests.routing import without_default

MANY = 2000
STATEMENTS = 150
"""Of a cycle, about: some chunks', some groups of lanes', and none for a single lane."""

SEND = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT 'service ' || n, 'key ' || n, convert_to(n || '.' || part, 'UTF8')
FROM generate_series(1, %s) AS n, generate_series(1, 2) AS part ORDER BY part, n
"""
ROUTES = """
INSERT INTO saf.route (service, destination)
SELECT 'service ' || n, 'mom' FROM generate_series(1, %s) AS n
"""
NEXT = "SELECT subject, attempts FROM saf.backoff ORDER BY next_attempt_at, subject"


class Statements:
    """Counts what this process asks of databases."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.number = 0
        for cursor in (psycopg.Cursor, adbc.Cursor):
            patch.setattr(cursor, "execute", self._counting(cursor.execute))

    def _counting(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **more: Any) -> Any:
            self.number += 1
            return execute(*arguments, **more)

        return counting

    def of(self, cycle: Cycle) -> int:
        before = self.number
        cycle.run()
        return self.number - before


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Statements:
    return Statements(monkeypatch)


def in_order(mom: Dsn) -> list[list[str]]:
    """The parts that have arrived, by service."""
    arrived: dict[str, list[str]] = {}
    for body in bodies(mom):
        service, _, part = body.partition(".")
        arrived.setdefault(service, []).append(part)
    return list(arrived.values())


def test_thousands_of_services_without_a_route_cost_a_few_statements_and_hold_up_nobody(
    app: Dsn, mom: Dsn, statements: Statements
) -> None:
    with connect(app) as connection, without_default(app, 50_000, mom=mom) as cycle:
        route(connection, "victim", "mom")
        connection.execute(SEND, [MANY])
        send_to(connection, "victim", "1")
        assert statements.of(cycle) < STATEMENTS
        assert (bodies(mom), count(app, "parked")) == (["1"], 2 * MANY)
        for number in range(2, 5):
            let_time_pass(app)
            send_to(connection, "victim", str(number))
            connection.execute(SEND, [1])
            assert statements.of(cycle) < STATEMENTS
            assert bodies(mom)[-1] == str(number)
        assert fetch(connection, "SELECT DISTINCT attempts FROM saf.backoff") == [(4,)]


def test_after_a_route_came_for_thousands_of_services_each_gets_its_messages_in_order(
    app: Dsn, mom: Dsn, statements: Statements
) -> None:
    with connect(app) as connection, without_default(app, 50_000, mom=mom) as cycle:
        connection.execute(SEND, [MANY])
        cycle.run()
        connection.execute(ROUTES, [MANY])
        connection.execute(SEND, [10])  # new ones go behind
        let_time_pass(app)
        assert statements.of(cycle) < STATEMENTS
    assert sorted(in_order(mom)) == [["1", "2"]] * (MANY - 10) + [["1", "2", "1", "2"]] * 10
    assert count(app, "parked") == count(app, "backoff") == 0
    with connect(mom) as store:
        ((marks,),) = fetch(store, "SELECT count(*) FROM saf.watermark WHERE lane <> ''")
    assert marks == MANY, "one of each lane's own shard"


def test_thousands_of_services_that_a_destination_does_not_know_cost_a_few_statements(
    app: Dsn, mom: Dsn, statements: Statements
) -> None:
    with connect(app) as connection, connect(mom) as store:
        store.execute("INSERT INTO saf.service VALUES ('victim')")
        connection.execute(SEND, [MANY])
        send_to(connection, "victim", "victim.1")
        with Cycle(app, forwarding_rules("exactly_once", 50_000, mom=mom)) as cycle:
            assert statements.of(cycle) < STATEMENTS
            assert bodies(mom) == ["victim.1"]
            longest = "SELECT max(length(error)), count(*) FROM saf.backoff"
            assert fetch(connection, longest) == [(pytest.approx(150, abs=50), MANY)]
            let_time_pass(app)
            send_to(connection, "victim", "victim.2")
            assert statements.of(cycle) < STATEMENTS
            assert bodies(mom) == ["victim.1", "victim.2"]
            store.execute(
                "INSERT INTO saf.service SELECT 'service ' || n FROM generate_series(1, %s) AS n",
                [MANY],
            )
            let_time_pass(app)
            assert statements.of(cycle) < STATEMENTS
    assert in_order(mom) == [["1", "2"]] * (MANY + 1)
    assert count(app, "parked") == count(app, "backoff") == 0


def test_lanes_are_tried_in_turn_a_bounded_number_each_cycle(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "AT_ONCE", 3)
    with connect(app) as connection, without_default(app, 50_000, mom=mom) as cycle:
        connection.execute(SEND, [9])
        cycle.run()
        let_time_pass(app)
        for turn in range(1, 4):
            waited_longest = [lane for lane, _ in fetch(connection, NEXT)[:3]]
            cycle.run()
            attempts = dict(fetch(connection, NEXT))
            assert sorted(attempts.values()) == [1] * (9 - 3 * turn) + [2] * 3 * turn
            assert {attempts[lane] for lane in waited_longest} == {2}
            assert cycle.broker.lanes_left is (turn < 3), "a run goes on until each had its turn"


@pytest.mark.slow
def test_a_long_queue_of_one_destination_leaves_time_for_what_is_new_and_keeps_its_order(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        for number in range(9):
            send_to(connection, "shipping", f"s{number}")
        with Cycle(app, forwarding_rules("exactly_once", 2, mom=mom, other=NOWHERE)) as cycle:
            cycle.run()
        let_time_pass(app)
        monkeypatch.setattr(releasing, "RELEASE_SECONDS", 0.0)
        with Cycle(app, forwarding_rules("exactly_once", 2, mom=mom, other=other)) as cycle:
            for number in range(3):
                send_to(connection, "shipping", f"s{9 + number}")
                send_to(connection, "billing", f"b{number}")
                cycle.run()
                assert bodies(mom)[-1] == f"b{number}"
                assert len(bodies(other)) == 2 * (number + 1)
                assert cycle.broker.lanes_left
            rounds = 0
            while cycle.broker.lanes_left:
                cycle.run()
                rounds += 1
            assert rounds == 3
    assert bodies(other) == [f"s{number}" for number in range(12)]
    assert count(app, "parked") == count(app, "backoff") == 0


@pytest.mark.slow
def test_what_is_left_of_a_queue_goes_behind_the_destinations_that_had_no_turn(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        for number in range(4):
            send_to(connection, "shipping", f"s{number}")
            send_to(connection, "billing", f"b{number}")
        for down in ({"mom": mom, "other": NOWHERE}, {"mom": NOWHERE, "other": NOWHERE}):
            with Cycle(app, forwarding_rules("exactly_once", 2, **down)) as cycle:
                cycle.run()
            send_to(connection, "billing", "b4")
        let_time_pass(app)
        monkeypatch.setattr(releasing, "RELEASE_SECONDS", 0.0)
        arrived = []
        with Cycle(app, forwarding_rules("exactly_once", 1, mom=mom, other=other)) as cycle:
            for _ in range(4):
                cycle.run()
                arrived.append((len(bodies(other)), len(bodies(mom)) - 4))
    assert arrived[0] == (1, 0)
    assert arrived[1][1] >= 1, "mom's had no turn, so they come before the rest of the other's"


def test_of_what_is_retried_nothing_is_lost_behind_a_service_that_is_not_known(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection, connect(mom) as store:
        for number in range(3):
            for service in ("billing", "shipping"):
                body = f"{service} {number}"
                send_to(connection, service, body, expires_at=datetime.now(UTC))
        with Cycle(app, forwarding_rules("exactly_once", 100, mom=mom)) as cycle:
            cycle.run()
            assert count(app, "dead_letter") == 6
            store.execute("INSERT INTO saf.service VALUES ('shipping')")
            decide.retry(connection, DeadLetters(), "wanted after all")
            cycle.run()
            assert bodies(mom) == [f"shipping {number}" for number in range(3)]
            send_to(connection, "billing", "billing 3")
            store.execute("INSERT INTO saf.service VALUES ('billing')")
            let_time_pass(app)
            cycle.run()
    assert bodies(mom)[3:] == [f"billing {number}" for number in range(4)]
    assert count(app, "parked") == count(app, "backoff") == 0


def test_lanes_that_are_released_together_fail_together_and_go_in_one_cycle(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releasing, "RELEASE_SECONDS", 60.0)
    asked: list[str] = []

    class Down(PostgresInbox):
        def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
            if chunk.rows.num_rows:
                asked.append(self.name)
                raise Unavailable("destination 'mom'", "it is down")
            return super().store(chunk, exactly_once=exactly_once)

    def attempts() -> list[tuple[int]]:
        let_time_pass(app)
        with Cycle(app, forwarding_rules("exactly_once", 1, mom=mom)) as cycle:
            cycle.run()
        return fetch(connection, "SELECT DISTINCT attempts FROM saf.backoff")

    know(mom, "victim")
    with connect(app) as connection:
        for service in "ab":
            send_to(connection, service, service)
        assert attempts() == [(1,)]
        with monkeypatch.context() as patch:
            patch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", Down)
            assert (attempts(), asked) == ([(2,)], ["mom"])
        know(mom, "a", "b")
        assert attempts() == []
    assert bodies(mom) == ["a", "b"]


def test_a_turn_of_what_has_found_a_route_ends_and_the_rest_keeps_its_place(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(app) as connection, without_default(app, 2, mom=mom) as cycle:
        for number in range(5):
            send_to(connection, "s", str(number))
        cycle.run()
        route(connection, "s", "mom")
        let_time_pass(app)
        monkeypatch.setattr(releasing, "RELEASE_SECONDS", 0.0)
        cycle.run()
        assert fetch(connection, "SELECT DISTINCT kind, id FROM saf.parked ORDER BY id") == [
            ("route", number) for number in (3, 4, 5)
        ]
        assert bodies(mom) == ["0", "1"]
        monkeypatch.setattr(releasing, "RELEASE_SECONDS", 60.0)
        cycle.run()
    assert bodies(mom) == [str(number) for number in range(5)]


def test_lanes_of_a_destination_are_released_by_what_they_wait_for() -> None:
    first_to_last = ["replay", "main", "retry", "service", "found_route"]
    ranks = [rank(Lane(destination="mom", kind=Kind(name))) for name in first_to_last]
    assert ranks == sorted(ranks)
