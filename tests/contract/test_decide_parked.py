"""Parked messages that a person gives up or sends elsewhere: in order, once, beside deliveries."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

import psycopg
import pytest

import saf
from saf.database import Dsn, fetch
from saf.errors import Unavailable
from saf.failpoints import arm
from saf.operating import decide
from saf.operating.decide import in_chunks
from saf.setaside import audit, waiting
from saf.setaside.selection import ParkedMessages
from tests.destinations import NOWHERE, AnswerLost, count, know, route, send_to
from tests.dialogs import ERROR, SHOP, WAREHOUSE, begin, say
from tests.dialogs import forward as forward_dialogs
from tests.dialogs import prepare as prepare_dialogs
from tests.dialogs import receive as receive_said
from tests.dying import Crash
from tests.dying import crash as die
from tests.endpoints import Got, Partner, Reply, dispatcher, dispatching, serving
from tests.pipeline import (
    Cycle,
    bodies,
    connect,
    drain,
    forwarding_rules,
    let_time_pass,
    new_member,
)
from tests.processors import Poisoned, prepare_processors
from tests.receivers import SUBSCRIPTION, effect, effects, prepare, put, running
from tests.waits import until, waiters

ANY = ParkedMessages()
LATER = """
UPDATE saf.backoff SET next_attempt_at = now() + interval '1 h'
WHERE next_attempt_at > now() + interval '1 s'
"""
TO_OTHER = decide.redirect("other")


@pytest.fixture
def parked(app: Dsn, other: Dsn) -> list[str]:
    """Six messages of one key that wait for mom, which is down."""
    with connect(app) as connection:
        route(connection, "billing", "mom")
        route(connection, "shipping", "other")
        for number in range(6):
            send_to(connection, "billing", f"b{number}")
        send_to(connection, "shipping", "s")
    forward(app, mom=NOWHERE, other=other)
    assert (count(app, "parked"), bodies(other)) == (6, ["s"])
    let_time_pass(app)
    return [f"b{number}" for number in range(6)]


def forward(app: Dsn, *, chunk_rows: int = 100, attempts: int = 1, **destinations: Dsn) -> None:
    """A run to its end; what is down is in the receipts."""
    rules = forwarding_rules("exactly_once", chunk_rows, **destinations)
    with Cycle(app, replace(rules, attempts=attempts)) as cycle:
        drain(cycle)


def actions(connection: psycopg.Connection[object]) -> list[tuple[str, int, str, str | None]]:
    return [(one.action, one.messages, one.why, one.person) for one in audit.audited(connection)]


@pytest.mark.usefixtures("parked")
def test_what_is_discarded_is_gone_with_a_line_in_the_audit_and_the_rest_arrives_in_order(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection:
        some = ANY.rows(connection)
        which = ParkedMessages(numbers=[some[1].parked_id, some[4].parked_id])
        assert which.count(connection, 100).messages == 2
        done = decide.discard(connection, which, "test orders", "ann")
        assert done == [some[1].message_id, some[4].message_id]
        assert actions(connection) == [("discard", 2, "test orders", "ann")]
        assert decide.discard(connection, which, "") == []
    forward(app, mom=mom, other=other)
    assert bodies(mom) == ["b0", "b2", "b3", "b5"]
    assert count(app, "parked") + count(app, "backoff") + count(app, "dead_letter") == 0


@pytest.mark.usefixtures("parked")
def test_all_are_discarded_some_at_a_time_and_their_lane_goes_with_the_last(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    with connect(app) as connection:
        done = in_chunks(connection, decide.discard, ParkedMessages(key="k"), "", chunk=4)
        assert [len(ids) for ids in done] == [4, 2]
        assert count(app, "backoff") == 0
        send_to(connection, "billing", "new")
    forward(app, mom=mom, other=other)
    assert bodies(mom) == ["new"]


def test_what_is_redirected_arrives_elsewhere_in_order_and_once_with_what_was_left_alone(
    app: Dsn, mom: Dsn, other: Dsn, parked: list[str]
) -> None:
    with connect(app) as connection:
        chosen = ParkedMessages(destination="mom", through=_number(connection, 3))
        done = in_chunks(connection, TO_OTHER, chosen, "mom is away", chunk=2)
        assert [len(ids) for ids in done] == [2, 2]
        assert actions(connection) == [("redirect to other", 2, "mom is away", None)] * 2
        # what waits for that destination already is not moved behind itself
        assert TO_OTHER(connection, ParkedMessages(destination="other"), "") == []
    forward(app, mom=mom, other=other)
    assert (bodies(other), bodies(mom)) == (["s", *parked[:4]], parked[4:])
    assert count(app, "parked") + count(app, "backoff") == 0


@pytest.mark.parametrize("redirected", [False, True])
def test_a_decision_about_what_has_arrived_is_not_taken_for_a_set_back(
    redirected: bool, app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination has stored it and died before it answered; a person does not wait for it."""
    with connect(app) as connection:
        route(connection, "billing", "other")
        send_to(connection, "billing", "stored")
        with monkeypatch.context() as patch:
            patch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", AnswerLost)
            forward(app, mom=mom, other=other)
        assert (count(app, "parked"), bodies(other)) == (1, ["stored"])
        if redirected:
            assert len(decide.redirect("mom")(connection, ANY, "it is away")) == 1
        else:
            assert len(decide.discard(connection, ANY, "it is away")) == 1
        send_to(connection, "billing", "next")
    forward(app, mom=mom, other=other)
    assert bodies(other) == ["stored", "next"]
    assert bodies(mom) == (["stored"] if redirected else [])
    assert count(app, "parked") + count(app, "backoff") == 0


