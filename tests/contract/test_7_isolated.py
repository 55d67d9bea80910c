"""Guarantee 7: a destination that is down, slow or rejecting delays nobody else's messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from saf.database import Dsn, fetch
from tests.destinations import NOWHERE, AnswerLost, count, route, run, send_to
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass, send


@pytest.mark.every_postgresql
def test_one_destination_down_delays_no_other_and_gets_its_messages_in_order(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        for number in range(10):
            send_to(connection, "billing", f"b{number}")
            send_to(connection, "shipping", f"s{number}")
        assert run(app, mom=mom, other=NOWHERE) == []
        assert bodies(mom) == [f"b{number}" for number in range(10)]
        assert count(app, "parked") == 10

        send_to(connection, "shipping", "s10")
        send_to(connection, "billing", "b10")
        assert run(app, mom=mom, other=other) == []
        assert bodies(mom)[-1] == "b10"
        assert bodies(other) == [], "its time has not come, and new ones wait behind the old"

        let_time_pass(app)
        send_to(connection, "shipping", "s11")
        run(app, mom=mom, other=other)
        assert bodies(other) == [f"s{number}" for number in range(12)]
        assert count(app, "parked") == count(app, "backoff") == 0


@pytest.mark.slow
def test_attempts_follow_service_brokers_schedule_over_restarts_and_success_resets_it(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        send_to(connection, "shipping", "s")
        for wait in (4, 8, 16, 32, 64, 64, 64):
            ((before,),) = fetch(connection, "SELECT clock_timestamp()")
            run(app, mom=mom, other=NOWHERE)
            query = "SELECT next_attempt_at, clock_timestamp() FROM saf.backoff"
            ((next_attempt, after),) = fetch(connection, query)
            assert before <= next_attempt - timedelta(seconds=wait) <= after
            run(app, mom=mom, other=NOWHERE)  # not due: no attempt, nothing changes
            assert fetch(connection, query)[0][0] == next_attempt
            let_time_pass(app)
        run(app, mom=mom, other=other)
        assert count(app, "backoff") == 0
        send_to(connection, "shipping", "again")
        run(app, mom=mom, other=NOWHERE)
        assert connection.execute("SELECT attempts FROM saf.backoff").fetchone() == (1,)


def test_two_forwarders_that_fail_at_the_same_time_count_as_one_attempt(app: Dsn, mom: Dsn) -> None:
    rules = forwarding_rules(mom=mom, other=NOWHERE)
    with connect(app) as connection, Cycle(app, rules) as one, Cycle(app, rules) as two:
        route(connection, "shipping", "other")
        for cycle in (one, two, one, two):
            cycle.open()
            cycle.close(cycle.deliver())
        for number in range(100):
            send_to(connection, "shipping", str(number), key=str(number))
        one.open()
        two.open()
        for cycle in (one, two):
            cycle.close(cycle.deliver())
        assert connection.execute("SELECT attempts FROM saf.backoff").fetchone() == (1,)
        assert count(app, "parked") == 100


def test_a_chunk_whose_acknowledgement_got_lost_before_it_was_parked_is_stored_once(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        for number in range(10):
            send_to(connection, "shipping", str(number))
            send_to(connection, "billing", str(number))
        with monkeypatch.context() as patch:
            patch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", AnswerLost)
            run(app, mom=mom, other=other)
        assert 0 < len(bodies(other)) < 10, "the first chunk"
        assert count(app, "parked") == 10
        let_time_pass(app)
        run(app, mom=mom, other=other)
    assert bodies(other) == bodies(mom) == [str(number) for number in range(10)]


def test_the_only_destination_down_leaves_the_batch_open_until_its_time(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        for number in range(5):
            send(connection, str(number), key="k")
        assert run(app, mom=NOWHERE) == ["Unavailable"]
        assert count(app, "parked") == 0
        assert run(app, mom=mom) == []
        assert bodies(mom) == []
        let_time_pass(app)
        assert run(app, mom=NOWHERE) == ["Unavailable"]
        assert connection.execute("SELECT attempts FROM saf.backoff").fetchone() == (2,)
        let_time_pass(app)
        run(app, mom=mom)
    assert bodies(mom) == [str(number) for number in range(5)]
    assert count(app, "backoff") == 0


def test_messages_without_a_route_wait_for_one_and_others_go_on(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        route(connection, "billing", "mom")
        for number in range(4):
            send_to(connection, "nobody", f"n{number}")
            send_to(connection, "billing", f"b{number}")
        with Cycle(app, forwarding_rules(chunk_rows=3, mom=mom)) as cycle:
            cycle.broker.tend()
            cycle.work = cycle.broker.open_work(None)
            cycle.close(cycle.deliver())
        assert bodies(mom) == [f"b{number}" for number in range(4)]
        error = connection.execute("SELECT subject, error FROM saf.backoff").fetchone()
        assert error is not None
        assert error[0] == "nobody"
        assert "'nobody'" in error[1]
        route(connection, "nobody", "mom")
        send_to(connection, "nobody", "n4")
        let_time_pass(app)
        run(app, mom=mom)
        assert [b for b in bodies(mom) if b[0] == "n"] == [f"n{number}" for number in range(5)]
        assert count(app, "parked") == count(app, "backoff") == 0


def test_a_route_to_a_destination_that_does_not_exist_is_none_until_it_is_mended(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        route(connection, "billing", "mmo")
        send(connection, "one")
        run(app, mom=mom)
        assert count(app, "parked") == 1
        connection.execute("UPDATE saf.route SET destination = 'mom'")
        let_time_pass(app)
        run(app, mom=mom)
    assert bodies(mom) == ["one"]


def test_messages_for_a_service_that_the_destination_does_not_know_wait_for_it(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection, connect(mom) as store:
        store.execute("INSERT INTO saf.service VALUES ('billing')")
        for number in range(4):
            send_to(connection, "shipping", f"s{number}")
            send_to(connection, "billing", f"b{number}")
        run(app, mom=mom)
        send_to(connection, "shipping", "s4")
        send_to(connection, "billing", "b4")
        run(app, mom=mom)
        assert bodies(mom) == [f"b{number}" for number in range(5)]
        assert count(app, "parked") == 5
        store.execute("INSERT INTO saf.service VALUES ('shipping')")
        let_time_pass(app)
        send_to(connection, "shipping", "s5")
        run(app, mom=mom)
        assert bodies(mom)[5:] == [f"s{number}" for number in range(6)]
        assert count(app, "parked") == count(app, "backoff") == 0


def test_of_messages_that_waited_for_a_destination_some_may_have_to_wait_for_a_service(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection, connect(other) as store:
        route(connection, "shipping", "other")
        route(connection, "packing", "other")
        store.execute("INSERT INTO saf.service VALUES ('shipping')")
        for number in range(5):
            send_to(connection, "shipping", f"s{number}")
            send_to(connection, "packing", f"p{number}")
            send_to(connection, "billing", f"b{number}")
        run(app, mom=mom, other=NOWHERE)
        assert count(app, "parked") == 10
        let_time_pass(app)
        run(app, mom=mom, other=other)
        assert bodies(other) == [f"s{number}" for number in range(5)]
        store.execute("INSERT INTO saf.service VALUES ('packing')")
        let_time_pass(app)
        run(app, mom=mom, other=other)
        assert bodies(other)[5:] == [f"p{number}" for number in range(5)]
        assert count(app, "parked") == count(app, "backoff") == 0


def test_a_rejected_message_becomes_a_dead_letter_and_its_neighbours_are_delivered(
    app: Dsn, mom: Dsn
) -> None:
    with connect(mom) as connection:
        connection.execute(
            "ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (convert_from(body, 'UTF8') <> 'x')"
        )
    with connect(app) as connection:
        for number in range(20):
            send(connection, "x" if number in (3, 4, 11, 19) else str(number), key="k")
        run(app, mom=mom)
        assert bodies(mom) == [str(n) for n in range(20) if n not in (3, 4, 11, 19)]
        dead = connection.execute("SELECT reason, error, body FROM saf.dead_letter").fetchall()
        assert [(reason, bytes(body)) for reason, _, body in dead] == [("rejected", b"x")] * 4
        assert all("polite" in error for _, error, _ in dead)
        assert count(app, "backoff") == 0


def test_an_expired_message_becomes_a_dead_letter(app: Dsn, mom: Dsn) -> None:
    now = datetime.now(UTC)
    with connect(app) as connection:
        send_to(connection, "billing", "late", expires_at=now - timedelta(seconds=1))
        send_to(connection, "billing", "early", expires_at=now + timedelta(hours=1))
        send_to(connection, "billing", "never")
        run(app, mom=mom)
        dead = connection.execute("SELECT reason, body FROM saf.dead_letter").fetchall()
    assert [(reason, bytes(body)) for reason, body in dead] == [("expired", b"late")]
    assert bodies(mom) == ["early", "never"]


def test_a_message_over_the_size_becomes_a_dead_letter_without_being_read(
    app: Dsn, mom: Dsn
) -> None:
    large = "x" * 2_000_000
    with connect(app) as connection:
        for body in ("a", large, "b"):
            send(connection, body, key="k")
        rules = forwarding_rules(mom=mom)
        rules = type(rules)(**{**rules.__dict__, "max_bytes": 1_000_000})
        with Cycle(app, rules) as cycle:
            cycle.run()
        row = connection.execute("SELECT reason, error, length(body) FROM saf.dead_letter")
        assert row.fetchall() == [
            ("over_size", "the body has more than forwarder.max_bytes = 1000000", len(large))
        ]
    assert bodies(mom) == ["a", "b"]


def test_at_most_once_messages_wait_unsent_and_one_that_may_have_left_is_a_dead_letter(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        connection.execute("UPDATE saf.route SET quality = 'at_most_once'")
        send_to(connection, "shipping", "one")
        with monkeypatch.context() as patch:
            patch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", AnswerLost)
            run(app, mom=mom, other=other)
        dead = connection.execute("SELECT reason FROM saf.dead_letter").fetchall()
        assert dead == [("unavailable",)]
        run(app, mom=mom, other=other)
    assert bodies(other) == ["one"]


def test_a_parked_message_shows_as_parked_and_a_dead_one_as_dead(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        send_to(connection, "shipping", "parked")
        send_to(connection, "billing", "dead", expires_at=datetime(2020, 1, 1, tzinfo=UTC))
        send_to(connection, "billing", "forwarded")
        run(app, mom=mom, other=NOWHERE)
        send_to(connection, "billing", "pending")
        states = connection.execute("SELECT status FROM saf.outbox_status ORDER BY id").fetchall()
    assert [state for (state,) in states] == ["parked", "dead", "forwarded", "pending"]
