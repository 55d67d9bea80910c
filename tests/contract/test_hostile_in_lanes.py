"""No single message holds up another's that waits with it, whatever is wrong with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from saf.database import Dsn
from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.postgresql import Postgresql
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.errors import Rejected
from saf.operating import decide
from saf.routing.routers import add_router
from saf.setaside.selection import DeadLetters
from tests.destinations import NOWHERE, count
from tests.hostile import LONG_KEY, dead, send, unbounded
from tests.pipeline import Cycle, bodies, connect, forward, forwarding_rules, let_time_pass, run

HOSTILE = b"hostile"


class Rejecting(PostgresInbox):
    """Rejects a message, whatever it is stored with; of others it stores each once."""

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        if HOSTILE in chunk.rows["body"].to_pylist():
            raise Rejected(f"destination {self.name!r}", "it is hostile")
        return super().store(chunk, exactly_once=exactly_once)


def left(dsn: Dsn) -> tuple[int, int]:
    return count(dsn, "parked"), count(dsn, "backoff")


@pytest.mark.parametrize(
    ("quality", "waits_for"),
    [
        ("exactly_once", "destination"),
        ("at_least_once", "destination"),
        ("exactly_once", "service"),
        ("exactly_once", "route"),
        ("at_most_once", "route"),
    ],
)
def test_what_is_rejected_leaves_its_lane_and_its_neighbours_arrive_in_order(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch, quality: str, waits_for: str
) -> None:
    services = ("billing", "stock", "shipping")
    with connect(app) as connection, connect(mom) as store:
        connection.execute(
            "INSERT INTO saf.route (service, destination, quality) "
            "VALUES (NULL, 'mom', %s), ('other', 'other', NULL)",
            [quality],
        )
        if waits_for == "service":
            store.execute("INSERT INTO saf.service VALUES ('nothing')")
        for number in range(9):
            for service in services:
                send(connection, f"{service} {number}", to_service=service)
            if number == 5:
                send(connection, HOSTILE.decode(), to_service="stock")
        before = {"destination": {"mom": NOWHERE}, "service": {"mom": mom}, "route": {}}
        run_once(app, other=NOWHERE, **before[waits_for])
        assert count(app, "parked") == 28
        store.execute("INSERT INTO saf.service SELECT unnest(%s::text[])", [list(services)])
    let_time_pass(app)
    monkeypatch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", Rejecting)
    run_once(app, mom=mom)
    assert sorted(bodies(mom)) == sorted(f"{s} {n}" for s in services for n in range(9))
    for service in services:
        mine = [body for body in bodies(mom) if body.startswith(service)]
        assert mine == [f"{service} {number}" for number in range(9)]
    assert dead(app) == [("hostile", "rejected")]
    let_time_pass(app)
    run(app, mom=mom)
    assert left(app) == (0, 0)


def run_once(app: Dsn, **destinations: Dsn) -> None:
    with Cycle(app, forwarding_rules("exactly_once", 1000, **destinations)) as cycle:
        cycle.run()


def test_what_raises_when_it_finds_a_route_leaves_those_that_wait_with_it(
    app: Dsn, mom: Dsn
) -> None:
    unbounded(app)
    with connect(app) as connection:
        for number, key in enumerate(("a", LONG_KEY, "b")):
            send(connection, f'{{"origin": "S{number}"}}', to_service="router", key=key)
        run(app)
        assert count(app, "parked") == 3
        add_router(connection, "router", "python", "tests.classifiers:by_origin", once_per="key")
    let_time_pass(app)
    run(app, mom=mom)
    assert bodies(mom) == ['{"origin": "S0"}', '{"origin": "S2"}']
    assert dead(app) == [('{"origin": "S1"}', "rejected")]
    assert left(app) == (0, 0)


def test_what_an_attempt_before_has_moved_is_not_sent_from_there_as_well(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its service is known again when the rest of its chunk is tried once more."""

    class Late(Rejecting):
        """Gets to know a service after it has refused it."""

        def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
            services = chunk.rows["to_service"].to_pylist()
            if HOSTILE in chunk.rows["body"].to_pylist() and "stock" not in services:
                with connect(mom) as store:
                    store.execute("INSERT INTO saf.service VALUES ('stock') ON CONFLICT DO NOTHING")
                raise Rejected("destination 'mom'", "it is hostile")
            return PostgresInbox.store(self, chunk, exactly_once=exactly_once)

    with connect(app) as connection, connect(mom) as store:
        connection.execute(
            "INSERT INTO saf.route (service, destination) VALUES (NULL, 'mom'), ('other', 'other')"
        )
        for number in range(3):
            send(connection, f"billing {number}")
            send(connection, f"stock {number}", to_service="stock")
        send(connection, HOSTILE.decode())
        run_once(app, mom=NOWHERE, other=NOWHERE)
        assert count(app, "parked") == 7
        store.execute("INSERT INTO saf.service VALUES ('billing')")
    let_time_pass(app)
    monkeypatch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", Late)
    run_once(app, mom=mom)
    let_time_pass(app)
    run(app, mom=mom)
    assert sorted(bodies(mom)) == [f"{s} {n}" for s in ("billing", "stock") for n in range(3)]
    assert dead(app) == [("hostile", "rejected")]
    assert left(app) == (0, 0)


class Small(Postgresql):
    """A destination that takes small bodies only."""

    capabilities = replace(Postgresql.capabilities, largest_body=10)


def test_what_is_retried_and_still_too_large_is_dead_again_while_its_destination_is_down(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        send(connection, "larger than ten bytes")
        forward(app, mom=Small(dsn=mom))
        assert dead(app) == [("larger than ten bytes", "rejected")]
        assert len(decide.retry(connection, DeadLetters(), "try it")) == 1
        assert (dead(app), count(app, "parked")) == ([], 1)
    forward(app, mom=Small(dsn=NOWHERE))
    assert dead(app) == [("larger than ten bytes", "rejected")]
    assert count(app, "parked") == 0
    forward(app, mom=Small(dsn=mom))
    assert (bodies(mom), left(app)) == ([], (0, 0))