def test_what_waits_for_a_route_or_for_a_service_can_be_sent_to_a_destination(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    know(mom, "shipping")
    with connect(app) as connection:
        route(connection, "billing", "mom")
        send_to(connection, "billing", "unknown there")
        send_to(connection, "nobody", "without a route")
    with Cycle(app, forwarding_rules("exactly_once", mom=mom, other=other)) as cycle:
        cycle.default = None
        cycle.run()
        with connect(app) as connection:
            kinds = [one.kind for one in ANY.rows(connection)]
            assert sorted(kinds) == ["route", "service"]
            assert len(TO_OTHER(connection, ANY, "")) == 2
        drain(cycle)
    assert bodies(other) == ["unknown there", "without a route"]
    assert count(app, "parked") + count(app, "backoff") == 0


def test_nobody_decides_about_what_a_forwarder_has_in_hand(
    app: Dsn, mom: Dsn, other: Dsn, parked: list[str]
) -> None:
    """The destination is about to commit them, and the source does not know that yet."""
    refused: list[str] = []

    def refuse() -> None:
        with connect(app) as connection:
            connection.execute("SET lock_timeout = '50ms'")
            for decision in (decide.discard, TO_OTHER):
                with pytest.raises(Unavailable, match="in a moment") as error:
                    decision(connection, ANY, "")
                refused.append(str(error.value))

    arm("mom_insert", refuse)
    forward(app, mom=mom, other=other)
    assert ["'mom'" in one for one in refused] == [True, True]
    with connect(app) as connection:
        assert decide.discard(connection, ANY, "") == []
        assert actions(connection) == []
    assert (bodies(mom), bodies(other)) == (parked, ["s"])


def test_a_forwarder_waits_for_a_decision_and_delivers_the_rest(
    app: Dsn, mom: Dsn, other: Dsn, parked: list[str]
) -> None:
    running = threading.Thread(target=forward, args=(app,), kwargs={"mom": mom, "other": other})
    with connect(app) as connection:
        with connection.transaction():
            chosen = ParkedMessages(through=_number(connection, 0))
            assert len(decide.discard(connection, chosen, "")) == 1
            running.start()
            until(lambda: waiters(connection))
            assert bodies(mom) == []
        running.join()
    assert bodies(mom) == parked[1:]


@pytest.mark.usefixtures("parked")
def test_a_person_who_is_stopped_in_a_decision_holds_forwarders_up_no_longer_than_they_wait(
    app: Dsn,
) -> None:
    def stop_inside() -> None:
        with connect(app) as connection, connection.transaction():
            connection.execute("SET LOCAL lock_timeout = '200ms'")
            assert len(decide.discard(connection, ANY, "")) == 6
            time.sleep(1.0)
            connection.execute("SELECT")

    with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
        stop_inside()
    assert count(app, "parked") == 6


def test_a_forwarder_buries_what_has_expired_without_a_route_and_waits_for_no_decision(
    app: Dsn, mom: Dsn
) -> None:
    rules = forwarding_rules("exactly_once", mom=mom)
    with connect(app) as connection, connect(app) as person, Cycle(app, rules) as cycle:
        cycle.default = None
        for body in ("decided about", "expires"):
            send_to(connection, "nobody", body)
        cycle.run()
        connection.execute("UPDATE saf.parked SET expires_at = now() - interval '1 s'")
        with person.transaction():
            person.execute("SELECT FROM saf.parked ORDER BY id LIMIT 1 FOR UPDATE")
            send_to(connection, "nobody", "opens a batch")
            cycle.run()
            assert count(app, "dead_letter") == 1


@pytest.mark.usefixtures("parked")
def test_a_task_that_loses_its_session_leaves_alone_what_was_decided_meanwhile(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    def lose() -> None:
        with connect(app) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(l.pid) FROM pg_locks l"
                " JOIN pg_stat_activity a USING (pid)"
                " WHERE l.locktype = 'advisory' AND a.application_name LIKE '%mark%'"
                " AND a.datname = current_database()"
            )
            chosen = ParkedMessages(through=_number(connection, 4))
            # the first one is on its way: it has arrived, whatever is said of it now
            assert len(decide.discard(connection, chosen, "")) == 5
        arm("mom_insert", refuse)

    def refuse() -> None:
        with connect(app) as connection:
            connection.execute("SET lock_timeout = '50ms'")
            with pytest.raises(Unavailable, match="in a moment"):
                decide.discard(connection, ANY, "")
        refused.append("the last one, which the next session has in hand")

    refused: list[str] = []
    arm("mom_insert", lose)
    forward(app, chunk_rows=1, attempts=5, mom=mom, other=other)
    assert bodies(mom) == ["b0", "b5"]
    assert refused


@pytest.mark.usefixtures("parked")
def test_what_was_tried_and_waits_again_is_decided_about_while_its_task_goes_on(
    app: Dsn, other: Dsn
) -> None:
    def discard() -> None:
        with connect(app) as connection:
            connection.execute("SET lock_timeout = '1s'")
            assert len(decide.discard(connection, ANY, "")) == 6

    with connect(app) as connection:
        send_to(connection, "shipping", "s2")
    arm("mom_insert", discard)
    forward(app, mom=NOWHERE, other=other)
    assert (bodies(other), count(app, "parked")) == (["s", "s2"], 0)


def test_what_the_open_batch_has_set_aside_beyond_its_position_stays(app: Dsn, mom: Dsn) -> None:
    """Only while it is there is it known that the batch must not send it as well."""
    know(mom, "billing")
    with connect(app) as connection:
        for body in ("b0", "b1"):
            send_to(connection, "shipping", f"s{body}")
            send_to(connection, "billing", body)
        arm("set_aside", die)
        with pytest.raises(Crash), Cycle(app, forwarding_rules("exactly_once", mom=mom)) as cycle:
            cycle.run()
        assert count(app, "parked") == 2
        found = ANY.count(connection, 100)
        assert (found.messages, found.staying) == (0, 2)
        assert decide.discard(connection, ANY, "") == []
        forward(app, mom=mom)
        assert len(decide.discard(connection, ANY, "")) == 2
    know(mom, "shipping")
    let_time_pass(app)
    forward(app, mom=mom)
    assert bodies(mom) == ["b0", "b1"]


def test_a_dialog_that_lacks_a_parked_message_that_is_given_up_fails_at_both_ends(
    app: Dsn, mom: Dsn, other: Dsn
) -> None:
    prepare_dialogs(app, mom)
    with connect(app) as connection:
        route(connection, "elsewhere", "other")
        dialog = begin(app, "1")
        forward(app, mom=mom, other=other)
        assert [message.text() for message in receive_said(mom, WAREHOUSE)] == ["1"]
        say(app, dialog, "2")
        send_to(connection, "elsewhere", "x")
        forward(app, mom=NOWHERE, other=other)
        assert TO_OTHER(connection, ANY, "") == []  # its other end is where it is
        assert len(decide.discard(connection, ANY, "never mind")) == 1
        assert count(app, "dead_letter") == 0
    let_time_pass(app)
    forward(app, mom=mom, other=other)
    (error,) = receive_said(mom, WAREHOUSE)
    assert error.message_type == ERROR
    assert "message 2 was given up by postgres: it was parked on its way" in error.text()


# Receivers


@pytest.fixture
def failing(mom: Dsn) -> None:
    """Three messages of a key that wait for the next attempt at the first one."""
    prepare(mom)
    put(mom, "1", "2", "3", key="k")
    receive(mom, failing="1")
    with connect(mom) as connection:
        found = ANY.rows(connection)
    assert [(one.kind, one.subject, one.stays) for one in found] == [("key", "k", None)] * 3


def receive(mom: Dsn, *, failing: str = "") -> None:
    for _ in range(6):
        with suppress(ZeroDivisionError), saf.receive(mom, SUBSCRIPTION) as delivery:
            for message in delivery:
                effect(delivery.connection, message)
                if message.text() == failing:
                    raise ZeroDivisionError


@pytest.mark.usefixtures("failing")
def test_a_key_goes_on_without_the_message_that_is_given_up(mom: Dsn) -> None:
    with connect(mom) as connection:
        assert TO_OTHER(connection, ANY, "") == []  # it has arrived
        chosen = ParkedMessages(key="k", through=_number(connection, 0))
        assert len(decide.discard(connection, chosen, "")) == 1
    receive(mom)
    assert effects(mom) == ["2", "3"]
    assert count(mom, "parked") + count(mom, "backoff") == 0


@pytest.mark.usefixtures("failing")
def test_nobody_decides_about_what_a_receiver_has_in_hand(mom: Dsn) -> None:
    let_time_pass(mom)
    with connect(mom) as connection:
        with saf.receive(mom, SUBSCRIPTION) as delivery:
            (first,) = delivery
            assert first.text() == "1"
            assert decide.discard(connection, ANY, "") == []
        assert len(decide.discard(connection, ANY, "")) == 2


@pytest.mark.usefixtures("failing")
def test_of_a_members_shards_only_keys_that_rest_are_decided_about(mom: Dsn) -> None:
    """It may have read others, and be handling them."""
    with connect(mom) as connection:
        member = new_member(connection)
        connection.execute("UPDATE saf.cursor SET owner = %s", [member.member_id])
        for due in ("now()", "now() + interval '4 s'"):
            connection.execute(f"UPDATE saf.backoff SET next_attempt_at = {due}")
            found = ANY.count(connection, 100)
            assert (found.messages, found.stays) == (0, {"in_hand": 3})
            assert decide.discard(connection, ANY, "") == []
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now() + interval '1 h'")
        assert ANY.count(connection, 100).messages == 3
        assert len(decide.discard(connection, ANY, "")) == 3
        # the member forgets the lane when it finds it empty: it may be about to park in it
        ((wait,),) = fetch(connection, "SELECT next_attempt_at <= now() FROM saf.backoff")
        assert (count(mom, "parked"), wait) == (0, True)


@pytest.mark.usefixtures("failing")
def test_a_key_that_a_person_makes_due_is_a_members_and_no_other_persons(mom: Dsn) -> None:
    """The member sends it without a lock as soon as it is due."""
    with connect(mom) as connection, connect(mom) as other:
        member = new_member(connection)
        connection.execute("UPDATE saf.cursor SET owner = %s", [member.member_id])
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now() + interval '1 h'")
        with other.transaction():
            assert waiting.retry_now(other) == 1
            found: list[list[UUID]] = []
            discard = threading.Thread(
                target=lambda: found.append(decide.discard(connection, ANY, ""))
            )
            discard.start()
            until(lambda: waiters(other))
        discard.join()
        assert found == [[]]
        assert (count(mom, "parked"), actions(connection)) == (3, [])


@pytest.mark.usefixtures("failing")
def test_a_decision_that_takes_so_long_that_a_member_may_have_read_the_key_is_undone(
    mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "LONGEST_SECONDS", 0.0)
    with connect(mom) as connection:
        member = new_member(connection)
        connection.execute("UPDATE saf.cursor SET owner = %s", [member.member_id])
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now() + interval '1 h'")
        with pytest.raises(Unavailable, match="decide about fewer"):
            decide.discard(connection, ANY, "")
        assert (count(mom, "parked"), actions(connection)) == (3, [])
        connection.execute("UPDATE saf.cursor SET owner = NULL")
        assert len(decide.discard(connection, ANY, "")) == 3


def test_what_a_dispatcher_has_parked_is_given_up_while_it_runs(mom: Dsn) -> None:
    async def answer(got: Got) -> Reply:
        return (503 if got.body == b"1" else 204), {}, b""

    prepare(mom)
    with serving(Partner(answer=answer)) as partner, connect(mom) as connection:
        put(mom, "1", "2", key="k")
        with dispatching(dispatcher(mom, partner)):
            until(lambda: count(mom, "parked") == 2)
            # it has nothing of the key in memory as long as the key is not due
            until(lambda: connection.execute(LATER).rowcount)
            first = ParkedMessages(through=_number(connection, 0))
            until(lambda: decide.discard(connection, first, "never mind"))
            put(mom, "3", key="k")
            until(lambda: count(mom, "parked") == 2)
            assert waiting.retry_now(connection) == 1
            until(lambda: len(partner.accepted) == 2)
            until(lambda: count(mom, "backoff") == 0)
        assert [got.body for got in partner.accepted] == [b"2", b"3"]


def test_what_processors_have_parked_is_given_up_while_they_run(mom: Dsn) -> None:
    prepare_processors(mom)
    put(mom, "bad", "2", key="k")
    policy = saf.Policy(first_wait_seconds=3600, longest_wait_seconds=3600)
    with running(saf.Processors(mom, SUBSCRIPTION, Poisoned, policy=policy)):
        until(lambda: count(mom, "parked") == 2)
        with connect(mom) as connection:
            until(lambda: decide.discard(connection, ParkedMessages(key="k"), ""))
        put(mom, "1", key="k")
        until(lambda: effects(mom) == ["1"])
        until(lambda: count(mom, "backoff") == 0)
    assert count(mom, "parked") == 0


def test_a_dialog_fails_at_both_ends_if_a_message_is_given_up_where_it_had_arrived(
    app: Dsn, mom: Dsn
) -> None:
    prepare_dialogs(app, mom)
    begin(app, "1", "2", "3")
    forward_dialogs(app, mom)
    for _ in range(6):
        with suppress(ZeroDivisionError), saf.receive(mom, WAREHOUSE) as delivery:
            for _message in delivery:
                raise ZeroDivisionError
    with connect(mom) as connection:
        parked = ANY.rows(connection)
        assert {one.kind for one in parked} == {"key"}
        # it has arrived: it goes nowhere else
        assert ANY.count(connection, 9, to="other").stays == {"arrived": len(parked)}
        first = ParkedMessages(through=parked[0].parked_id)
        assert len(decide.discard(connection, first, "never mind")) == 1
        assert actions(connection) == [("discard", 1, "never mind", None)]
    forward_dialogs(app, mom)
    (error,) = receive_said(app, SHOP)
    assert error.message_type == ERROR
    assert "message 1 was given up by postgres: it was parked where it had arrived" in error.text()
    let_time_pass(mom)
    assert ERROR in [one.message_type for one in receive_said(mom, WAREHOUSE)]
    assert count(mom, "parked") == 0
    for dsn in (app, mom):
        with connect(dsn) as connection:
            assert fetch(connection, "SELECT error_code FROM saf.conversation") == [(-7,)]


def _number(connection: psycopg.Connection[object], place: int) -> int:
    """The number of a parked message, by its place among all."""
    return ANY.rows(connection)[place].parked_id
