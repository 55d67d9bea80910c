"""Receiving by the library and by the functions of SQL: one suite, and what only SQL has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

import saf
from saf.broker import services
from saf.database import Dsn, fetch
from tests.dialogs import ERROR, SHOP, WAREHOUSE, forward, prepare, states
from tests.pipeline import connect
from tests.receivers import writes_nothing
from tests.sql_api import ByPython, BySql, Fails, Message, Receiver, Reject, Retry, Sql, received

RECEIVERS: dict[str, Receiver] = {"python": ByPython(), "sql": BySql()}

both = pytest.mark.parametrize("receiver", RECEIVERS.values(), ids=RECEIVERS)

STORE = """
INSERT INTO saf.inbox (to_service, key, body, deliver_at, expires_at)
VALUES ('billing', %(key)s, %(body)s::text::bytea, %(deliver_at)s, %(expires_at)s)
"""
# A lane that is due stays untouched: a write would erase the trace of a failed attempt
DUE = """
UPDATE saf.backoff SET next_attempt_at = now() WHERE next_attempt_at > now() AND NOT awaits_handler
"""
DEAD = "SELECT convert_from(body, 'UTF8'), reason, error FROM saf.dead_letter ORDER BY 1"
LEFT = "SELECT convert_from(body, 'UTF8'), kind FROM saf.parked ORDER BY id"
DROPPED = "SELECT reason, sum(messages)::int FROM saf.dropped GROUP BY 1 ORDER BY 1"


@pytest.fixture
def billing(app: Dsn) -> Dsn:
    with connect(app) as connection:
        services.create_service(connection, "billing")
    return app


def store(dsn: Dsn, *messages: str, deliver_at: str | None = None, **columns: Any) -> None:
    """Store messages such as "a1": key a, body a1."""
    with connect(dsn) as connection:
        for body in messages:
            params = {"key": body[0], "body": body, "deliver_at": deliver_at, "expires_at": None}
            fetch_nothing(connection, STORE, params | columns)


def fetch_nothing(connection: psycopg.Connection[Any], query: str, params: Any = None) -> None:
    psycopg.Cursor(connection).execute(query, params)


def rows(dsn: Dsn, query: str) -> list[tuple[Any, ...]]:
    with connect(dsn) as connection:
        return fetch(connection, query)


def change(dsn: Dsn, statement: str) -> None:
    with connect(dsn) as connection:
        connection.execute(statement.encode())


def drain(
    receiver: Receiver,
    dsn: Dsn,
    handler: Callable[[psycopg.Connection[Any], Message], Reject | Retry | None] | None = None,
    subscription: str = "billing",
    **options: Any,
) -> list[str]:
    """Receive until nothing is left, whatever fails; return what was handled, in order."""
    handled: list[str] = []

    def handle(connection: psycopg.Connection[Any], message: Message) -> Reject | Retry | None:
        outcome = handler(connection, message) if handler else None
        if outcome is None:
            done.append(message.text)
        return outcome

    for _ in range(300):
        change(dsn, DUE)
        done: list[str] = []
        try:
            receiver.deliver(dsn, subscription, handle, **options)
        except Fails:
            continue
        handled += done
        if not done and is_drained(dsn):
            return handled
    raise AssertionError(f"not drained: {rows(dsn, LEFT)}")


def is_drained(dsn: Dsn) -> bool:
    """Whether the next receiver would find nothing: no row to read, none set aside, no trace."""
    query = """
    SELECT (SELECT count(*) FROM saf.parked
            WHERE kind <> 'ahead' AND (deliver_at > now()) IS NOT TRUE)
         + (SELECT count(*) FROM saf.inbox i JOIN saf.cursor c ON c.shard = i.shard
            JOIN saf.subscription s USING (subscription_id)
            WHERE s.log = 'inbox' AND i.to_service = s.service AND NOT (
                pg_visible_in_snapshot(i.txid, c.done)
                OR c.open IS NOT NULL AND pg_visible_in_snapshot(i.txid, c.open)
                   AND i.id <= c.position))
    """
    return rows(dsn, query) == [(0,)]


# The same by both


@both
@pytest.mark.parametrize("max_messages", [1, 7])
@pytest.mark.every_postgresql
def test_each_message_is_received_once_and_in_order_of_its_key(
    receiver: Receiver, max_messages: int, billing: Dsn
) -> None:
    names = [f"{key}{n}" for n in range(6) for key in "abc"]
    store(billing, *names)
    handled = drain(receiver, billing, max_messages=max_messages)
    assert sorted(handled) == sorted(names)
    for key in "abc":
        assert [name for name in handled if name[0] == key] == [f"{key}{n}" for n in range(6)]


@both
def test_a_late_committer_is_not_lost(receiver: Receiver, billing: Dsn) -> None:
    with connect(billing) as late:
        late.execute("BEGIN")
        late.execute("INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing','a','a0')")
        store(billing, "a1")
        assert drain(receiver, billing) == ["a1"]
        late.execute("COMMIT")
    assert drain(receiver, billing) == ["a0"]


@both
def test_what_is_rolled_back_is_delivered_again_and_its_work_is_undone(
    receiver: Receiver, billing: Dsn
) -> None:
    change(billing, "CREATE TABLE work (body text)")
    store(billing, "a1", "a2", "b1")
    tries: Counter[str] = Counter()

    def handle(connection: psycopg.Connection[Any], message: Message) -> None:
        fetch_nothing(connection, "INSERT INTO work VALUES (%(body)s)", {"body": message.text})
        tries[message.text] += 1
        if message.text == "a1" and tries["a1"] == 1:
            raise Fails

    handled = drain(receiver, billing, handle, max_messages=10)
    assert sorted(handled) == ["a1", "a2", "b1"]
    assert handled.index("a1") < handled.index("a2")
    assert sorted(rows(billing, "SELECT body FROM work")) == [("a1",), ("a2",), ("b1",)]


@both
@pytest.mark.parametrize("max_messages", [1, 10])
@pytest.mark.every_postgresql
def test_a_message_that_always_fails_becomes_a_dead_letter_and_the_others_go_on(
    receiver: Receiver, max_messages: int, billing: Dsn
) -> None:
    names = ["a1", "a2", "a3", "b1", "c1", "c2"]
    store(billing, *names)
    tries = []

    def handle(_: object, message: Message) -> None:
        if message.text == "a2":
            tries.append(message.attempt)
            raise Fails

    handled = drain(receiver, billing, handle, max_messages=max_messages, max_attempts=4)
    assert sorted(handled) == [name for name in names if name != "a2"]
    assert [name for name in handled if name[0] == "a"] == ["a1", "a3"]
    ((body, reason, _),) = rows(billing, DEAD)
    assert (body, reason) == ("a2", "failed")
    assert tries[-1] == 4
    assert len(tries) <= 6


@both
def test_a_rejected_message_is_a_dead_letter_and_its_key_continues(
    receiver: Receiver, billing: Dsn
) -> None:
    store(billing, "a1", "a2", "a3")
    handled = drain(
        receiver,
        billing,
        lambda _, message: Reject("no such order") if message.text == "a2" else None,
        max_messages=3,
    )
    assert handled == ["a1", "a3"]
    assert rows(billing, DEAD) == [("a2", "failed", "no such order")]


@both
def test_a_message_tried_later_keeps_its_key_waiting_and_no_other(
    receiver: Receiver, billing: Dsn
) -> None:
    store(billing, "a1", "a2", "a3", "b1")
    seen = []

    def handle(_: object, message: Message) -> Retry | None:
        seen.append((message.text, message.attempt))
        return Retry("not yet") if message.text == "a2" and message.attempt < 3 else None

    handled = drain(receiver, billing, handle, max_messages=10)
    assert sorted(handled) == ["a1", "a2", "a3", "b1"]
    assert [name for name in handled if name[0] == "a"] == ["a1", "a2", "a3"]
    assert [attempt for name, attempt in seen if name == "a2"] == [1, 2, 3]
    assert ("a3", 2) not in seen


@both
def test_the_last_attempt_later_is_a_dead_letter(receiver: Receiver, billing: Dsn) -> None:
    store(billing, "a1", "a2")
    handled = drain(
        receiver,
        billing,
        lambda _, message: Retry("not yet") if message.text == "a1" else None,
        max_messages=10,
        max_attempts=3,
    )
    assert handled == ["a2"]
    assert rows(billing, DEAD) == [("a1", "failed", "not yet")]


@both
def test_a_delayed_message_waits_and_an_expired_one_is_a_dead_letter(
    receiver: Receiver, billing: Dsn
) -> None:
    store(billing, "a1", deliver_at="2199-01-01")
    store(billing, "a2")
    store(billing, "a3", expires_at="2001-01-01")
    assert [_ for _ in (once(receiver, billing), once(receiver, billing)) if _] == [["a2"]]
    assert rows(billing, LEFT) == [("a1", "later")]
    assert rows(billing, DEAD) == [("a3", "expired", "expires_at has passed")]
    change(billing, "UPDATE saf.parked SET deliver_at = now()")
    change(billing, "UPDATE saf.backoff SET next_attempt_at = now()")
    assert drain(receiver, billing) == ["a1"]
    assert rows(billing, "SELECT FROM saf.backoff") == []


def once(receiver: Receiver, dsn: Dsn, **options: Any) -> list[str]:
    handled: list[str] = []
    receiver.deliver(dsn, "billing", lambda _, message: handled.append(message.text), **options)
    return handled


# Dialogs, the same by both


@pytest.fixture
def ends(app: Dsn, mom: Dsn) -> tuple[Dsn, Dsn]:
    prepare(app, mom)
    return app, mom


def opened(app: Dsn, *bodies: str, **options: Any) -> UUID:
    with app.connect(role="test") as connection:
        handle = Sql().begin(connection, **options)
        for body in bodies:
            Sql().say(connection, handle, body, message_type="note")
    return handle


def drain_dialogs(receiver: Receiver, dsn: Dsn, service: str, **options: Any) -> list[str]:
    seen: list[str] = []

    def handle(_: object, message: Message) -> None:
        assert message.handle is not None
        seen.append(
            message.message_type
            if message.message_type and message.message_type.startswith("saf/")
            else message.text
        )

    drain(receiver, dsn, handle, subscription=service, **options)
    return seen


@both
@pytest.mark.parametrize("max_messages", [1, 10])
@pytest.mark.every_postgresql
def test_a_dialog_is_received_in_order_and_answered_on_its_handle(
    receiver: Receiver, max_messages: int, ends: tuple[Dsn, Dsn]
) -> None:
    app, mom = ends
    handle = opened(app, "1", "2", "3", contract="ordering", lifetime=600)
    forward(app, mom)
    seen = []

    def answer(connection: psycopg.Connection[Any], message: Message) -> None:
        seen.append((message.text, message.sequence))
        assert message.handle is not None
        if message.text == "3":
            Sql().say(connection, message.handle, "done", message_type="delivery")
            Sql().end(connection, message.handle)

    drain(receiver, mom, answer, subscription=WAREHOUSE, max_messages=max_messages)
    assert seen == [("1", 1), ("2", 2), ("3", 3)]
    forward(app, mom)
    assert drain_dialogs(receiver, app, SHOP) == ["done", "saf/end-dialog"]
    with app.connect(role="test") as connection:
        Sql().end(connection, handle)
    forward(app, mom)
    assert drain_dialogs(receiver, mom, WAREHOUSE) == []
    assert (states(app), states(mom)) == (["closed"], ["closed"])
    assert rows(mom, FAR) == [("shop", "ordering", 1, True, True)]
    assert rows(app, "SELECT answered_by IS NOT NULL FROM saf.conversation") == [(True,)]


FAR = """
SELECT far_service, contract, contract_version, far_broker IS NOT NULL, expires_at IS NOT NULL
FROM saf.conversation
"""
COPY = """
INSERT INTO saf.inbox (message_id, from_service, to_service, key, conversation_id, from_initiator,
                       sequence, message_type, headers, body, source)
