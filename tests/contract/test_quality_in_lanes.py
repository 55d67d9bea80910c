"""A message that is set aside keeps the quality of service of its route, whatever parked it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from saf.database import Dsn, fetch
from saf.failpoints import arm
from saf.operating import decide
from saf.operating.repair.replay import replay
from saf.routing.matching import Route, Routes
from saf.setaside.selection import DeadLetters
from tests.destinations import NOWHERE, count, route, send_to
from tests.dying import Crash
from tests.dying import crash as die
from tests.pipeline import bodies, connect, forward, let_time_pass

REFUSE = "ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (false)"
ALLOW = "ALTER TABLE saf.inbox DROP CONSTRAINT polite"


@pytest.fixture
def routed(app: Dsn) -> Dsn:
    """An app whose messages for shipping go to other exactly once, unlike all else."""
    with connect(app) as connection:
        route(connection, "shipping", "other")
        connection.execute("UPDATE saf.route SET quality = 'exactly_once'")
    return app


def parked_while_down(app: Dsn, mom: Dsn, _: Dsn) -> None:
    with connect(app) as connection:
        send_to(connection, "shipping", "one")
    forward(app, "at_least_once", mom=mom, other=NOWHERE)


def retried(app: Dsn, mom: Dsn, other: Dsn) -> None:
    with connect(app) as connection, connect(other) as store:
        send_to(connection, "shipping", "one")
        store.execute(REFUSE)
        forward(app, "at_least_once", mom=mom, other=other)
        store.execute(ALLOW)
        assert len(decide.retry(connection, DeadLetters(), "")) == 1


def replayed(app: Dsn, mom: Dsn, other: Dsn) -> None:
    with connect(app) as connection, connect(other) as store:
        send_to(connection, "shipping", "one")
        forward(app, "at_least_once", mom=mom, other=other)
        store.execute("DELETE FROM saf.inbox")
        lost = fetch(connection, "SELECT shard, id FROM saf.outbox")
        replay(connection, lost, Routes(routes=(Route(destination="other"),)), "")


def of_a_topic_for_a_destination_that_is_not_known_yet(app: Dsn, mom: Dsn, _: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.topic (name) VALUES ('shipping')")
        route(connection, "shipping", "mom")
        send_to(connection, "shipping", "one")
    forward(app, "at_least_once", mom=mom)


def try_three_times(app: Dsn, mom: Dsn, other: Dsn) -> None:
    """Store what is parked, and die before that is noted, but for the last time."""
    for _ in range(2):
        let_time_pass(app)
        arm("unpark", die)
        with pytest.raises(Crash):
            forward(app, "at_least_once", mom=mom, other=other)
    forward(app, "at_least_once", mom=mom, other=other)


@pytest.mark.parametrize(
    "park",
    [
        parked_while_down,
        retried,
        replayed,
        of_a_topic_for_a_destination_that_is_not_known_yet,
    ],
    ids=lambda park: park.__name__,
)
def test_a_parked_message_keeps_the_quality_of_its_route(
    routed: Dsn, mom: Dsn, other: Dsn, park: Callable[[Dsn, Dsn, Dsn], None]
) -> None:
    park(routed, mom, other)
    assert count(routed, "parked") == 1
    assert bodies(other) == []
    try_three_times(routed, mom, other)
    assert bodies(other) == ["one"]


def test_what_is_redirected_has_the_quality_of_a_route_that_leads_there_or_the_default(
    routed: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(routed) as connection, connect(other) as store:
        send_to(connection, "shipping", "one")
        store.execute(REFUSE)
        forward(routed, "exactly_once", mom=mom, other=other)
        decide.redirect("mom")(connection, DeadLetters(), "")
    try_three_times(routed, mom, other)
    assert bodies(mom) == ["one"] * 3


def test_at_most_once_waits_with_its_neighbours_while_their_destination_is_down(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        for number in range(4):
            send_to(connection, "shipping", str(number))
        forward(app, mom=mom, other=NOWHERE)
        connection.execute("UPDATE saf.parked SET quality = 'at_most_once' WHERE id % 2 = 0")
    let_time_pass(app)
    forward(app, mom=mom, other=NOWHERE)
    assert (count(app, "parked"), count(app, "dead_letter")) == (4, 0)
    with connect(app) as connection:
        assert fetch(connection, "SELECT attempts FROM saf.backoff") == [(2,)]
    let_time_pass(app)
    forward(app, mom=mom, other=other)
    assert sorted(bodies(other)) == ["0", "1", "2", "3"]
