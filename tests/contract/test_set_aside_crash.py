"""What is set aside survives a crash between the destination's commit and the source's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.database import Dsn
from saf.engine.source_session import SourceSession
from saf.failpoints import arm
from tests.destinations import NOWHERE, count, know, route, send_to
from tests.dying import Crash
from tests.dying import crash as die
from tests.pipeline import Cycle, bodies, connect, forward, forwarding_rules, let_time_pass


@pytest.fixture
def crash() -> Callable[..., None]:
    """One cycle that dies at a fail point."""

    def run(app: Dsn, point: str, chunk_rows: int = 100, **destinations: Dsn) -> None:
        arm(point, die)
        rules = forwarding_rules("exactly_once", chunk_rows, **destinations)
        with pytest.raises(Crash), Cycle(app, rules) as cycle:
            cycle.run()

    return run


def test_a_service_made_known_after_a_crash_gets_what_was_about_to_be_parked(
    app: Dsn, mom: Dsn, crash: Callable[..., None]
) -> None:
    know(mom, "billing")
    with connect(app) as connection:
        for number in range(4):
            send_to(connection, "shipping", f"s{number}")
            send_to(connection, "billing", f"b{number}")
    crash(app, "mark_forwarded", mom=mom)
    know(mom, "shipping")
    for _ in range(2):
        forward(app, mom=mom)
        let_time_pass(app)
    assert sorted(bodies(mom)) == sorted(f"{s}{n}" for s in "sb" for n in range(4))


def test_messages_behind_a_waiting_service_are_not_lost_when_it_opens_after_a_crash(
    app: Dsn, mom: Dsn, crash: Callable[..., None]
) -> None:
    know(mom, "billing")
    with connect(app) as connection:
        send_to(connection, "shipping", "s0")
        forward(app, mom=mom)
        send_to(connection, "shipping", "s1")
        send_to(connection, "billing", "b1")
    crash(app, "mark_forwarded", mom=mom)
    know(mom, "shipping")
    for _ in range(3):
        let_time_pass(app)
        forward(app, mom=mom)
    assert [body for body in bodies(mom) if body[0] == "s"] == ["s0", "s1"]
    assert bodies(mom).count("b1") == 1


def test_messages_behind_a_missing_route_are_not_lost_when_it_leads_on_after_a_crash(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection, Cycle(app, forwarding_rules("exactly_once", mom=mom)) as cycle:
        cycle.default = None
        route(connection, "billing", "mom")
        send_to(connection, "shipping", "s0")
        cycle.run()
        route(connection, "shipping", "mom")
        # between others of their shard, which are stored first
        for service, body in (("billing", "b0"), ("shipping", "s1"), ("billing", "b1")):
            send_to(connection, service, body)
        arm("mark_forwarded", die)
        with pytest.raises(Crash):
            cycle.run()
    for _ in range(3):
        let_time_pass(app)
        forward(app, mom=mom)
    assert [body for body in bodies(mom) if body[0] == "s"] == ["s0", "s1"]
    assert [body for body in bodies(mom) if body[0] == "b"] == ["b0", "b1"]


def test_what_is_set_aside_is_durable_before_a_later_chunk_passes_it(
    own_server: EmbeddedServer, mom: Dsn
) -> None:
    """Marks of the source do not wait for the disk, and the destination's server is another one."""
    app = own_server.create_database("app")
    migrate(app)
    know(mom, "billing")
    with connect(app) as connection:
        # the log writer would flush by itself within 3 x this
        connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        connection.execute("SELECT pg_reload_conf()")
        for service, body in (("shipping", "s0"), ("billing", "b0")):
            send_to(connection, service, body)
    with Cycle(app, forwarding_rules("exactly_once", 1, mom=mom)) as cycle:
        cycle.open()
        cycle.deliver()
        own_server.stop_immediately()
    own_server.start()
    know(mom, "shipping")
    for _ in range(3):
        let_time_pass(app)
        forward(app, mom=mom)
    assert sorted(bodies(mom)) == ["b0", "s0"]