SELECT gen_random_uuid(), from_service, to_service, key, conversation_id, from_initiator, sequence,
       message_type, headers, body, source
FROM saf.inbox WHERE sequence = ANY ('{numbers}') ORDER BY {order}
"""


@both
def test_a_repeat_is_dropped_and_what_is_ahead_waits(
    receiver: Receiver, ends: tuple[Dsn, Dsn]
) -> None:
    app, mom = ends
    opened(app, "1", "2", "3", "4")
    forward(app, mom)
    change(mom, COPY.format(numbers="{1,2,3,4}", order="-sequence"))
    change(mom, "DELETE FROM saf.inbox WHERE id <= 4")
    assert drain_dialogs(receiver, mom, WAREHOUSE) == ["1", "2", "3", "4"]
    change(mom, COPY.format(numbers="{2,4}", order="sequence"))
    assert drain_dialogs(receiver, mom, WAREHOUSE) == []
    assert rows(mom, DROPPED) == [("repeat", 2)]
    assert rows(mom, LEFT) == []


@both
def test_an_error_overtakes_and_fails_this_end(receiver: Receiver, ends: tuple[Dsn, Dsn]) -> None:
    app, mom = ends
    handle = opened(app, "1", "2")
    with app.connect(role="test") as connection:
        Sql().end(connection, handle, 17, "no stock")
    forward(app, mom)
    change(mom, "DELETE FROM saf.inbox WHERE sequence = 2")
    assert drain_dialogs(receiver, mom, WAREHOUSE, max_messages=1) == ["1", ERROR]
    failed = "SELECT state, error_code, error_text FROM saf.conversation"
    assert rows(mom, failed) == [("error", 17, "no stock")]


@both
def test_an_error_that_comes_first_tells_an_end_that_is_not_there_yet(
    receiver: Receiver, ends: tuple[Dsn, Dsn]
) -> None:
    app, mom = ends
    handle = opened(app, "1")
    with app.connect(role="test") as connection:
        Sql().end(connection, handle, 17, "no stock")
    forward(app, mom)
    change(mom, "DELETE FROM saf.inbox WHERE sequence = 1")
    assert drain_dialogs(receiver, mom, WAREHOUSE) == [ERROR]
    assert states(mom) == ["error"]


@both
def test_what_the_contract_does_not_allow_fails_both_ends(
    receiver: Receiver, ends: tuple[Dsn, Dsn]
) -> None:
    app, mom = ends
    opened(app, "1", "2", contract="ordering")
    forward(app, mom)
    change(mom, "UPDATE saf.inbox SET message_type = 'nonsense' WHERE sequence = 2")
    assert drain_dialogs(receiver, mom, WAREHOUSE) == ["1", ERROR]
    ((body, reason, error),) = rows(mom, DEAD)
    assert (body, reason) == ("2", "rejected")
    assert "nonsense" in error
    forward(app, mom)
    assert drain_dialogs(receiver, app, SHOP) == [ERROR]
    codes = "SELECT error_code FROM saf.conversation"
    assert (rows(app, codes), rows(mom, codes)) == ([(-3,)], [(-3,)])


@both
def test_a_target_without_the_contract_fails_both_ends(
    receiver: Receiver, app: Dsn, mom: Dsn
) -> None:
    prepare(app, mom)
    change(app, "INSERT INTO saf.contract (name, version) VALUES ('ordering', 2)")
    change(
        app,
        "INSERT INTO saf.contract_message SELECT contract, 2, message_type, "
        "message_type_version, sent_by FROM saf.contract_message",
    )
    opened(app, "1", "2", contract="ordering")
    forward(app, mom)
    assert drain_dialogs(receiver, mom, WAREHOUSE) == [ERROR]
    forward(app, mom)
    assert drain_dialogs(receiver, app, SHOP) == [ERROR]
    codes = "SELECT error_code FROM saf.conversation"
    assert (rows(app, codes), rows(mom, codes)) == ([(-4,)], [(-4,)])


@both
def test_a_rejected_message_of_a_dialog_fails_both_ends(
    receiver: Receiver, ends: tuple[Dsn, Dsn]
) -> None:
    app, mom = ends
    opened(app, "1", "2")
    forward(app, mom)
    drain(
        receiver,
        mom,
        lambda _, message: Reject("details") if message.text == "1" else None,
        subscription=WAREHOUSE,
    )
    forward(app, mom)
    assert drain_dialogs(receiver, app, SHOP) == [ERROR]
    codes = "SELECT error_code, error_text FROM saf.conversation"
    assert rows(app, codes) == [(-2, "message 1 could not be handled")]
    assert rows(mom, DEAD) == [("1", "failed", "details")]


@both
def test_a_message_of_a_dialog_tried_later_is_not_received_yet(
    receiver: Receiver, ends: tuple[Dsn, Dsn]
) -> None:
    app, mom = ends
    opened(app, "1", "2", "3")
    forward(app, mom)
    numbers = []

    def handle(_: object, message: Message) -> Retry | None:
        if message.text == "2" and message.attempt == 1:
            return Retry("not yet")
        numbers.append(message.text)
        return None

    drain(receiver, mom, handle, subscription=WAREHOUSE, max_messages=1)
    assert numbers == ["1", "2", "3"]
    assert rows(mom, "SELECT receive_sequence, state FROM saf.conversation") == [(3, "conversing")]


@both
def test_after_its_own_end_a_side_takes_no_message_and_then_closes(
    receiver: Receiver, ends: tuple[Dsn, Dsn]
) -> None:
    app, mom = ends
    handle = opened(app, "1", "2")
    forward(app, mom)
    assert once_dialog(receiver, mom) == ["1"]
    with mom.connect(role="test") as connection:
        ((target,),) = fetch(connection, "SELECT handle FROM saf.conversation")
        Sql().end(connection, target)
    assert drain_dialogs(receiver, mom, WAREHOUSE) == []
    assert rows(mom, DROPPED) == [("ended", 1)]
    with app.connect(role="test") as connection:
        Sql().end(connection, handle)
    forward(app, mom)
    assert drain_dialogs(receiver, mom, WAREHOUSE) == []
    assert states(mom) == ["closed"]


def once_dialog(receiver: Receiver, dsn: Dsn) -> list[str]:
    seen: list[str] = []
    receiver.deliver(dsn, WAREHOUSE, lambda _, message: seen.append(message.text), max_messages=1)
    return seen


# What only SQL has: the functions are called in the application's own transactions


@pytest.mark.every_postgresql
def test_two_receivers_never_have_one_key_in_hand(billing: Dsn) -> None:
    store(billing, "a1", "a2", *(f"{key}1" for key in "bcdefgh"))
    with billing.connect(role="test") as one, billing.connect(role="test") as other:
        mine = [message.text for message in received(one, "billing", 3)]
        theirs = [message.text for message in received(other, "billing", 100)]
    assert len(mine) == 3
    assert not {name[0] for name in mine} & {name[0] for name in theirs}
    assert len({*mine, *theirs}) == len([*mine, *theirs])


def test_several_calls_in_one_transaction_go_on_in_order(billing: Dsn) -> None:
    store(billing, "a1", "a2", "a3")
    with billing.connect(role="test") as connection:
        assert [one.text for _ in range(4) for one in received(connection, "billing")] == [
            *("a1", "a2", "a3")
        ]
    assert drain(BySql(), billing) == []


def test_what_the_transaction_itself_stores_later_is_not_lost(billing: Dsn) -> None:
    store(billing, "a1")
    with billing.connect(role="test") as connection:
        assert [one.text for one in received(connection, "billing", 10)] == ["a1"]
        assert received(connection, "billing", 10) == []
        fetch_nothing(
            connection, "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing','a','a2')"
        )
    assert drain(BySql(), billing) == ["a2"]


def test_what_it_stores_is_not_lost_if_a_later_transaction_has_ended(billing: Dsn) -> None:
    """The snapshot of a batch that is opened here has the transaction itself among the ended."""
    with billing.connect(role="test") as connection:
        connection.execute("SELECT pg_current_xact_id()")
        store(billing, "a1")
        assert [one.text for one in received(connection, "billing", 10)] == ["a1"]
        assert received(connection, "billing", 10) == []
        fetch_nothing(
            connection, "INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing','a','a2')"
        )
    assert drain(BySql(), billing) == ["a2"]


def test_what_arrives_for_a_key_that_waits_waits_behind_it(billing: Dsn) -> None:
    store(billing, "a1")
    with billing.connect(role="test") as connection:
        (first,) = received(connection, "billing", 10)
        connection.execute("SELECT saf.retry_later(%s, 'not yet', '1 h')", [first.message_id])
    store(billing, "a2", "b1")
    with billing.connect(role="test") as connection:
        found = [*received(connection, "billing", 10), *received(connection, "billing", 10)]
        assert [one.text for one in found] == ["b1"]
    assert rows(billing, LEFT) == [("a1", "key"), ("a2", "key")]


def test_a_rollback_to_a_savepoint_gives_the_messages_back(billing: Dsn) -> None:
    store(billing, "a1")
    with billing.connect(role="test") as connection:
        connection.execute("SAVEPOINT before")
        (first,) = received(connection, "billing")
        connection.execute("ROLLBACK TO SAVEPOINT before")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="not in hand"):
            connection.execute("SELECT saf.reject(%s, 'no')", [first.message_id])
    assert drain(BySql(), billing) == ["a1"]


def test_a_message_is_set_aside_only_by_the_transaction_that_has_it(billing: Dsn) -> None:
    store(billing, "a1")
    with billing.connect(role="test") as one, billing.connect(role="test") as other:
        (first,) = received(one, "billing")
        for message_id in (first.message_id, uuid4(), None):
            for call in ("saf.reject(%s, 'no')", "saf.retry_later(%s, 'no')"):
                with pytest.raises(psycopg.Error, match="not in hand"):
                    other.execute(f"SELECT {call}".encode(), [message_id])
                other.rollback()
        one.commit()
        with pytest.raises(psycopg.Error, match="not in hand"):
            one.execute("SELECT saf.reject(%s, 'no')", [first.message_id])
    assert rows(billing, DEAD) == []


def test_messages_in_hand_behind_one_that_is_tried_later_wait_too(billing: Dsn) -> None:
    store(billing, "a1", "a2", "a3")
    with billing.connect(role="test") as connection:
        _, second, third = received(connection, "billing", 3)
        assert fetch(
            connection,
            "SELECT saf.retry_later(%(id)s, 'not yet', '1 hour')",
            {"id": second.message_id},
        ) == [("waits",)]
        with pytest.raises(psycopg.Error, match="not in hand"):
            connection.execute("SELECT saf.reject(%s, 'no')", [third.message_id])
        connection.rollback()
    assert rows(billing, LEFT) == []
    assert drain(BySql(), billing) == ["a1", "a2", "a3"]


def test_the_wait_is_the_one_that_was_asked_for(billing: Dsn) -> None:
    store(billing, "a1", "a2", "b1")
    with billing.connect(role="test") as connection:
        for message in received(connection, "billing", 3):
            if message.text == "a1":
                connection.execute(
                    "SELECT saf.retry_later(%s, 'not yet', '1 hour')", [message.message_id]
                )
    waits = "SELECT attempts, error, next_attempt_at > now() + interval '59 min' FROM saf.backoff"
    assert rows(billing, waits) == [(1, "not yet", True)]
    assert rows(billing, LEFT) == [("a1", "key"), ("a2", "key")]
    store(billing, "a3")
    assert [name for _ in range(3) for name in once(BySql(), billing)] == []
    assert rows(billing, LEFT) == [("a1", "key"), ("a2", "key"), ("a3", "key")]


def test_a_message_from_a_lane_is_set_aside_again_with_its_body(billing: Dsn) -> None:
    store(billing, "a1")
    for reason in ("first", "second"):
        change(billing, DUE)
        seen: list[int] = []
        while not seen:
            with billing.connect(role="test") as connection:
                for message in received(connection, "billing"):
                    seen.append(message.attempt)
                    connection.execute(
                        "SELECT saf.retry_later(%s, %s)", [message.message_id, reason]
                    )
    assert seen == [2]
    change(billing, DUE)
    # only the parked copy is left
    change(billing, "TRUNCATE saf.inbox")
    with billing.connect(role="test") as connection:
        (last,) = received(connection, "billing")
        assert (last.text, last.attempt) == ("a1", 3)
        connection.execute("SELECT saf.reject(%s, 'no use')", [last.message_id])
    assert rows(billing, DEAD) == [("a1", "failed", "no use")]
    assert rows(billing, LEFT) == rows(billing, "SELECT FROM saf.backoff") == []


REFUSED_CALLS = {
    "SELECT saf.receive('biling')": "no subscription 'biling'",
    "SELECT saf.receive('forwarder')": "no subscription 'forwarder'",
    "SELECT saf.receive(NULL)": "no subscription NULL",
    "SELECT saf.receive('billing', 0)": "max_messages: 0 is less than 1",
    "SELECT saf.receive('billing', NULL)": "max_messages: NULL is less than 1",
    "SELECT saf.receive('billing', 1, 0)": "max_attempts: 0 is less than 1",
    "SELECT saf.reject(gen_random_uuid(), NULL)": "reason: is NULL",
    "SELECT saf.retry_later(gen_random_uuid(), NULL)": "reason: is NULL",
    "SELECT saf.retry_later(gen_random_uuid(), 'a', '-1 s')": "wait: is negative",
}


@pytest.mark.parametrize("call", REFUSED_CALLS)
def test_a_wrong_call_is_refused_by_name(call: str, billing: Dsn) -> None:
    with billing.connect(role="test") as connection, pytest.raises(psycopg.Error) as refused:
        connection.execute(call.encode())
    assert REFUSED_CALLS[call] in str(refused.value)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_transaction_that_does_not_see_what_commits_is_refused(level: str, billing: Dsn) -> None:
    with billing.connect(role="test") as connection:
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        with pytest.raises(
            psycopg.Error, match=f"READ COMMITTED, and this transaction has {level}"
        ):
            received(connection, "billing")


def test_a_subscription_that_processors_read_is_refused(billing: Dsn) -> None:
    change(
        billing,
        "INSERT INTO saf.member (member_id, subscription_id, name, lease_until) "
        "SELECT gen_random_uuid(), subscription_id, 'host:7', now() + interval '1 min' "
        "FROM saf.subscription WHERE name = 'billing'",
    )
    with (
        billing.connect(role="test") as connection,
        pytest.raises(psycopg.Error, match=r"processors own the shards .* host:7"),
    ):
        received(connection, "billing")


def test_a_paused_subscription_gives_nothing_until_it_is_resumed(billing: Dsn) -> None:
    store(billing, "a1")
    with connect(billing) as connection:
        services.pause(connection, "billing")
    assert rows(billing, "SELECT id FROM saf.receive('billing')") == []
    with connect(billing) as connection:
        services.resume(connection, "billing")
    assert drain(BySql(), billing) == ["a1"]


@pytest.mark.parametrize("rule", ["rate = '5/s'", "fair_by = 'key'"], ids=lambda rule: rule[:4])
def test_a_subscription_with_rules_that_sql_does_not_follow_is_refused(
    rule: str, billing: Dsn
) -> None:
    store(billing, "a1")
    change(billing, f"UPDATE saf.subscription SET {rule} WHERE name = 'billing'")
    with (
        connect(billing) as connection,
        pytest.raises(psycopg.Error, match="a rate or a fair order, which SQL does not follow"),
    ):
        connection.execute("SELECT * FROM saf.receive('billing')")


def test_a_concurrency_holds_for_python_and_sql_together(billing: Dsn) -> None:
    store(billing, *(f"{key}1" for key in "abcdef"))
    with connect(billing) as connection:
        services.limit(connection, "billing", concurrency=2)
    one, other, third = (billing.connect(role="test") for _ in range(3))
    with one, other, third:
        assert len([*received(one, "billing"), *received(one, "billing")]) == 2
        one.execute("SAVEPOINT before")
        assert len(received(other, "billing")) == 1
        assert received(third, "billing", 10) == []
        assert once(ByPython(), billing) == []
        other.rollback()
        third.commit()
        with saf.receive(billing, "billing", max_messages=1) as delivery:
            assert len(delivery) == 1
            assert received(third, "billing", 10) == []
            third.commit()
        one.commit()
        assert len(received(third, "billing")) == 1


# An empty result


def until_empty(dsn: Dsn, **options: Any) -> list[str]:
    """What a loop handles that stops at the first empty result."""
    handled: list[str] = []
    while found := once(BySql(), dsn, **options):
        handled += found
    return handled


@pytest.mark.parametrize("max_messages", [1, 3, 100])
@pytest.mark.every_postgresql
def test_a_loop_that_stops_at_the_first_empty_result_has_everything(
    max_messages: int, billing: Dsn
) -> None:
    """Messages arrive after a batch was opened that is complete now: in one shard, and in all."""
    store(billing, "z1")
    assert once(BySql(), billing) == ["z1"]
    store(billing, "z2")
    assert until_empty(billing, max_messages=max_messages) == ["z2"]
    names = [f"{key}{n}" for n in range(4) for key in "abcdefgh"]
    store(billing, *names[:16])
    handled = [one for _ in range(8) for one in once(BySql(), billing, max_messages=1)]
    store(billing, *names[16:])
    handled += until_empty(billing, max_messages=max_messages)
    assert sorted(handled) == sorted(names)
    for key in "abcdefgh":
        assert [name for name in handled if name[0] == key] == [f"{key}{n}" for n in range(4)]
    assert writes_nothing(billing, lambda: until_empty(billing))


def test_what_is_not_handed_out_does_not_end_the_loop(billing: Dsn) -> None:
    """Many expired messages come first, in the log and among those whose time has come."""
    store(billing, *["a1"] * 5, "b1", deliver_at="2199-01-01")
    assert until_empty(billing) == []
    change(billing, "UPDATE saf.parked SET deliver_at = now()")
    change(billing, "UPDATE saf.parked SET expires_at = now() WHERE key = 'a'")
    change(billing, "UPDATE saf.backoff SET next_attempt_at = now()")
    assert until_empty(billing) == ["b1"]
    store(billing, *["c1"] * 1100, expires_at="2001-01-01")
    store(billing, "c2")
    assert until_empty(billing) == ["c2"]
    assert rows(billing, "SELECT count(*) FROM saf.dead_letter") == [(1105,)]


def test_a_lane_whose_first_messages_expired_does_not_end_the_loop(billing: Dsn) -> None:
    store(billing, "a1", "a2", "a3", "a4")
    with billing.connect(role="test") as connection:
        (first, *_) = received(connection, "billing", 4)
        connection.execute("SELECT saf.retry_later(%s, 'not yet', '1 h')", [first.message_id])
    change(billing, "UPDATE saf.parked SET expires_at = now() WHERE id < 4")
    change(billing, "UPDATE saf.backoff SET next_attempt_at = now()")
    assert until_empty(billing) == ["a4"]
    assert rows(billing, "SELECT count(*) FROM saf.dead_letter") == [(3,)]


def test_many_due_lanes_of_a_shard_in_use_do_not_hide_one_of_another(billing: Dsn) -> None:
    change(
        billing,
        "INSERT INTO saf.parked (subscription_id, shard, id, message_id, to_service, key, body, "
        "headers, kind, subject, batch, position, opened_at) "
        "SELECT subscription_id, n / 150, n, gen_random_uuid(), 'billing', 'k' || n, 'lane', '{}',"
        " 'key', 'k' || n, 0, n, NULL FROM saf.subscription, generate_series(1, 150) AS n "
        "WHERE name = 'billing';"
        "INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, attempts, "
        "error, next_attempt_at) SELECT subscription_id, '', kind, subject, shard, 1, '', "
        "now() - interval '1 h' + id * interval '1 s' FROM saf.parked",
    )
    with connect(billing) as other, other.transaction():
        other.execute("SELECT FROM saf.cursor WHERE shard = 0 FOR UPDATE")
        with billing.connect(role="test") as connection:
            assert [message.key for message in received(connection, "billing")] == ["k150"]


def test_a_database_whose_transaction_ids_went_back_is_refused(billing: Dsn) -> None:
    change(billing, "UPDATE saf.cursor SET done = '900000000:900000000:' WHERE shard = 7")
    with (
        billing.connect(role="test") as connection,
        pytest.raises(psycopg.Error, match="went back") as refused,
    ):
        received(connection, "billing")
    assert refused.value.diag.message_hint == "See `saf doctor`."


# A killed receiver, whose transaction nobody rolls back


@pytest.mark.every_postgresql
def test_each_attempt_of_a_killed_receiver_is_counted_in_the_end(billing: Dsn) -> None:
    store(billing, "a1", "a2", "b1")
    killed: Counter[str] = Counter()
    handled = []
    for _ in range(100):
        change(billing, DUE)
        victim = billing.connect(role="test")
        messages = received(victim, "billing", 1, max_attempts=3)
        if [message.text for message in messages] == ["a1"]:
            killed["a1"] += 1
            with connect(billing) as killer:
                killer.execute("SELECT pg_terminate_backend(%s, 10000)", [victim.info.backend_pid])
            victim.close()
            continue
        handled += [message.text for message in messages]
        victim.commit()
        victim.close()
        if len(handled) == 2:
            break
    assert sorted(handled) == ["a2", "b1"]
    assert rows(billing, DEAD) == [("a1", "failed", "attempt 3 of 3 did not come to its end")]
    assert killed["a1"] == 3


def test_a_count_that_is_lost_with_its_transaction_is_made_by_the_next(billing: Dsn) -> None:
    store(billing, "a1")
    with billing.connect(role="test") as connection:
        received(connection, "billing")
        connection.rollback()
        # finds the trace, and fails as well
        for _ in range(3):
            assert received(connection, "billing") == []
            connection.rollback()
        assert received(connection, "billing") == []
        connection.commit()
        (again,) = received(connection, "billing")
        assert (again.text, again.attempt) == ("a1", 2)
        # alone: what would follow could not be told from this one if the transaction fails
        store(billing, "b1")
        assert received(connection, "billing") == []
        connection.commit()
    assert drain(BySql(), billing) == ["b1"]


def test_a_failure_is_not_counted_against_keys_that_only_wait(billing: Dsn) -> None:
    store(billing, "a1", "b1", "c1")
    with billing.connect(role="test") as connection:
        for message in received(connection, "billing", 3):
            connection.execute("SELECT saf.retry_later(%s, 'wait', '1 h')", [message.message_id])
        connection.commit()
        store(billing, "d1")
        for _ in range(4):
            received(connection, "billing", 10)
            connection.rollback()
        received(connection, "billing", 10)
    attempts = "SELECT subject, attempts FROM saf.backoff ORDER BY 1"
    assert rows(billing, attempts)[:3] == [("a", 1), ("b", 1), ("c", 1)]


# What only the library can do


def test_parts_of_a_large_body_wait_for_the_library_which_then_receives_it(
    ends: tuple[Dsn, Dsn],
) -> None:
    app, mom = ends
    with app.connect(role="test") as connection:
        dialog = saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE)
        dialog.send(connection, b"small")
        dialog.send(connection, b"large" * 10, fragment_bytes=8)
        dialog.send(connection, b"after")
    forward(app, mom)
    seen: list[str] = []
    for _ in range(20):
        BySql().deliver(mom, WAREHOUSE, lambda _, message: seen.append(message.text))
    assert seen == ["small"]
    waits = "SELECT attempts, awaits_handler, error FROM saf.backoff"
    text = "saf.receive leaves it to a worker: it is part of a large body"
    assert rows(mom, waits) == [(0, True, text)]
    assert drain_dialogs(ByPython(), mom, WAREHOUSE) == ["large" * 10, "after"]


def test_a_type_with_a_schema_waits_for_the_library(ends: tuple[Dsn, Dsn]) -> None:
    app, mom = ends
    with app.connect(role="test") as connection:
        dialog = saf.begin_dialog(
            connection, from_service=SHOP, to_service=WAREHOUSE, contract="ordering"
        )
        dialog.send(connection, {"amount": 7}, message_type="order")
        dialog.send(connection, "after", message_type="note")
    forward(app, mom)
    for _ in range(5):
        assert BySql().deliver(mom, WAREHOUSE, lambda *_: None) == 0
    ((error, message_type),) = rows(mom, "SELECT error, message_type FROM saf.backoff")
    assert "'order' of contract 'ordering' version 1 has a JSON Schema" in error
    assert message_type == "order"
    assert rows(mom, "SELECT receive_sequence FROM saf.conversation") == [(0,)]
    assert drain_dialogs(ByPython(), mom, WAREHOUSE) == ['{"amount":7}', "after"]


def test_a_group_that_another_receiver_has_in_hand_is_left_alone(ends: tuple[Dsn, Dsn]) -> None:
    app, mom = ends
    opened(app, "1", "2")
    forward(app, mom)
    assert once_dialog(BySql(), mom) == ["1"]
    with connect(mom) as other, other.transaction():
        other.execute("SELECT FROM saf.conversation_group FOR NO KEY UPDATE")
        assert once_dialog(BySql(), mom) == []
    assert drain_dialogs(BySql(), mom, WAREHOUSE) == ["2"]


def test_python_and_sql_share_a_subscription(billing: Dsn) -> None:
    names = [f"{key}{n}" for n in range(8) for key in "abc"]
    store(billing, *names)
    handled: list[str] = []
    fails = iter([True, False, False, True, False])
    receivers = [*RECEIVERS.values()]

    def handle(_: object, message: Message) -> None:
        if next(fails, False):
            raise Fails
        done.append(message.text)

    for turn in range(300):
        change(billing, DUE)
        done: list[str] = []
        try:
            receivers[turn % 2].deliver(billing, "billing", handle, max_messages=2)
        except Fails:
            continue
        handled += done
        if len(handled) >= len(names):
            break
    assert sorted(handled) == sorted(names)
    for key in "abc":
        assert [name for name in handled if name[0] == key] == [f"{key}{n}" for n in range(8)]
