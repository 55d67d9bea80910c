"""Guarantee 4: at_most_once, at_least_once and exactly_once under one schedule of crashes."""

from __future__ import annotations

import pytest

from saf.database import Dsn
from saf.failpoints import arm
from tests.pipeline import Cycle, bodies, connect, forward, forwarding_rules, send


class Crash(BaseException):
    """The process dies here; what it had in memory is gone."""


def crash() -> None:
    raise Crash


POINTS = ("mom_insert", "mom_commit", "mark_forwarded", "mark_commit")

EFFECTS = {
    "at_most_once": {0, 1},
    "at_least_once": {1, 2},
    "exactly_once": {1},
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("quality", EFFECTS)
def test_a_crash_at_each_step_has_the_effects_that_the_quality_allows(
    app: Dsn, mom: Dsn, quality: str, point: str
) -> None:
    with connect(app) as connection:
        send(connection, "one")
    rules = forwarding_rules(quality, mom=mom)
    arm(point, crash)
    with Cycle(app, rules) as cycle, pytest.raises(Crash):
        cycle.run()
    with Cycle(app, rules) as cycle:
        cycle.run()
    assert len(bodies(mom)) in EFFECTS[quality]
    expected = {
        ("at_most_once", "mom_insert"): 0,
        ("at_least_once", "mom_commit"): 2,
        ("at_least_once", "mark_forwarded"): 2,
    }
    assert len(bodies(mom)) == expected.get((quality, point), 1)


def test_a_second_run_of_the_same_batch_is_dropped_by_the_watermark(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        for number in range(20):
            send(connection, str(number), key=str(number % 3))
    with Cycle(app, forwarding_rules(mom=mom, chunk_rows=6)) as cycle:
        cycle.open()
        first, again = cycle.deliver(), cycle.deliver()
        cycle.close(again)
    assert sum(r.messages for r in first) == 20
    assert sum(r.messages for r in again) == 0
    assert sum(r.dropped for r in again) == 20
    assert bodies(mom) == [str(number) for number in range(20)]


def test_a_second_run_with_other_chunks_is_dropped_as_well(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        for number in range(20):
            send(connection, str(number), key=str(number % 3))
    with Cycle(app, forwarding_rules(mom=mom, chunk_rows=6)) as cycle:
        cycle.open()
        cycle.deliver()
        cycle.rules = forwarding_rules(mom=mom, chunk_rows=9)
        cycle.close(cycle.deliver())
    assert bodies(mom) == [str(number) for number in range(20)]


def test_each_destination_of_a_batch_has_a_watermark_of_its_own(
    app: Dsn, mom: Dsn, new_broker: object
) -> None:
    assert callable(new_broker)
    other = new_broker("other")
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route (service, destination) VALUES ('shipping', 'other')"
        )
        for number in range(12):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, body) VALUES (%s, 'k', %s)",
                (("billing", "shipping")[number % 2], str(number).encode()),
            )
    rules = forwarding_rules(mom=mom, other=other, chunk_rows=5)
    with Cycle(app, rules) as cycle:
        cycle.open()
        cycle.deliver()
        cycle.close(cycle.deliver())
    assert bodies(mom) == ["0", "2", "4", "6", "8", "10"]
    assert bodies(other) == ["1", "3", "5", "7", "9", "11"]


def test_two_routes_to_one_destination_lose_nothing(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route (service, destination) VALUES ('shipping', 'mom')"
        )
        for service in ("billing", "shipping", "billing"):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, body) VALUES (%s, %s)",
                (service, service.encode()),
            )
    forward(app, mom=mom)
    assert bodies(mom) == ["billing", "shipping", "billing"]


def test_qualities_of_one_destination_have_watermarks_of_their_own(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route (service, destination, quality)"
            " VALUES ('shipping', 'mom', 'at_least_once')"
        )
        for number, service in enumerate(("shipping", "billing", "shipping")):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, body) VALUES (%s, 'k', %s)",
                (service, str(number).encode()),
            )
    forward(app, mom=mom)
    assert sorted(bodies(mom)) == ["0", "1", "2"]


def test_two_names_for_one_destination_are_refused_and_nothing_is_lost(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route (service, destination) VALUES ('shipping', 'alias')"
        )
        for service in ("billing", "shipping"):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, body) VALUES (%s, %s)",
                (service, service.encode()),
            )
    receipts = forward(app, mom=mom, alias=mom)
    assert [r.error_kind for r in receipts if r.error] == ["UsageError"]
    with connect(app) as connection:
        connection.execute("UPDATE saf.route SET destination = 'mom'")
    receipts = forward(app, mom=mom, alias=mom)
    # the batch keeps the routes that it was opened with
    assert [r.error_kind for r in receipts if r.error] == ["UsageError"]


def test_a_batch_keeps_the_routes_it_was_opened_with(
    app: Dsn, mom: Dsn, new_broker: object
) -> None:
    assert callable(new_broker)
    other = new_broker("other")
    rules = forwarding_rules(mom=mom, other=other)
    with connect(app) as connection, Cycle(app, rules) as cycle:
        send(connection, "before")
        cycle.open()
        connection.execute("INSERT INTO saf.route (destination) VALUES ('other')")
        send(connection, "after")
        cycle.run()
        cycle.run()
    assert (bodies(mom), bodies(other)) == (["before"], ["after"])


def test_the_message_id_travels_to_the_consumer(app: Dsn, mom: Dsn) -> None:
    columns = "message_id, to_service, key, body, created_at"
    with connect(app) as connection:
        send(connection, "one", key="k")
        sent = connection.execute(f"SELECT {columns} FROM saf.outbox").fetchall()
    forward(app, mom=mom)
    with connect(mom) as connection:
        stored = connection.execute(f"SELECT {columns} FROM saf.inbox").fetchall()
    assert stored == sent
