"""What is set aside is so once, with the position, and only by the owner of its shard."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from saf.database import Dsn, fetch
from saf.engine import task
from saf.engine.source_session import SourceSession
from saf.engine.work import Receipt
from saf.errors import SafError
from saf.failpoints import arm
from saf.log.cursor import TIMES, attempt, note_set_aside, note_taken_out, open_batch
from saf.operating import decide
from saf.routing.matching import KEY, PYTHON
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from saf.setaside import backoff
from saf.setaside.lane import Lane
from saf.setaside.selection import DeadLetters
from tests.destinations import NOWHERE, count, know, route, send_to, subscription
from tests.dying import Crash
from tests.dying import crash as die
from tests.pipeline import (
    Cycle,
    bodies,
    connect,
    forward,
    forwarding_rules,
    let_time_pass,
    new_member,
    outlive_lease,
    send,
)
from tests.waits import blocked, until

pytestmark = pytest.mark.usefixtures("disarmed")


def crash(app: Dsn, point: str, quality: str = "exactly_once", **destinations: Dsn) -> None:
    arm(point, die)
    with pytest.raises(Crash), Cycle(app, forwarding_rules(quality, 100, **destinations)) as cycle:
        cycle.run()
    arm("")


def twin_of(cycle: Cycle) -> Callable[[], None]:
    """Open a batch; what is returned lets a twin of its task deliver all of it."""
    (work,) = cycle.open()
    twin = deepcopy(work)

    def is_quicker() -> None:
        arm("")
        cycle.work = [twin]
        cycle.deliver()
        cycle.work = [work]

    return is_quicker


def errors(receipts: list[Receipt]) -> set[str | None]:
    return {receipt.error_kind for receipt in receipts} - {None}


def no_ones(mom: Dsn) -> None:
    with connect(mom) as connection:
        connection.execute("ALTER TABLE saf.inbox ADD CONSTRAINT no_ones CHECK (body <> '1')")


# With the position


def test_what_is_parked_commits_with_the_position_that_passes_it(
    app: Dsn, mom: Dsn, source: psycopg.Connection[Any]
) -> None:
    route(source, "shipping", "other")
    send_to(source, "shipping", "parked")
    with Cycle(app, forwarding_rules(mom=mom, other=NOWHERE)) as cycle:
        cycle.open()
        cycle.deliver()
        transactions = fetch(
            source,
            "SELECT xmin::text FROM saf.parked UNION "
            "SELECT xmin::text FROM saf.cursor WHERE position > 0",
        )
    assert count(app, "parked") == 1
    assert len(transactions) == 1


def test_a_clock_that_goes_back_gives_each_time_of_setting_aside_a_value_of_its_own(
    source: psycopg.Connection[Any],
) -> None:
    """A source knows by the last of them that it was not set back."""
    member = new_member(source)
    member.balance(source)
    send(source, "x")
    (batch,) = open_batch(source, "outbox", member)
    source.execute("UPDATE saf.cursor SET set_aside_at = ARRAY[now() + interval '1 h']")
    for _ in range(2):
        with source.transaction():
            (first, *rest) = note_set_aside(source, batch).values()
    assert all(times == first for times in rest)
    assert first == sorted(set(first))
    assert len(first) == 3


def test_no_more_times_of_setting_aside_are_remembered_than_are_needed(
    source: psycopg.Connection[Any],
) -> None:
    member = new_member(source)
    member.balance(source)
    send(source, "x")
    (batch,) = open_batch(source, "outbox", member)
    for number in range(1, TIMES + 3):
        with source.transaction():
            times = note_set_aside(source, batch)
        newest = "SELECT max(set_aside_at[cardinality(set_aside_at)]) FROM saf.cursor"
        ((last,),) = fetch(source, newest)
        assert {len(one) for one in times.values()} == {min(number, TIMES)}
        assert {one[-1] for one in times.values()} == {last}


def test_a_person_waits_for_the_first_cursor_before_any_other_is_locked(
    app: Dsn, source: psycopg.Connection[Any]
) -> None:
    """As forwarders lock them: in another order, each would wait for the other one."""
    number = subscription(source)
    # a table that is read from its beginning has the first shard at its end
    source.execute("UPDATE saf.cursor SET epoch = epoch WHERE shard = 0")
    with connect(app) as forwarder, connect(app) as person, ThreadPoolExecutor(1) as threads:
        person.execute("SET enable_nestloop = off; SET enable_mergejoin = off")
        with forwarder.transaction():
            forwarder.execute("SELECT FROM saf.cursor WHERE shard = 0 FOR UPDATE")
            taking = threads.submit(_take_out, person, number)
            until(lambda: blocked(source))
            forwarder.execute("SELECT FROM saf.cursor WHERE shard = 1 FOR UPDATE NOWAIT")
        taking.result()


def _take_out(person: psycopg.Connection[Any], subscription_id: int) -> None:
    with person.transaction():
        note_taken_out(person, subscription_id, [1, 0])


# Once


def test_what_is_written_ahead_of_a_watermark_is_parked_once_although_the_answer_got_lost(
    app: Dsn, mom: Dsn, source: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    know(mom, "billing")
    for number in range(3):
        send_to(source, "shipping", f"s{number}")
        send_to(source, "billing", f"b{number}")
    source_session = SourceSession.__call__
    lost: list[str] = []

    def answer_lost(self, write):  # type: ignore[no-untyped-def]
        result = source_session(self, write)
        if write.__qualname__.startswith("SetAside.write_ahead"):
            lost.append(write.__qualname__)
            return source_session(self, write)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(SourceSession, "__call__", answer_lost)
        forward(app, mom=mom)
    assert lost
    assert count(app, "parked") == 3
    know(mom, "shipping")
    let_time_pass(app)
    forward(app, mom=mom)
    assert [body for body in bodies(mom) if body[0] == "s"] == ["s0", "s1", "s2"]


def test_a_message_too_large_to_read_is_set_aside_before_a_watermark_passes_it(
    app: Dsn, mom: Dsn, source: psycopg.Connection[Any]
) -> None:
    """Read again with a higher limit, it would look stored."""
    send(source, "a", key="k")
    send(source, "x" * 2_000_000, key="k")
    send(source, "b", key="k")
    arm("mark_forwarded", die)
    small = replace(forwarding_rules(mom=mom), max_bytes=1_000_000)
    with pytest.raises(Crash), Cycle(app, small) as cycle:
        cycle.run()
    arm("")
    forward(app, mom=mom)
    assert len(bodies(mom)) + count(app, "dead_letter") == 3
    assert {"a", "b"} <= set(bodies(mom))


def test_what_is_a_dead_letter_already_is_not_delivered_as_well_after_a_crash(
    app: Dsn, mom: Dsn, source: psycopg.Connection[Any]
) -> None:
    """At least once: no watermark says that it is done with."""
    for body in ("a", "x" * 2_000_000, "b"):
        send(source, body, key="k")
    arm("mark_forwarded", die)
    rules = forwarding_rules("at_least_once", mom=mom)
    with pytest.raises(Crash), Cycle(app, replace(rules, max_bytes=1_000_000)) as cycle:
        cycle.run()
    arm("")
    assert count(app, "dead_letter") == 1
    forward(app, "at_least_once", mom=mom)
    assert count(app, "dead_letter") == 1
    assert set(bodies(mom)) == {"a", "b"}


def test_an_attempt_that_was_not_due_does_not_count(source: psycopg.Connection[Any]) -> None:
    lane, number = Lane(destination="other"), subscription(source)
    state = "SELECT attempts, next_attempt_at, error FROM saf.backoff"
    with source.transaction():
        backoff.postpone(source, number, {lane: SafError("first")})
    before = fetch(source, state)
    with source.transaction():
        backoff.postpone(source, number, {lane: SafError("second")})
    assert fetch(source, state) == before
    assert (before[0][0], before[0][2]) == (1, "first")


def test_a_lane_that_moves_waits_no_longer_and_one_that_was_not_due_stays_as_it_is(
    app: Dsn, source: psycopg.Connection[Any]
) -> None:
    lane, number = Lane(destination="other"), subscription(source)
    attempts = "SELECT attempts FROM saf.backoff"
    for _ in range(3):
        with source.transaction():
            backoff.postpone(source, number, {lane: SafError("full")})
        let_time_pass(app)
    for _ in range(2):
        with source.transaction():
            backoff.postpone(source, number, {lane: SafError("full")}, [lane])
        assert fetch(source, attempts) == [(1,)]
    source.execute("UPDATE saf.backoff SET attempts = 3")
    with source.transaction():
        backoff.postpone(source, number, {lane: SafError("full")}, [lane])
    assert fetch(source, attempts) == [(3,)]


# At most once


def test_at_most_once_messages_that_wait_are_not_attempted_and_so_are_not_lost_by_a_crash(
    app: Dsn, mom: Dsn, other: Dsn, source: psycopg.Connection[Any]
) -> None:
    route(source, "shipping", "other")
    source.execute("UPDATE saf.route SET quality = 'at_most_once'")
    with source.transaction():
        lane = Lane(destination="other")
        backoff.postpone(source, subscription(source), {lane: SafError("down")})
    send_to(source, "shipping", "waits")
    crash(app, "mark_forwarded", mom=mom, other=other)
    forward(app, mom=mom, other=other)
    assert count(app, "parked") == 1
    let_time_pass(app)
    forward(app, mom=mom, other=other)
    assert bodies(other) == ["waits"]


def test_a_parked_message_leaves_its_lane_before_it_is_sent_at_most_once(
    app: Dsn, mom: Dsn, other: Dsn, source: psycopg.Connection[Any]
) -> None:
    route(source, "shipping", "other")
    source.execute("UPDATE saf.route SET quality = 'at_most_once'")
    with source.transaction():
        lane = Lane(destination="other")
        backoff.postpone(source, subscription(source), {lane: SafError("down")})
    send_to(source, "shipping", "once")
    forward(app, mom=mom, other=other)
    assert count(app, "parked") == 1
    let_time_pass(app)
    crash(app, "mom_commit", mom=mom, other=other)
    for _ in range(2):
        let_time_pass(app)
        forward(app, mom=mom, other=other)
    assert bodies(other) == ["once"]


# In order


def test_a_new_message_does_not_overtake_what_waits_for_a_route_that_has_come(
    app: Dsn, mom: Dsn, source: psycopg.Connection[Any]
) -> None:
    add_route(source, "mom", service="billing")

    def run_without_default() -> None:
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            cycle.default = None
            cycle.run()

    send_to(source, "shipping", "first")
    run_without_default()
    add_route(source, "mom", service="shipping")
    send_to(source, "shipping", "second")
    run_without_default()
    for _ in range(2):
        let_time_pass(app)
        run_without_default()
    assert bodies(mom) == ["first", "second"]


# By when the batch was opened


def test_what_had_not_expired_when_its_batch_was_opened_is_delivered_however_late(
    app: Dsn, mom: Dsn, source: psycopg.Connection[Any]
) -> None:
    """Read again after a crash, a batch has to give the same messages."""
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        cycle.broker.tend()
        ((soon,),) = fetch(source, "SELECT clock_timestamp() + interval '500 ms'")
        send_to(source, "billing", "in time", expires_at=soon)
        (work,) = cycle.open()
        assert work.batch.opened_at < soon
        while fetch(source, "SELECT clock_timestamp() <= %(soon)s", {"soon": soon}) == [(True,)]:
            pass
        cycle.deliver()
    assert bodies(mom) == ["in time"]
    assert count(app, "dead_letter") == 0


# By the owner


def taken_over(app: Dsn, zombie: Cycle, owner: Cycle) -> None:
    """The zombie has its work in hand, and its lease is over."""
    zombie.open()
    outlive_lease(app)
    owner.broker.tend()


def test_a_zombie_takes_nothing_out_of_a_lane(
    app: Dsn, mom: Dsn, other: Dsn, source: psycopg.Connection[Any]
) -> None:
    route(source, "shipping", "other")
    send_to(source, "shipping", "s")
    forward(app, mom=mom, other=NOWHERE)
    let_time_pass(app)
    rules = forwarding_rules(mom=mom, other=other)
    with Cycle(app, rules) as zombie, Cycle(app, rules) as owner:
        taken_over(app, zombie, owner)
        assert errors(zombie.deliver()) == {"Fenced"}
        assert count(app, "parked") == 1
        owner.run()
    assert bodies(other) == ["s"]
    assert count(app, "parked") == 0


def test_a_zombie_leads_nothing_to_a_route_that_has_come(
    app: Dsn, mom: Dsn, source: psycopg.Connection[Any]
) -> None:
    route(source, "billing", "mom")
    send_to(source, "shipping", "s")

    def cycle() -> Cycle:
        one = Cycle(app, forwarding_rules(mom=mom))
        one.default = None
        return one

    with cycle() as first:
        first.run()
    assert count(app, "parked") == 1
    add_route(source, "mom", service="shipping")
    let_time_pass(app)
    parked = "SELECT parked_id, destination, kind FROM saf.parked"
    before = fetch(source, parked)
    with cycle() as zombie, cycle() as owner:
        zombie.open()

        def take_over() -> None:
            outlive_lease(app)
            owner.broker.tend()

        arm("unrouted_expired", take_over)
        assert errors(zombie.deliver()) == {"Fenced"}
        assert fetch(source, parked) == before
        owner.run()
    assert bodies(mom) == ["s"]


@pytest.mark.parametrize(
    ("service", "remembered"),
    [("billing", "route_choice"), ("departures", "resolved_conversation")],
)
def test_a_zombie_neither_chooses_for_a_key_nor_resolves_it(  # noqa: PLR0917 - fixtures
    app: Dsn,
    mom: Dsn,
    other: Dsn,
    source: psycopg.Connection[Any],
    service: str,
    remembered: str,
) -> None:
    for destination in ("mom", "other"):
        add_route(source, destination, service="billing")
    add_route(source, "mom", service="EWR")
    add_router(source, "departures", PYTHON, "tests.classifiers:by_origin", once_per=KEY)
    send_to(source, service, '{"origin": "EWR"}')
    rules = forwarding_rules(mom=mom, other=other)
    with Cycle(app, rules) as zombie, Cycle(app, rules) as owner:
        taken_over(app, zombie, owner)
        assert errors(zombie.deliver()) == {"Fenced"}
        assert count(app, remembered) == 0
        owner.run()
    assert count(app, remembered) == 1


# By another task with the same batch


@pytest.mark.parametrize(("point", "chunk_rows"), [("set_aside", 3), ("mark_forwarded:2", 1)])
def test_a_task_that_is_run_again_knows_what_was_set_aside_before(
    app: Dsn, mom: Dsn, source: psycopg.Connection[Any], point: str, chunk_rows: int
) -> None:
    """Spark gives it the batch as it was read before the first one began."""
    no_ones(mom)
    for body in ("1", "2", "3"):
        send(source, body, key="k")
    with Cycle(app, forwarding_rules("exactly_once", chunk_rows, mom=mom)) as cycle:
        again = deepcopy(cycle.open())
        arm(point, die)
        with pytest.raises(Crash):
            cycle.deliver()
        arm("")
        cycle.work = again
        receipts = cycle.deliver()
        cycle.close(receipts)
    assert errors(receipts) == set()
    assert bodies(mom) == ["2", "3"]
    noted = "SELECT set_aside_at FROM saf.cursor WHERE set_aside_at IS NOT NULL"
    with connect(mom) as connection:
        ((known,),) = fetch(connection, "SELECT max(set_aside_at) FROM saf.watermark")
    assert fetch(source, noted) == [([known],)]


def test_a_task_knows_what_its_twin_has_set_aside_meanwhile(
    app: Dsn, mom: Dsn, source: psycopg.Connection[Any]
) -> None:
    no_ones(mom)
    for body in ("0", "1", "2"):
        send(source, body, key="k")
    with Cycle(app, forwarding_rules("exactly_once", 1, mom=mom)) as cycle:
        arm("mark_commit", twin_of(cycle))
        receipts = cycle.deliver()
        cycle.close(receipts)
    assert errors(receipts) == set()
    assert bodies(mom) == ["0", "2"]
    assert count(app, "dead_letter") == 1


@pytest.mark.parametrize("when", ["before a chunk", "before an attempt"])
def test_what_a_twin_tries_at_most_once_meanwhile_is_not_sent_by_both(
    app: Dsn,
    mom: Dsn,
    source: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    for body in ("0", "1", "2"):
        send(source, body, key="k")
    with Cycle(app, forwarding_rules("at_most_once", 1, mom=mom)) as cycle:
        twin_is_quicker = twin_of(cycle)

        def attempt_after_twin(*arguments: Any) -> dict[int, int]:
            monkeypatch.undo()
            twin_is_quicker()
            return attempt(*arguments)

        if when == "before a chunk":
            arm("mark_commit", twin_is_quicker)
        else:
            monkeypatch.setattr(task, "attempt", attempt_after_twin)
        receipts = cycle.deliver()
        cycle.close(receipts)
    assert errors(receipts) == set()
    assert bodies(mom) == ["0", "1", "2"]
    assert count(app, "dead_letter") == 0, "the twin has said what came of them"


def test_a_task_that_lags_behind_its_twin_sets_nothing_aside_again(
    app: Dsn, mom: Dsn, source: psycopg.Connection[Any]
) -> None:
    for body in ("0", "1", "late", "2"):
        send(source, body, key="k")
    source.execute("UPDATE saf.outbox SET expires_at = now() WHERE body = 'late'")
    with Cycle(app, forwarding_rules("exactly_once", 2, mom=mom)) as cycle:
        twin_is_quicker = twin_of(cycle)

        def twin_and_a_person_are_quicker() -> None:
            twin_is_quicker()
            assert len(decide.discard(source, DeadLetters(), "not wanted")) == 1

        arm("mark_commit", twin_and_a_person_are_quicker)
        receipts = cycle.deliver()
        cycle.close(receipts)
    assert errors(receipts) == set()
    assert bodies(mom) == ["0", "1", "2"]
    assert count(app, "dead_letter") == 0


def test_what_a_lost_session_had_not_set_aside_is_set_aside_by_the_next_one(
    app: Dsn, mom: Dsn
) -> None:
    def lose() -> None:
        with connect(app) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE '%mark%'"
            )

    with connect(app) as connection:
        send_to(connection, "nobody", "without a route")
    arm("mark_forwarded", lose)
    with Cycle(app, replace(forwarding_rules(mom=mom), attempts=5)) as cycle:
        cycle.default = None
        assert [one.error for one in cycle.run() if one.error] == []
    assert count(app, "parked") == 1