def test_what_is_set_aside_after_an_answer_got_lost_is_not_taken_for_a_set_back(
    app: Dsn, mom: Dsn, other: Dsn, crash: Callable[..., None]
) -> None:
    """One destination has stored the batch as it was before another one could not be reached."""
    with connect(app) as connection:
        route(connection, "shipping", "other")
        for number in range(3):
            for service in ("shipping", "billing"):
                send_to(connection, service, f"{service[0]}{number}")
    crash(app, "mark_forwarded", mom=mom, other=other)
    forward(app, mom=mom, other=NOWHERE)
    assert bodies(mom) == ["b0", "b1", "b2"]
    let_time_pass(app)
    forward(app, mom=mom, other=other)
    assert bodies(other) == ["s0", "s1", "s2"]
    assert count(app, "parked") == 0
    # of the times that the source remembers, a destination need not know the last
    with connect(app) as connection:
        send_to(connection, "shipping", "s3")
    forward(app, mom=mom, other=NOWHERE)
    let_time_pass(app)
    forward(app, mom=mom, other=other)
    assert bodies(other) == ["s0", "s1", "s2", "s3"]


def test_a_rejected_message_is_not_lost_when_the_destination_is_mended_after_a_crash(
    app: Dsn, mom: Dsn, crash: Callable[..., None]
) -> None:
    with connect(mom) as store, connect(app) as connection:
        store.execute(
            "ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (convert_from(body, 'UTF8') <> 'x')"
        )
        for body in ("a", "b", "x", "c", "d"):
            send_to(connection, "billing", body)
        crash(app, "mark_forwarded", mom=mom)
        store.execute("ALTER TABLE saf.inbox DROP CONSTRAINT polite")
    forward(app, mom=mom)
    assert len(bodies(mom)) + count(app, "dead_letter") == 5
    assert set("abcd") <= set(bodies(mom))


def test_at_most_once_is_not_sent_twice_by_way_of_a_lane(
    app: Dsn, mom: Dsn, other: Dsn, crash: Callable[..., None]
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
        route(connection, "billing", "mom")
        connection.execute("UPDATE saf.route SET quality = 'at_most_once'")
        send_to(connection, "shipping", "once")
        send_to(connection, "billing", "b")
    crash(app, "mark_forwarded", mom=mom, other=other)
    assert bodies(other) == ["once"]
    with connect(app) as connection:
        # meanwhile the destination was found down, by a forwarder of other shards
        connection.execute(
            "INSERT INTO saf.backoff (subscription_id, destination, next_attempt_at, error) "
            "SELECT subscription_id, 'other', now() + interval '1 h', 'down' FROM saf.subscription"
            " WHERE name = 'forwarder'"
        )
    forward(app, mom=mom, other=other)
    let_time_pass(app)
    forward(app, mom=mom, other=other)
    assert bodies(other) == ["once"]


def test_a_dead_letter_from_a_lane_is_one_although_the_answer_to_its_commit_got_lost(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(other) as store:
        store.execute(
            "ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (convert_from(body, 'UTF8') <> 'x')"
        )
    with connect(app) as connection:
        route(connection, "shipping", "other")
        for body in ("a", "x", "b"):
            send_to(connection, "shipping", body)
    forward(app, mom=mom, other=NOWHERE)
    let_time_pass(app)
    source_session = SourceSession.__call__
    lost: list[bool] = []

    def answer_lost(self, write):  # type: ignore[no-untyped-def]
        result = source_session(self, write)
        if write.__qualname__.startswith("ParkedLanes.settle") and not lost:
            lost.append(True)
            return source_session(self, write)
        return result

    monkeypatch.setattr(SourceSession, "__call__", answer_lost)
    forward(app, mom=mom, other=other)
    assert lost
    assert bodies(other) == ["a", "b"]
    assert count(app, "dead_letter") == 1


@pytest.mark.parametrize("state", ["25006", "55P03", "25P04", "XX000", "42P01"])
def test_what_is_wrong_with_the_destination_and_not_with_a_message_makes_no_dead_letters(
    app: Dsn, mom: Dsn, other: Dsn, state: str
) -> None:
    with connect(other) as store:
        store.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"RAISE EXCEPTION 'not now' USING ERRCODE = '{state}'; END $$"
        )
        store.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON saf.inbox FOR EACH ROW "
            "EXECUTE FUNCTION refuse()"
        )
        with connect(app) as connection:
            route(connection, "shipping", "other")
            for number in range(3):
                send_to(connection, "shipping", str(number))
        forward(app, mom=mom, other=other)
        assert count(app, "dead_letter") == 0
        store.execute("DROP TRIGGER refuse ON saf.inbox")
    let_time_pass(app)
    forward(app, mom=mom, other=other)
    assert bodies(other) == ["0", "1", "2"]
