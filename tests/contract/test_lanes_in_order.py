"""Messages of one key that wait for different things still arrive in the order they were sent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from saf.database import Dsn, fetch
from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.marks import AGAIN, MAIN, Mark
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.engine.acknowledged import not_parked
from saf.errors import Unavailable
from saf.failpoints import arm
from saf.log.shards import shard_of
from saf.operating import decide
from saf.operating.repair.replay import replay
from saf.routing.matching import Route, Routes
from saf.routing.routers import add_router
from saf.setaside.selection import DeadLetters
from tests.destinations import NOWHERE, AnswerLost, count, know, route, run, send_to
from tests.dying import Crash, crash
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass
from tests.routing import without_default

SOON = "UPDATE saf.backoff SET next_attempt_at = now() WHERE kind = ANY (%s)"
NOT_SOON = """
UPDATE saf.backoff SET next_attempt_at = now() + interval '1 h' WHERE kind <> ALL (%s)
"""


def test_what_waits_for_a_route_goes_after_what_waited_for_its_service_before(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection, connect(other) as store:
        store.execute("INSERT INTO saf.service VALUES ('billing')")
        route(connection, "shipping", "other")
        send_to(connection, "shipping", "1", key="k")
        run(app, mom=mom, other=other)
        connection.execute("UPDATE saf.route SET destination = 'nowhere'")
        send_to(connection, "shipping", "2", key="k")
        run(app, mom=mom, other=other)
        lanes = connection.execute("SELECT kind, subject FROM saf.backoff ORDER BY 1").fetchall()
        assert lanes == [("route", "shipping"), ("service", "shipping")]

        connection.execute("UPDATE saf.route SET destination = 'other'")
        store.execute("INSERT INTO saf.service VALUES ('shipping')")
        for statement in (NOT_SOON, SOON):
            connection.execute(statement, [["route"]])
        run(app, mom=mom, other=other)
        assert bodies(other) == []
        let_time_pass(app)
        send_to(connection, "shipping", "3", key="k")
        run(app, mom=mom, other=other)
    assert bodies(other) == ["1", "2", "3"]
    assert count(app, "parked") == count(app, "backoff") == 0


def test_what_its_router_redirects_goes_after_what_waits_for_that_service(
    app: Dsn, mom: Dsn
) -> None:
    redirected = '{"origin": "shipping"}'
    know(mom, "billing")
    with connect(app) as connection:
        add_router(connection, "router", "python", "tests.classifiers:by_origin")
        send_to(connection, "shipping", "1", key="k")
        run(app, mom=mom)
        connection.execute(NOT_SOON, [[]])
        know(mom, "shipping")
        send_to(connection, "router", redirected, key="k")
        run(app, mom=mom)
    assert (bodies(mom), count(app, "parked")) == ([], 2)
    let_time_pass(app)
    run(app, mom=mom)
    assert bodies(mom) == ["1", redirected]


def test_what_waits_for_a_route_goes_after_what_waited_for_its_destination_before(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        send_to(connection, "shipping", "1", key="k")
        run(app, mom=mom, other=NOWHERE)
        send_to(connection, "shipping", "2", key="k")
        connection.execute("UPDATE saf.route SET destination = 'nowhere'")
        run(app, mom=mom, other=NOWHERE)
        kinds = connection.execute("SELECT kind FROM saf.parked ORDER BY id").fetchall()
        assert kinds == [("main",), ("route",)]
        connection.execute("UPDATE saf.route SET destination = 'other'")
        for statement in (NOT_SOON, SOON):
            connection.execute(statement, [["route"]])
        run(app, mom=mom, other=other)
        assert bodies(other) == []
        let_time_pass(app)
        run(app, mom=mom, other=other)
    assert bodies(other) == ["1", "2"]
    assert count(app, "parked") == count(app, "backoff") == 0


class DownAfterTheFirst(PostgresInbox):
    """A destination that goes down after it has answered once."""

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        if chunk.rows["body"].cast("string").to_pylist()[-1] > "1":
            raise Unavailable("destination 'other'", "it went down")
        return super().store(chunk, exactly_once=exactly_once)


@pytest.mark.parametrize("due", [["service"], ["service", "main"]])
def test_what_waits_for_its_destination_goes_after_what_waits_for_its_service_since(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch, due: list[str]
) -> None:
    with connect(app) as connection, connect(other) as store:
        store.execute("INSERT INTO saf.service VALUES ('billing')")
        route(connection, "shipping", "other")
        for number in range(1, 4):
            send_to(connection, "shipping", str(number), key="k")
        run(app, mom=mom, other=NOWHERE)
        let_time_pass(app)
        with monkeypatch.context() as patch:
            patch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", DownAfterTheFirst)
            with Cycle(app, forwarding_rules("exactly_once", 1, mom=mom, other=other)) as cycle:
                cycle.run()
        lanes = connection.execute("SELECT kind FROM saf.parked ORDER BY id").fetchall()
        assert lanes == [("service",), ("main",), ("main",)]

        store.execute("INSERT INTO saf.service VALUES ('shipping')")
        connection.execute(NOT_SOON, [due])
        connection.execute(SOON, [due])
        if "main" not in due:
            run(app, mom=mom, other=other)
            assert bodies(other) == []
            connection.execute(NOT_SOON, [[]])
            connection.execute("UPDATE saf.backoff SET next_attempt_at = now() WHERE kind = 'main'")
            run(app, mom=mom, other=other)
            assert bodies(other) == []
            let_time_pass(app)
        run(app, mom=mom, other=other)
    assert bodies(other) == ["1", "2", "3"]
    assert count(app, "parked") == count(app, "backoff") == 0


def test_what_is_retried_goes_although_others_wait_for_its_service(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(app) as connection:
        know(other, "billing")
        route(connection, "shipping", "other")
        send_to(connection, "shipping", "expired", expires_at=datetime.now(UTC))
        run(app, mom=mom, other=other)
        for number in range(1, 4):
            send_to(connection, "shipping", str(number))
        run(app, mom=mom, other=NOWHERE)
        let_time_pass(app)
        with monkeypatch.context() as patch:
            patch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", DownAfterTheFirst)
            with Cycle(app, forwarding_rules("exactly_once", 1, mom=mom, other=other)) as cycle:
                cycle.run()
        know(other, "shipping")
        for statement in (NOT_SOON, SOON):
            connection.execute(statement, [["main"]])
        assert len(decide.retry(connection, DeadLetters(), "")) == 1
        run(app, mom=mom, other=other)
        assert bodies(other) == ["expired"]
        let_time_pass(app)
        run(app, mom=mom, other=other)
    assert bodies(other) == ["expired", "1", "2", "3"]


def test_a_lane_of_a_service_that_stays_unknown_counts_its_attempts(app: Dsn, mom: Dsn) -> None:
    know(mom, "billing")
    with connect(app) as connection:
        send_to(connection, "shipping", "1")
        for attempts in (1, 2):
            run(app, mom=mom)
            assert fetch(connection, "SELECT attempts FROM saf.backoff") == [(attempts,)]
            let_time_pass(app)


def test_new_messages_go_in_the_cycle_that_empties_the_lane_before_them(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        send_to(connection, "shipping", "1")
        run(app, mom=mom, other=NOWHERE)
        let_time_pass(app)
        send_to(connection, "shipping", "2")
        run(app, mom=mom, other=other)
    assert bodies(other) == ["1", "2"]


class DownForTheFirst(PostgresInbox):
    """A destination that answers, but not for the first message."""

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        if "1" in chunk.rows["body"].cast("string").to_pylist():
            raise Unavailable("destination 'other'", "it was down")
        return super().store(chunk, exactly_once=exactly_once)


def test_new_messages_go_after_a_replay_that_has_just_failed(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(app) as connection, connect(other) as store:
        route(connection, "shipping", "other")
        send_to(connection, "shipping", "1", key="k")
        run(app, mom=mom, other=other)
        store.execute("DELETE FROM saf.inbox")
        lost = fetch(connection, "SELECT shard, id FROM saf.outbox")
        replay(connection, lost, Routes(routes=(Route(destination="other"),)), "")
        send_to(connection, "shipping", "2", key="k")
    with monkeypatch.context() as patch:
        patch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", DownForTheFirst)
        run(app, mom=mom, other=other)
    assert bodies(other) == []
    let_time_pass(app)
    run(app, mom=mom, other=other)
    assert bodies(other) == ["1", "2"]


@pytest.mark.parametrize("due", [["main"], ["main", "replay"]])
def test_what_is_parked_goes_after_a_replay_that_has_failed(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch, due: list[str]
) -> None:
    with connect(app) as connection, connect(other) as store:
        route(connection, "shipping", "other")
        send_to(connection, "shipping", "1", key="k")
        run(app, mom=mom, other=other)
        store.execute("DELETE FROM saf.inbox")
        lost = fetch(connection, "SELECT shard, id FROM saf.outbox")
        replay(connection, lost, Routes(routes=(Route(destination="other"),)), "")
        run(app, mom=mom, other=NOWHERE)
        send_to(connection, "shipping", "2", key="k")
        run(app, mom=mom, other=NOWHERE)
        kinds = connection.execute("SELECT kind FROM saf.parked ORDER BY id").fetchall()
        assert kinds == [("replay",), ("main",)]

        connection.execute(NOT_SOON, [due])
        connection.execute(SOON, [due])
        with monkeypatch.context() as patch:
            patch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", DownForTheFirst)
            run(app, mom=mom, other=other)
        assert bodies(other) == []
        let_time_pass(app)
        run(app, mom=mom, other=other)
    assert bodies(other) == ["1", "2"]
    assert count(app, "parked") == count(app, "backoff") == 0


def test_what_is_retried_while_a_replay_waits_makes_nothing_else_wait(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection, connect(other) as store:
        route(connection, "shipping", "other")
        send_to(connection, "shipping", "1")
        send_to(connection, "shipping", "expired", expires_at=datetime.now(UTC))
        run(app, mom=mom, other=other)
        store.execute("DELETE FROM saf.inbox")
        lost = fetch(connection, "SELECT shard, id FROM saf.outbox ORDER BY id LIMIT 1")
        replay(connection, lost, Routes(routes=(Route(destination="other"),)), "")
        run(app, mom=mom, other=NOWHERE)
        connection.execute(NOT_SOON, [[]])
        assert len(decide.retry(connection, DeadLetters(), "")) == 1
        run(app, mom=mom, other=other)
        assert bodies(other) == ["expired"]
        assert fetch(connection, "SELECT kind FROM saf.backoff") == [("replay",)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("destination", "kind"), [("", "route"), ("other", "service"), ("other", "found_route")]
)
def test_what_is_sent_again_is_not_taken_for_new_because_others_wait_meanwhile(
    app: Dsn, mom: Dsn, other: Dsn, destination: str, kind: str
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        shards = {shard_of(key, 64): key for key in map(str, range(20))}
        (_, key), (others, _) = sorted(shards.items())[:2]
        send_to(connection, "shipping", "stored", key=key)
        arm("mom_commit", crash)
        with pytest.raises(Crash):
            run(app, mom=mom, other=other)
        connection.execute(
            "INSERT INTO saf.parked (subscription_id, destination, kind, subject, shard, id, "
            "batch, position, to_service, body, message_id, created_at) "
            "SELECT subscription_id, %s, %s, 'shipping', %s, 99, 0, 99, 'shipping', 'of others', "
            "gen_random_uuid(), now() FROM saf.subscription",
            [destination, kind, others],
        )
        connection.execute(
            "INSERT INTO saf.backoff "
            "(subscription_id, destination, kind, subject, error, next_attempt_at) "
            "SELECT subscription_id, %s, %s, 'shipping', 'it waits', now() + interval '1 h' "
            "FROM saf.subscription",
            [destination, kind],
        )
        connection.execute("DELETE FROM saf.member")
        with Cycle(app, forwarding_rules("exactly_once", 1000, mom=mom, other=other)) as cycle:
            cycle.open(parts=64)
            cycle.close(cycle.deliver())
        assert bodies(other) == ["stored"]
        let_time_pass(app)
        run(app, mom=mom, other=other)
    assert bodies(other) == ["stored", "of others"]


def store_without_an_answer(
    connection: psycopg.Connection[Any],
    other: Dsn,
    monkeypatch: pytest.MonkeyPatch,
    cycle: Callable[[], object],
) -> None:
    """Forward a message for shipping, and lose the answer; billing has the same destination."""
    route(connection, "shipping", "other")
    route(connection, "billing", "other")
    send_to(connection, "shipping", "stored", key="k")
    with monkeypatch.context() as patch:
        patch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", AnswerLost)
        cycle()
    assert bodies(other) == ["stored"]


def test_what_was_stored_before_its_service_went_is_not_parked_for_it(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(app) as connection, connect(other) as store:
        store_without_an_answer(
            connection, other, monkeypatch, lambda: run(app, mom=mom, other=other)
        )
        send_to(connection, "shipping", "not yet", key="k")
        send_to(connection, "billing", "known", key="k")
        run(app, mom=mom, other=other)
        assert count(app, "parked") == 3
        store.execute("INSERT INTO saf.service VALUES ('billing')")
        let_time_pass(app)
        run(app, mom=mom, other=other)
        assert bodies(other) == ["stored", "known"]
        assert count(app, "parked") == 1
        store.execute("INSERT INTO saf.service VALUES ('shipping')")
        let_time_pass(app)
        run(app, mom=mom, other=other)
    assert bodies(other) == ["stored", "known", "not yet"]


@pytest.mark.parametrize("crashed", [False, True])
def test_what_was_stored_before_others_had_to_wait_for_their_service_is_no_alarm(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch, crashed: bool
) -> None:
    with connect(app) as connection, connect(other) as store:
        route(connection, "shipping", "other")
        route(connection, "billing", "other")
        send_to(connection, "shipping", "stored", key="k")
        if crashed:  # the batch is read again, with a message more in its chunk
            send_to(connection, "shipping", "not yet", key="k")
            arm("mom_commit", crash)
            with (
                Cycle(app, forwarding_rules("exactly_once", 1, mom=mom, other=other)) as cycle,
                pytest.raises(Crash),
            ):
                cycle.run()
            connection.execute("DELETE FROM saf.member")
        else:
            with monkeypatch.context() as patch:
                patch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", AnswerLost)
                run(app, mom=mom, other=other)
            send_to(connection, "shipping", "not yet", key="k")
            run(app, mom=mom, other=other)
        assert bodies(other) == ["stored"]
        store.execute("INSERT INTO saf.service VALUES ('billing')")
        let_time_pass(app)
        run(app, mom=mom, other=other)
        kinds = connection.execute("SELECT kind FROM saf.parked").fetchall()
        assert kinds == [("service",)]

        send_to(connection, "billing", "known", key="k")
        assert run(app, mom=mom, other=other) == []
        assert bodies(other) == ["stored", "known"]
        store.execute("INSERT INTO saf.service VALUES ('shipping')")
        let_time_pass(app)
        assert run(app, mom=mom, other=other) == []
    assert bodies(other) == ["stored", "known", "not yet"]


def test_what_was_stored_at_least_once_may_wait_for_its_service_since(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = forwarding_rules("at_least_once", 3, mom=mom, other=other)

    def cycle() -> list[str | None]:
        let_time_pass(app)
        with Cycle(app, rules) as one:
            return [receipt.error_kind for receipt in one.run() if receipt.error_kind]

    with connect(app) as connection, connect(other) as store:
        store_without_an_answer(connection, other, monkeypatch, cycle)
        store.execute("INSERT INTO saf.service VALUES ('billing')")
        cycle()
        assert fetch(connection, "SELECT kind, subject FROM saf.parked") == [
            ("service", "shipping")
        ]

        send_to(connection, "billing", "known", key="k")
        assert cycle() == []
        assert bodies(other) == ["stored", "known"]
        store.execute("INSERT INTO saf.service VALUES ('shipping')")
        assert cycle() == []
    assert bodies(other) == ["stored", "known", "stored"]


@pytest.mark.parametrize("also_unreachable", [False, True])
def test_what_waits_for_its_service_does_not_explain_a_mark_of_exactly_once(
    app: Dsn, mom: Dsn, other: Dsn, also_unreachable: bool
) -> None:
    with connect(app) as connection, connect(mom) as store:
        store.execute("INSERT INTO saf.service VALUES ('billing')")
        send_to(connection, "shipping", "waits", key="k")
        run(app, mom=mom)
        ((number, shard, opened_at),) = fetch(
            connection, "SELECT subscription_id, shard, opened_at FROM saf.parked"
        )
        if also_unreachable:  # messages of the same destination wait in its own lane, too
            send_to(connection, "billing", "waits for the destination", key="another")
            run(app, mom=NOWHERE, other=other)
            assert count(app, "parked") == 2
        place = {lane: (lane, shard) for lane in (MAIN, AGAIN)}
        mark = Mark(batch=1, position=1, opened_at=opened_at, acknowledged=True)
        marks = dict.fromkeys(place.values(), mark)
        assert not_parked(connection, number, "mom", marks) == [place[MAIN]]


# What waited longest may find its way last: nothing that went before it takes it for stored


def test_what_is_retried_before_it_has_a_route_arrives_after_what_was_retried_later(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection, connect(mom) as store:
        route(connection, "billing", "mom")
        store.execute("ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (body <> 'bad')")
        send_to(connection, "shipping", "expired", key="k", expires_at=datetime.now(UTC))
        send_to(connection, "billing", "bad", key="k")
        run_routed(app, mom)
        store.execute("ALTER TABLE saf.inbox DROP CONSTRAINT polite")
        assert (
            len(decide.retry(connection, DeadLetters(service="shipping"), "wanted after all")) == 1
        )
        run_routed(app, mom)
        assert len(decide.retry(connection, DeadLetters(service="billing"), "it was not bad")) == 1
        run_routed(app, mom)
        assert bodies(mom) == ["bad"]

        route(connection, "shipping", "mom")
        let_time_pass(app)
        run_routed(app, mom)
    assert bodies(mom) == ["bad", "expired"]
    assert count(app, "parked") == count(app, "backoff") == 0


def test_of_what_is_retried_together_each_goes_when_it_has_a_route(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        for service in ("shipping", "billing", "shipping", "billing"):
            send_to(connection, service, service, key="k", expires_at=datetime.now(UTC))
        run_routed(app, mom)
        assert len(decide.retry(connection, DeadLetters(), "wanted after all")) == 4
        for service in ("billing", "shipping"):
            route(connection, service, "mom")
            let_time_pass(app)
            run_routed(app, mom)
    assert bodies(mom) == ["billing", "billing", "shipping", "shipping"]


def test_what_is_retried_says_for_which_service_it_has_no_way(app: Dsn, mom: Dsn) -> None:
    def why() -> list[str]:
        return [error for (error,) in fetch(connection, "SELECT error FROM saf.backoff")]

    with connect(app) as connection:
        add_router(connection, "departures", "python", "nowhere.to_be:imported")
        for service in ("shipping", "departures"):
            send_to(connection, service, service, key="k", expires_at=datetime.now(UTC))
        run_routed(app, mom)
        for service, said in (
            ("shipping", "no route for service 'shipping'"),
            ("departures", "router 'departures'"),
        ):
            assert (
                len(decide.retry(connection, DeadLetters(service=service), "wanted after all")) == 1
            )
            run_routed(app, mom)
            (error,) = why()
            assert said in error
            route(connection, service, "mom")
            let_time_pass(app)
            run_routed(app, mom)
    assert bodies(mom) == ["shipping"]


def test_what_its_router_could_not_resolve_arrives_after_what_waited_for_a_route_meanwhile(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        add_router(connection, "departures", "python", "nowhere.to_be:imported")
        send_to(connection, "departures", "1", key="k")
        send_to(connection, "EWR", "2", key="k")
        run_routed(app, mom)
        route(connection, "EWR", "mom")
        let_time_pass(app)
        run_routed(app, mom)
        assert bodies(mom) == ["2"]

        add_router(connection, "departures", "python", "tests.classifiers:to_ewr")
        let_time_pass(app)
        run_routed(app, mom)
    assert bodies(mom) == ["2", "1"]
    assert count(app, "parked") == count(app, "backoff") == 0


def run_routed(app: Dsn, mom: Dsn) -> None:
    """Twice: once to move, once to deliver; by nothing but the routes that there are."""
    for _ in range(2):
        with without_default(app, mom=mom) as cycle:
            cycle.run()
