"""Pauses of destinations: nothing is sent there, and no attempt is made, until they are resumed."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from saf.broker.services import create_service
from saf.config import load
from saf.database import Dsn, fetch
from saf.engine import context
from saf.forwarding.broker import SourceBroker
from saf.operating import decide
from saf.operating.doctor.broker import pauses
from saf.operating.doctor.patient import Limits, Patient
from saf.operating.figures import asker
from saf.setaside import backoff
from saf.setaside.audit import audited
from saf.setaside.lane import Kind
from saf.setaside.selection import DeadLetters
from saf.setaside.waiting import parked, retry_now
from tests.destinations import NOWHERE, count, route, run, send_to
from tests.pipeline import bodies, connect, forward, let_time_pass, send
from tests.programs import configuration


def pause(app: Dsn, name: str = "other", why: str = "") -> None:
    with connect(app) as connection:
        assert backoff.pause(connection, name, why)


def resume(app: Dsn, name: str = "other") -> None:
    with connect(app) as connection:
        assert backoff.resume(connection, name)


def lanes(connection: psycopg.Connection[object]) -> list[tuple[object, ...]]:
    return fetch(connection, "SELECT destination, kind, attempts FROM saf.backoff ORDER BY 1, 2")


def test_a_paused_destination_gets_nothing_and_then_everything_in_order(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        pause(app)
        for number in range(10):
            send_to(connection, "billing", f"b{number}")
            send_to(connection, "shipping", f"s{number}")
            run(app, mom=mom, other=other)
        assert bodies(mom) == [f"b{number}" for number in range(10)], "others continue"
        assert bodies(other) == []
        assert lanes(connection) == [("other", "main", 0)], "no attempt was made"
        assert count(app, "parked") == 10

        resume(app)
        send_to(connection, "shipping", "s10")
        run(app, mom=mom, other=other)
        assert bodies(other) == [f"s{number}" for number in range(11)]
        assert count(app, "parked") == count(app, "backoff") == 0


def test_of_the_only_destination_nothing_is_copied_in_a_pause(app: Dsn, mom: Dsn) -> None:
    pause(app, "mom")
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number))
            forward(app, mom=mom)
        assert (bodies(mom), count(app, "parked")) == ([], 0)
        resume(app, "mom")
        for _ in range(2):  # the batch that was open, and the rest
            forward(app, mom=mom)
        assert bodies(mom) == [str(number) for number in range(10)]
        assert count(app, "backoff") == 0


def test_a_visit_of_a_source_has_no_work_for_a_paused_destination(app: Dsn) -> None:
    source = SourceBroker("app", app, lease_seconds=30)
    with connect(app) as connection:
        send(connection, "1")
        assert source.visit("mom", brief=False).work
        source.leave()
        pause(app, "mom")
        assert source.visit("mom", brief=False).work == []
    source.leave()


def test_a_retry_is_no_way_into_a_paused_destination(app: Dsn, mom: Dsn, other: Dsn) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        send_to(connection, "shipping", "late", expires_at="2000-01-01")
        run(app, mom=mom, other=other)
        pause(app)
        send_to(connection, "shipping", "1")
        run(app, mom=mom, other=other)
        assert len(decide.retry(connection, DeadLetters(), "again")) == 1
        for _ in range(3):
            assert retry_now(connection) >= 0
            run(app, mom=mom, other=other)
        assert bodies(other) == []
        assert ("other", "main", 0) in lanes(connection)
        assert all(attempts == 0 for *_, attempts in lanes(connection))
        due = "SELECT count(*) FROM saf.backoff WHERE next_attempt_at <= now()"
        assert fetch(connection, due) == [(0,)], "no cycle tries them in vain"
        resume(app)
        run(app, mom=mom, other=other)
        assert sorted(bodies(other)) == ["1", "late"]
        assert lanes(connection) == []


def test_what_waited_for_its_service_waits_for_the_end_of_the_pause(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection, connect(other) as there:
        route(connection, "shipping", "other")
        create_service(there, "anything")
        send_to(connection, "shipping", "1")
        run(app, mom=mom, other=other)
        assert lanes(connection) == [("other", "service", 1)]
        pause(app)
        create_service(there, "shipping")
        let_time_pass(app)
        run(app, mom=mom, other=other)
        assert bodies(other) == []
        resume(app)
        run(app, mom=mom, other=other)
        assert bodies(other) == ["1"]


def test_a_pause_reaches_a_task_at_work(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "ASK_SECONDS", 0.0)
    paused = backoff.paused
    asked = [0]

    def pausing(
        connection: psycopg.Connection[object], subscription_id: int, name: str
    ) -> str | None:
        asked[0] += name == "other"
        if asked[0] == 3:
            pause(app)
        return paused(connection, subscription_id, name)

    monkeypatch.setattr(backoff, "paused", pausing)
    with connect(app) as connection:
        route(connection, "shipping", "other")
        for number in range(10):
            send_to(connection, "shipping", str(number))
        forward(app, chunk_rows=1, mom=mom, other=other)
        before = len(bodies(other))
        assert 0 < before < 10
        resume(app)
        forward(app, chunk_rows=1, mom=mom, other=other)
    assert bodies(other) == [str(number) for number in range(10)]


def test_a_pause_reaches_a_task_that_delivers_what_was_parked(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        for number in range(10):
            send_to(connection, "shipping", str(number))
        run(app, mom=mom, other=NOWHERE)
        let_time_pass(app)
        monkeypatch.setattr(context, "ASK_SECONDS", 0.0)
        paused, asked = backoff.paused, [0]

        def pausing(
            source: psycopg.Connection[object], subscription_id: int, name: str
        ) -> str | None:
            asked[0] += name == "other"
            if asked[0] == 4:
                pause(app)
            return paused(source, subscription_id, name)

        monkeypatch.setattr(backoff, "paused", pausing)
        forward(app, chunk_rows=1, mom=mom, other=other)
        assert 0 < len(bodies(other)) < 10
        assert fetch(connection, "SELECT paused_at IS NOT NULL FROM saf.backoff") == [(True,)]
        monkeypatch.setattr(backoff, "paused", paused)
        forward(app, chunk_rows=1, mom=mom, other=other)
        assert len(bodies(other)) < 10
        resume(app)
        forward(app, chunk_rows=1, mom=mom, other=other)
    assert bodies(other) == [str(number) for number in range(10)]


def test_a_resumed_destination_that_is_down_is_tried_as_ever(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        send_to(connection, "shipping", "1")
        run(app, mom=mom, other=NOWHERE)
        pause(app)
        let_time_pass(app)
        run(app, mom=mom, other=NOWHERE)
        assert lanes(connection) == [("other", "main", 0)]
        resume(app)
        run(app, mom=mom, other=NOWHERE)
        assert lanes(connection) == [("other", "main", 1)]
        let_time_pass(app)
        run(app, mom=mom, other=other)
    assert bodies(other) == ["1"]


def test_a_pause_is_recorded_and_shown(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    settings = load(configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom}))
    with connect(app) as connection:
        assert backoff.pause(connection, "mom", "moving house")
        assert not backoff.pause(connection, "mom", "again")
        (lane,) = parked(connection).shown
        assert (lane.paused, lane.braked, lane.messages) == (True, False, 0)
        assert lane.error == f"paused by {connection.info.user}: moving house"
        patient = Patient(
            name="app", where="", connection=connection, limits=Limits(), clock=lambda: 0.0
        )
        ((severity, what, cure),) = pauses(patient)
        assert (severity, "moving house" in what) == ("warning", True)
        assert cure == "saf destination resume mom --broker app"
        states = {
            sample.labels[2]: sample.value
            for sample in asker(settings)(connection, "app")
            if sample.metric.name == "saf_destination_state"
        }
        assert states == {"up": 0.0, "down": 0.0, "waiting": 0.0, "paused": 1.0}
        assert backoff.resume(connection, "mom", "there")
        assert not backoff.resume(connection, "mom")
        assert parked(connection).shown == ()
        assert [(entry.action, entry.why) for entry in audited(connection)] == [
            ("resume destination mom", "there"),
            ("pause destination mom", "moving house"),
        ]


def test_other_lanes_that_only_an_operator_releases_stay(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.backoff (subscription_id, destination, kind, attempts, error, "
            "                         next_attempt_at) "
            "SELECT subscription_id, destination, %s, attempts, 'no', '9999-01-01 00:00:00+00' "
            "FROM saf.subscription, (VALUES ('other', 1), ('mom', 0)) AS l (destination, attempts) "
            "WHERE log = 'outbox'",
            [str(Kind.RETRY)],
        )
        pause(app)
        resume(app)
        due = "SELECT count(*) FROM saf.backoff WHERE next_attempt_at <= now()"
        assert fetch(connection, due) == [(0,)]
