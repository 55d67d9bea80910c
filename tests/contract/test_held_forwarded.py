"""Held messages and the forwarder: a run, a loop, many sources, and what a signature says."""

from __future__ import annotations

import itertools
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import saf
from saf.config import load
from saf.database import Dsn, fetch
from saf.forwarding import broker, moving
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from saf.log import pauses
from saf.sending import held
from tests.driver import looping
from tests.kept import _nothing_stays
from tests.pipeline import bodies, connect, run
from tests.programs import configuration
from tests.receivers import SUBSCRIPTION, prepare
from tests.signing import key, signer
from tests.waits import until

__all__ = ["_nothing_stays"]

LATER = datetime(2199, 1, 1, tzinfo=UTC)
DUE = "UPDATE saf.held SET due = now() - interval '1 s' WHERE body <> 'not due'"
LONG_SECONDS = 600.0
"""Longer than any of these tests waits."""

outbox = saf.Outbox()


def hold(dsn: Dsn, *bodies: str) -> None:
    with dsn.connect(role="test") as connection:
        outbox.send_many(
            connection,
            [
                saf.Message(service="billing", body=body, key="k", deliver_at=LATER)
                for body in bodies
            ],
        )
        connection.execute(DUE.encode())


def forwarder(folder: Path, brokers: dict[str, Dsn], mom: Dsn, **options: object) -> Forwarder:
    file = configuration(folder / "saf.toml", brokers, {"mom": mom}, **options)
    return Forwarder(load(file), InProcess())


def left(dsn: Dsn) -> int:
    with connect(dsn) as connection:
        ((count,),) = fetch(connection, "SELECT count(*) FROM saf.held WHERE due IS NOT NULL")
    return int(count)


