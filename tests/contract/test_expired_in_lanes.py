"""What expires while it is parked becomes a dead letter; but for what is stored already."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from saf import Outbox, Unavailable
from saf.database import Dsn, fetch
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.operating import decide
from saf.setaside.selection import DeadLetters
from tests.destinations import NOWHERE, AnswerLost, count, know, route, run, send_to
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass
from tests.routing import without_default

EXPIRE = """
UPDATE saf.parked SET expires_at = now() - interval '1 s' WHERE convert_from(body, 'UTF8') = %s
"""


def dead(source: psycopg.Connection[None]) -> list[tuple[str, str, bytes]]:
    return fetch(source, "SELECT reason, destination, body FROM saf.dead_letter ORDER BY 3")


def test_what_waits_for_a_route_is_dead_when_it_has_expired_although_there_is_none(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as source, without_default(app, mom=mom) as cycle:
        for text in ("1", "2", "3"):
            send_to(source, "shipping", text)
        cycle.run()
        source.execute(EXPIRE, ["2"])
        let_time_pass(app)
        assert sum(one.dead for one in cycle.run()) == 1
        assert dead(source) == [("expired", "", b"2")]
        assert count(app, "parked") == 2
        route(source, "shipping", "mom")
        let_time_pass(app)
        cycle.run()
    assert bodies(mom) == ["1", "3"]


@pytest.mark.parametrize("quality", ["exactly_once", "at_least_once", "at_most_once"])
def test_what_waited_for_its_destination_is_dead_if_it_expired_meanwhile(
    app: Dsn, mom: Dsn, other: Dsn, quality: str
) -> None:
    with connect(app) as source:
        source.execute("INSERT INTO saf.route (service, destination) VALUES ('s', 'other')")
        for text in ("1", "2", "3"):
            send_to(source, "s", text)
        run(app, mom=mom, other=NOWHERE)
        source.execute("UPDATE saf.parked SET quality = %s", [quality])
        source.execute(EXPIRE, ["2"])
        let_time_pass(app)
        run(app, mom=mom, other=other)
        assert bodies(other) == ["1", "3"]
        assert dead(source) == [("expired", "other", b"2")]
        assert count(app, "parked") == count(app, "backoff") == 0


def test_what_is_stored_already_is_not_dead_because_its_answer_got_lost(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(app) as source:
        route(source, "s", "other")
        for text in ("1", "2"):
            send_to(source, "s", text)
        with monkeypatch.context() as patch:
            patch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", AnswerLost)
            run(app, mom=mom, other=other)
        send_to(source, "s", "3")
        run(app, mom=mom, other=NOWHERE)
        assert (bodies(other), count(app, "parked")) == (["1", "2"], 3)
        for text in ("1", "2", "3"):
            source.execute(EXPIRE, [text])
        let_time_pass(app)
        run(app, mom=mom, other=other)
        assert bodies(other) == ["1", "2"]
        assert dead(source) == [("expired", "other", b"3")]
        assert count(app, "parked") == count(app, "backoff") == 0


def test_what_has_expired_waits_while_its_destination_does_not_say_whether_it_has_it(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_now(*_: object) -> None:
        raise Unavailable("destination 'other'", "it is being started")

    with connect(app) as source:
        route(source, "s", "other")
        for text in ("1", "2", "3"):
            send_to(source, "s", text)
        run(app, mom=mom, other=NOWHERE)
        source.execute(EXPIRE, ["2"])
        let_time_pass(app)
        with monkeypatch.context() as patch:
            patch.setattr(PostgresInbox, "marks", not_now)
            run(app, mom=mom, other=other)
        assert (bodies(other), count(app, "parked"), dead(source)) == ([], 3, [])
        ((attempts, error),) = fetch(source, "SELECT attempts, error FROM saf.backoff")
        assert attempts == 2
        assert "it is being started" in error
        let_time_pass(app)
        run(app, mom=mom, other=other)
        assert bodies(other) == ["1", "3"]
        assert dead(source) == [("expired", "other", b"2")]
        assert count(app, "parked") == count(app, "backoff") == 0


def test_what_waits_for_its_service_is_dead_when_it_has_expired_although_nobody_knows_it(
    app: Dsn, mom: Dsn
) -> None:
    know(mom, "billing")
    with connect(app) as source:
        for text in ("1", "2", "3"):
            send_to(source, "shipping", text)
        run(app, mom=mom)
        source.execute(EXPIRE, ["2"])
        let_time_pass(app)
        run(app, mom=mom)
        assert dead(source) == [("expired", "mom", b"2")]
        know(mom, "shipping")
        let_time_pass(app)
        run(app, mom=mom)
    assert bodies(mom) == ["1", "3"]


@pytest.mark.parametrize("destination", ["other", ""])
def test_what_is_sent_again_is_sent_although_it_has_expired_since(
    app: Dsn, mom: Dsn, other: Dsn, destination: str
) -> None:
    """Its reader decides, also where the message has waited for a route once more."""
    with connect(app) as source:
        route(source, "s", "other")
        send_to(source, "s", "1")
        run(app, mom=mom, other=NOWHERE)
        assert count(app, "parked") == 1
        for table in ("parked", "backoff"):
            source.execute(
                f"UPDATE saf.{table} SET kind = 'replay', destination = %s", [destination]
            )
        source.execute(EXPIRE, ["1"])
        let_time_pass(app)
        run(app, mom=mom, other=other)
        assert bodies(other) == ["1"]
        assert dead(source) == []
        assert count(app, "parked") == count(app, "backoff") == 0


def test_what_is_too_large_is_dead_again_when_it_is_retried_and_nothing_allows_it(
    app: Dsn, mom: Dsn
) -> None:
    large = "x" * 2000
    rules = forwarding_rules("exactly_once", mom=mom)
    small = replace(rules, max_bytes=1000)
    with connect(app) as source:
        send_to(source, "s", large)
        with Cycle(app, small) as cycle:
            cycle.run()
        for _ in range(2):
            assert len(decide.retry(source, DeadLetters(reason="over_size"), "once more")) == 1
            with Cycle(app, small) as cycle:
                cycle.run()
            (letter,) = DeadLetters().rows(source)
            assert letter.reason == "over_size"
            assert letter.error == "the body has more than forwarder.max_bytes = 1000"
            assert count(app, "parked") == count(app, "backoff") == 0
        assert bodies(mom) == []
        assert len(decide.retry(source, DeadLetters(), "it is allowed now")) == 1
        with Cycle(app, rules) as cycle:
            cycle.run()
    assert bodies(mom) == [large]


def test_what_a_batch_in_hand_has_does_not_expire_while_time_passes(app: Dsn) -> None:
    """A batch that is read again has the same messages: it was opened before they expired."""
    with app.connect(role="test") as connection:
        in_an_hour = datetime.now(UTC) + timedelta(hours=1)
        Outbox().send(connection, "billing", "mortal", expires_at=in_an_hour)
    with connect(app) as connection:
        connection.execute(
            "UPDATE saf.cursor SET open = pg_current_snapshot(), batch = 1, opened_at = now()"
        )
        query = "SELECT expires_at - created_at FROM saf.outbox"
        ((lasts,),) = fetch(connection, query)
        let_time_pass(app)
        assert fetch(connection, query)[0][0] > lasts