@pytest.mark.every_postgresql
def test_a_run_moves_all_that_is_due_and_leaves_the_rest(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    hold(app, *map(str, range(2500)), "not due")
    summary = forwarder(tmp_path, {"app": app}, mom).drain()
    assert summary.forwarded == 2500
    assert bodies(mom) == [*map(str, range(2500))]
    assert left(app) == 1
    assert forwarder(tmp_path, {"app": app}, mom).drain().forwarded == 0


def test_a_run_takes_as_many_visits_as_all_that_is_due_needs(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "MOST", 3)
    monkeypatch.setattr(held, "MOVING_SECONDS", -1.0)
    monkeypatch.setattr(held.move, "__defaults__", (-1.0,))
    hold(app, *map(str, range(20)))
    assert forwarder(tmp_path, {"app": app}, mom).drain().forwarded == 20
    assert bodies(mom) == [*map(str, range(20))]


def test_a_run_with_more_sources_than_sessions_finds_what_is_due_at_each(
    app: Dsn, mom: Dsn, new_broker: object, tmp_path: Path
) -> None:
    other = new_broker("other")  # type: ignore[operator]
    hold(app, "1")
    hold(other, "2", "not due")
    run_ = forwarder(tmp_path, {"app": app, "other": other}, mom, max_sessions=1)
    assert run_.drain().forwarded == 2
    assert sorted(bodies(mom)) == ["1", "2"]
    assert left(other) == 1


def test_a_loop_forwards_what_becomes_due_by_time_alone(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "SURE_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(pauses, "SHORTEST_SECONDS", LONG_SECONDS / 2)
    one = forwarder(tmp_path, {"app": app}, mom, interval_seconds=LONG_SECONDS)
    one.roster.once = False
    with app.connect(role="test") as connection:
        soon = datetime.now(UTC) + timedelta(seconds=3)
        outbox.send(connection, "billing", "1", deliver_at=soon)
    with looping(one):
        until(lambda: bodies(mom) == ["1"])
    with connect(mom) as connection:
        ((arrived,),) = fetch(connection, "SELECT received_at FROM saf.inbox")
    assert arrived >= soon


def test_a_quiet_source_is_asked_for_what_becomes_due_by_time_alone(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "SURE_SECONDS", LONG_SECONDS)
    one = forwarder(tmp_path, {"app": app}, mom)
    one.roster.once = False
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "1", deliver_at=datetime.now(UTC) + timedelta(seconds=2))
    source = one.roster.brokers["app"]
    searches = 0
    search = broker.SourceBroker.open_work

    def counted(self: broker.SourceBroker, default: str | None) -> object:
        nonlocal searches
        searches += 1
        return search(self, default)

    monkeypatch.setattr(broker.SourceBroker, "open_work", counted)
    for _ in range(5):
        source.visit("mom", brief=False)
    assert (left(app), searches < 5) == (1, True)
    known = searches
    until(lambda: source.visit("mom", brief=False).work)
    source.leave()
    assert searches < known + 5, "other databases of the server may cause one now and then"


def test_messages_that_are_due_one_after_the_other_move_together(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = forwarder(tmp_path, {"app": app}, mom)
    one.roster.once = False
    source = one.roster.brokers["app"]
    moves: list[float] = []
    move = moving.move

    def counted(connection: psycopg.Connection[Any]) -> moving.Moved:
        moves.append(time.monotonic())
        return move(connection)

    monkeypatch.setattr(moving, "move", counted)
    hold(app, *map(str, range(50)))
    with connect(app) as connection:
        connection.execute(
            "UPDATE saf.held SET due = clock_timestamp() + held_id * interval '10 ms'"
        )
        until(lambda: source.visit("mom", brief=False) and left(app) == 0)
    source.leave()
    apart = [later - earlier for earlier, later in itertools.pairwise(moves)]
    assert min(apart) >= broker.MOVES_APART_SECONDS
    assert 2 <= len(moves) <= 20


def test_a_locked_message_that_is_due_shortens_no_pause(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    hold(app, "1")
    one = forwarder(tmp_path, {"app": app}, mom)
    source = one.roster.brokers["app"]
    with app.connect(role="test") as connection:
        connection.execute("SELECT FROM saf.held FOR UPDATE")
        for _ in range(3):
            assert not source.visit("mom", brief=False).work
            assert source.due_in is None
        connection.rollback()
    assert source.visit("mom", brief=False).work
    source.leave()


def test_a_chain_of_little_batches_leaves_time_for_what_is_due(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    one = forwarder(tmp_path, {"app": app}, mom)
    one.roster.once = False
    with connect(app) as connection, looping(one):
        send = "INSERT INTO saf.outbox (to_service, body) VALUES ('billing', 'other')"
        connection.execute(send)
        until(lambda: bodies(mom))
        hold(app, "held")

        def arrived() -> bool:
            connection.execute(send)
            return "held" in bodies(mom)

        until(arrived)


def test_a_signed_message_that_was_held_and_moved_to_other_times_verifies(
    app: Dsn, mom: Dsn
) -> None:
    prepare(mom)
    signing = saf.Outbox(from_service="shop", signer=signer())
    with app.connect(role="test") as connection:
        for name in ("a", "b"):
            signing.send(connection, "billing", name, key="k", name=name, deliver_at=LATER)
        assert signing.reschedule(connection, "billing", "a", datetime.now(UTC))
        signing.send(
            connection,
            *("billing", "b later"),
            name="b",
            deliver_at=LATER + timedelta(days=1),
            if_there="later",
            later_limit=timedelta(0),
        )
        connection.execute("UPDATE saf.held SET due = now() - interval '1 s'")
        past = datetime(2001, 1, 1, tzinfo=UTC)
        signing.send(connection, "billing", "past", deliver_at=past)
        signing.send(connection, "billing", "named", name="past", deliver_at=past)
    soon = datetime.now(UTC) + timedelta(seconds=1)
    with app.connect(role="test") as connection:
        signing.send(connection, "billing", "soon", deliver_at=soon)
    with connect(app) as connection:
        until(lambda: fetch(connection, "SELECT max(due) < now() FROM saf.held") == [(True,)])
    run(app, mom=mom)
    with saf.receive(mom, SUBSCRIPTION, require_signed=True, keys={"shop-1": key()}) as delivery:
        assert sorted(message.text() for message in delivery) == [
            *("a", "b later", "named", "past", "soon")
        ]
        assert [m.deliver_at for m in delivery if m.text() == "soon"] == [soon]
        assert {message.signed_by for message in delivery} == {"shop-1"}
