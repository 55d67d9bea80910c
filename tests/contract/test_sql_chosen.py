"""Receiving one dialog or one group: one suite for the library and SQL, and what only SQL has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.pool import NullPool

import saf
from saf.broker.grants import Kind, grant
from saf.broker.migrate import HEAD, downgrade, upgrade
from saf.database import Dsn, fetch
from saf.errors import DialogNotFound, UsageError
from saf.receiving import chosen
from tests import dialogs
from tests.dialogs import END, ERROR, SHOP, WAREHOUSE
from tests.pipeline import connect
from tests.receivers import writes_nothing
from tests.sql_api import ByPython, BySql, Fails, Message, Receiver, Reject, Retry, received
from tests.talks import answered, answers, before, house_of, numbers

RECEIVERS: dict[str, Receiver] = {"python": ByPython(), "sql": BySql()}

both = pytest.mark.parametrize("receiver", RECEIVERS.values(), ids=RECEIVERS)
every_postgresql = pytest.mark.every_postgresql

Handler = Callable[[psycopg.Connection[Any], Message], Reject | Retry | None]
LANES = "SELECT kind, attempts FROM saf.backoff ORDER BY 1, 2"
DEAD = "SELECT convert_from(body, 'UTF8'), reason FROM saf.dead_letter ORDER BY 1"


@pytest.fixture
def house(app: Dsn) -> Dsn:
    return house_of(app)


def text_of(message: Message) -> str:
    saf_type = message.message_type if (message.message_type or "").startswith("saf/") else None
    return saf_type or message.text


def once(receiver: Receiver, dsn: Dsn, handler: Handler | None = None, **options: Any) -> list[str]:
    """Receive one delivery of the shop."""
    seen: list[str] = []

    def handle(connection: psycopg.Connection[Any], message: Message) -> Reject | Retry | None:
        seen.append(text_of(message))
        return handler(connection, message) if handler else None

    receiver.deliver(dsn, SHOP, handle, **options)
    return seen


def until_empty(receiver: Receiver, dsn: Dsn, **options: Any) -> list[str]:
    """Receive until a delivery is empty: the first one."""
    seen: list[str] = []
    while found := once(receiver, dsn, **options):
        seen += found
    return seen


def fails(receiver: Receiver, dsn: Dsn, **options: Any) -> tuple[list[str], int] | None:
    """Let a delivery fail; return its messages and the attempt of the first one; None: empty."""
    seen: list[Message] = []

    def handle(_: object, message: Message) -> None:
        seen.append(message)
        if len(seen) == options.get("max_messages", 1):
            raise Fails

    try:
        receiver.deliver(dsn, SHOP, handle, **options)
    except Fails:
        return [text_of(message) for message in seen], seen[0].attempt
    assert not seen
    return None


def rows(dsn: Dsn, query: str) -> list[tuple[Any, ...]]:
    with connect(dsn) as connection:
        return fetch(connection, query)


def change(dsn: Dsn, statement: str) -> None:
    with connect(dsn) as connection:
        connection.execute(statement.encode())


# The same by both


@both
@every_postgresql
def test_a_conversation_is_received_whatever_waits_before_it(
    receiver: Receiver, house: Dsn
) -> None:
    dialog = answered(house)
    before(house, dialog, *numbers(0, 30))
    answers(house, dialog, "a", "b")
    before(house, dialog, *numbers(30, 50))
    answers(house, dialog, "c")
    assert until_empty(receiver, house, conversation=dialog.handle) == ["a", "b", "c"]
    assert until_empty(receiver, house, max_messages=7) == numbers(0, 50)


@both
def test_another_conversation_is_left_for_others(receiver: Receiver, house: Dsn) -> None:
    one, other = answered(house), answered(house)
    answers(house, one, "1")
    answers(house, other, "2")
    assert until_empty(receiver, house, conversation=one.handle) == ["1"]
    assert until_empty(receiver, house) == ["2"]


@both
@pytest.mark.parametrize("backlog", [40, 300])
@pytest.mark.parametrize("times", [1, 3])
def test_what_arrives_after_a_batch_was_opened_is_received_too(
    receiver: Receiver, backlog: int, times: int, house: Dsn
) -> None:
    dialog = answered(house)
    for n in range(0, backlog, 20):
        before(house, dialog, *numbers(n, n + 20))
    plain, mine = list[str](), list[str]()
    for turn in range(times):
        plain += once(receiver, house, max_messages=7)
        answers(house, dialog, f"a{turn}", f"b{turn}")
        mine += until_empty(receiver, house, conversation=dialog.handle)
    assert mine == [f"{letter}{turn}" for turn in range(times) for letter in "ab"]
    answers(house, dialog, "last")
    plain += until_empty(receiver, house, max_messages=11)
    assert plain == [*numbers(0, backlog), "last"]
    assert rows(house, "SELECT FROM saf.dropped") == [], "nothing was read twice"


@both
def test_a_late_committer_is_neither_lost_nor_repeated(receiver: Receiver, house: Dsn) -> None:
    """A transaction that began before others may commit after their messages were received."""
    dialog = answered(house)
    with connect(house) as late, late.transaction():
        late.execute("SELECT pg_current_xact_id()")
        before(house, dialog, "1", "2")
        assert once(receiver, house) == ["1"]
        answers(house, dialog, "a")
        assert until_empty(receiver, house, conversation=dialog.handle) == ["a"]
        saf.Outbox().send(late, SHOP, "late", key=key_of(house))
    answers(house, dialog, "b")
    assert until_empty(receiver, house, conversation=dialog.handle) == ["b"]
    assert sorted(until_empty(receiver, house)) == ["2", "late"]


def key_of(dsn: Dsn) -> str:
    """The key of the plain messages in the dialog's shard."""
    ((key,),) = rows(dsn, "SELECT DISTINCT key FROM saf.inbox WHERE conversation_id IS NULL")
    return str(key)


@both
def test_a_shard_with_too_many_messages_is_not_extended(
    receiver: Receiver, house: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "ALL", chosen.ALL.replace(str(chosen.MOST), "30"))
    monkeypatch.setattr(chosen, "MOST", 30)
    ((source,),) = rows(house, "SELECT pg_get_functiondef('saf.extend_batch'::regproc)")
    change(house, source.replace("16385", "31").replace("16384", "30"))
    dialog = answered(house)
    before(house, dialog, *numbers(0, 50))
    assert once(receiver, house, max_messages=7) == numbers(0, 7)
    answers(house, dialog, "a")
    assert once(receiver, house, conversation=dialog.handle) == []
    assert until_empty(receiver, house, max_messages=20) == [*numbers(7, 50), "a"]


@both
def test_a_group_is_received_and_no_other_dialog(receiver: Receiver, house: Dsn) -> None:
    first = answered(house, "1")
    second = answered(house, "2", related=first)
    other = answered(house, "3")
    found = until_empty(receiver, house, group=second.handle, max_messages=10)
    assert sorted(found) == ["1", "2"]
    assert until_empty(receiver, house, conversation=other.handle) == ["3"]


@both
def test_an_end_comes_in_order(receiver: Receiver, house: Dsn) -> None:
    dialog = answered(house)
    answers(house, dialog, "a")
    with house.connect(role="test") as connection:
        find = "SELECT handle FROM saf.conversation WHERE NOT is_initiator"
        ((handle,),) = connection.execute(find).fetchall()
        saf.open_dialog(connection, handle).end(connection)
    assert until_empty(receiver, house, conversation=dialog.handle) == ["a", END]


@both
def test_a_message_that_is_ahead_waits_for_the_missing_one(receiver: Receiver, house: Dsn) -> None:
    dialog = answered(house)
    for number, body in ((2, "b"), (1, "a")):
        dialogs.put(
            house, dialog, number, body, to_service=SHOP, from_service=WAREHOUSE,
            from_initiator=False,
        )  # fmt: skip
        found = until_empty(receiver, house, conversation=dialog.handle)
        assert found == ([] if number == 2 else ["a", "b"])


@both
def test_a_delivery_that_fails_is_repeated_and_then_a_dead_letter(
    receiver: Receiver, house: Dsn
) -> None:
    dialog = answered(house)
    before(house, dialog, "1", "2")
    answers(house, dialog, "bad", "next")
    attempts = []
    for _ in range(20):
        change(
            house, "UPDATE saf.backoff SET next_attempt_at = now() WHERE next_attempt_at > now()"
        )
        attempts += [fails(receiver, house, conversation=dialog.handle, max_attempts=3)]
        if rows(house, DEAD):
            break
    assert [one for one in attempts if one] == [(["bad"], n) for n in (1, 2, 3)]
    assert rows(house, DEAD) == [("bad", "failed")]
    seen = []
    for _ in range(6):
        seen += until_empty(receiver, house, conversation=dialog.handle)
    assert seen == [ERROR]
    for _ in range(4):
        seen += until_empty(receiver, house)
    assert seen == [ERROR, "1", "2"]
    assert rows(house, LANES) == []


@both
def test_one_failure_does_not_keep_others_from_their_messages(
    receiver: Receiver, house: Dsn
) -> None:
    dialog = answered(house)
    before(house, dialog, *numbers(0, 5))
    answers(house, dialog, "a")
    assert fails(receiver, house, max_messages=2) == (["0", "1"], 1)
    mine, plain = list[str](), list[str]()
    for _ in range(4):
        mine += until_empty(receiver, house, conversation=dialog.handle)
    assert mine == ["a"]
    for _ in range(4):
        plain += until_empty(receiver, house)
    assert plain == numbers(0, 5)


@both
def test_a_conversation_whose_lane_waits_is_not_overtaken(receiver: Receiver, house: Dsn) -> None:
    dialog = answered(house, "a")
    with saf.receive(house, SHOP, policy=saf.Policy(first_wait_seconds=3600)) as delivery:
        delivery.park(delivery[0], "later")
    answers(house, dialog, "b")
    assert until_empty(receiver, house, conversation=dialog.handle) == []
    change(house, "UPDATE saf.backoff SET next_attempt_at = now()")
    assert until_empty(receiver, house, conversation=dialog.handle) == ["a", "b"]


@both
def test_receivers_of_everything_and_of_one_conversation_share_the_work(
    receiver: Receiver, house: Dsn
) -> None:
    """By both ways at once, so that each reads what the other has left."""
    talks = [answered(house) for _ in range(3)]
    change(house, "CREATE TABLE done (n serial, body text)")
    total = 6 * 15

    def note(connection: psycopg.Connection[Any], message: Message) -> None:
        connection.execute("INSERT INTO done (body) VALUES (%s)", [message.text])

    def work(by: Receiver, **which: Any) -> None:
        while rows(house, "SELECT count(*) FROM done") < [(total,)]:
            by.deliver(house, SHOP, note, max_messages=3, **which)

    threads = [threading.Thread(target=work, args=(by,)) for by in RECEIVERS.values()]
    threads += [
        threading.Thread(target=work, args=(receiver,), kwargs={"conversation": talk.handle})
        for talk in talks[:2]
    ]
    for thread in threads:
        thread.start()
    for n in range(15):
        for number, talk in enumerate(talks):
            answers(house, talk, f"{number} {n}")
            before(house, talk, f"plain{number} {n}")
    for thread in threads:
        thread.join()
    done = [body for (body,) in rows(house, "SELECT body FROM done ORDER BY n")]
    assert len(done) == len(set(done)) == total
    for name in (f"{kind}{number} " for number in range(3) for kind in ("", "plain")):
        assert [one for one in done if one.startswith(name)] == [f"{name}{n}" for n in range(15)]


@both
def test_a_look_that_finds_nothing_writes_nothing(receiver: Receiver, house: Dsn) -> None:
    dialog = answered(house)
    before(house, dialog, "1")
    assert writes_nothing(house, lambda: once(receiver, house, conversation=dialog.handle))
    assert once(receiver, house) == ["1"]


def test_both_refuse_the_same_with_the_same_words(house: Dsn) -> None:
    dialog = answered(house)
    stranger = uuid4()
    cases: list[tuple[str, dict[str, Any]]] = [
        (SHOP, {"conversation": stranger}),
        (SHOP, {"group": stranger}),
        (WAREHOUSE, {"conversation": dialog.handle}),
        (WAREHOUSE, {"group": dialog.handle}),
        (SHOP, {"conversation": dialog.handle, "group": dialog.handle}),
    ]
    for subscription, which in cases:
        with pytest.raises((DialogNotFound, UsageError)) as refused:
            ByPython().deliver(house, subscription, lambda *_: None, **which)
        with pytest.raises(psycopg.Error) as by_sql:
            BySql().deliver(house, subscription, lambda *_: None, **which)
        said = str(by_sql.value.diag.message_primary)
        assert said.replace("conversation_group:", "group:") == str(refused.value)
        assert by_sql.value.diag.constraint_name == (
            "dialog_known" if stranger in which.values()
            else "argument_valid" if len(which) == 2 else "may_receive"
        )  # fmt: skip


# Only SQL


def test_a_subscription_that_listens_in_is_refused(house: Dsn) -> None:
    dialog = answered(house)
    change(
        house,
        "INSERT INTO saf.subscription (name, log, service) VALUES ('audit', 'inbox', 'shop');"
        "INSERT INTO saf.cursor (subscription_id, shard, done) SELECT s.subscription_id, c.shard,"
        " c.done FROM saf.cursor c JOIN saf.subscription o ON o.subscription_id = c.subscription_id"
        " AND o.name = 'shop', saf.subscription s WHERE s.name = 'audit'",
    )
    with (
        house.connect(role="test") as connection,
        pytest.raises(psycopg.Error, match="subscription 'audit' does not receive"),
    ):
        received(connection, "audit", conversation=dialog.handle)


def test_a_transaction_receives_one_message_of_each_dialog_of_a_group(house: Dsn) -> None:
    first = answered(house, "1", "3")
    answered(house, "2", related=first)
    with house.connect(role="test") as connection:
        found = received(connection, SHOP, 10, group=first.handle)
        assert sorted(message.text for message in found) == ["1", "2"]
        assert received(connection, SHOP, 10, group=first.handle) == []
    assert until_empty(BySql(), house, conversation=first.handle) == ["3"]


def test_a_chosen_message_is_set_aside_like_any_other(house: Dsn) -> None:
    dialog = answered(house)
    before(house, dialog, "1")
    answers(house, dialog, "a", "b")
    retry = Retry("not yet")
    assert once(BySql(), house, lambda *_: retry, conversation=dialog.handle) == ["a"]
    assert rows(house, LANES) == [("key", 1)]
    assert until_empty(BySql(), house, conversation=dialog.handle) == ["a", "b"]
    assert until_empty(BySql(), house) == ["1"]


def test_a_count_that_is_rolled_back_is_not_made_against_another_message(house: Dsn) -> None:
    dialog = answered(house)
    before(house, dialog, "first", "second")
    answers(house, dialog, "a")
    assert fails(BySql(), house, conversation=dialog.handle) == (["a"], 1)
    for _ in range(3):
        assert once(BySql(), house, conversation=dialog.handle) == []  # finds the trace
        with house.connect(role="test") as connection:
            # counts; in this transaction, nothing is handed out
            assert received(connection, SHOP, conversation=dialog.handle) == []
            assert received(connection, SHOP, conversation=dialog.handle) == []
            assert received(connection, SHOP) == []
            connection.rollback()
    assert rows(house, "SELECT FROM saf.parked") == []
    for _ in range(2):
        assert once(BySql(), house, conversation=dialog.handle) == []
    with house.connect(role="test") as connection:
        (alone,) = received(connection, SHOP, conversation=dialog.handle)
        assert (alone.text, alone.attempt) == ("a", 2)
    assert until_empty(BySql(), house) == ["first", "second"]


def test_a_failed_chosen_delivery_is_not_counted_against_the_first_of_the_shard(
    house: Dsn,
) -> None:
    dialog = answered(house)
    before(house, dialog, "first", "second")
    answers(house, dialog, "bad")
    for _ in range(20):
        change(
            house, "UPDATE saf.backoff SET next_attempt_at = now() WHERE next_attempt_at > now()"
        )
        fails(BySql(), house, conversation=dialog.handle, max_attempts=4)
        assert rows(house, "SELECT FROM saf.parked WHERE conversation_id IS NULL") == []
        if rows(house, DEAD):
            break
    assert rows(house, DEAD) == [("bad", "failed")]


def test_old_callers_give_three_arguments(house: Dsn) -> None:
    dialog = answered(house)
    before(house, dialog, "1")
    call = "SELECT convert_from(body, 'UTF8') FROM saf.receive('shop', 1, 5)"
    assert rows(house, call) == [("1",)]
    kinds = "SELECT pronargs, pronargdefaults FROM pg_proc WHERE oid = 'saf.receive'::regproc"
    assert rows(house, kinds) == [(5, 4)]


def test_a_snapshot_lists_transactions_by_number(app: Dsn) -> None:
    """As text, 1000 would come before 998, and PostgreSQL refuses such a snapshot."""
    query = "SELECT saf.without_own('998:1001:998,999', '1000')::text"
    assert rows(app, query) == [("998:1001:998,999,1000",)]
    assert rows(app, "SELECT saf.without_own('998:1001:998', NULL)::text") == [("998:1001:998",)]


@every_postgresql
def test_who_could_receive_before_a_migration_can_afterwards(house: Dsn) -> None:
    """Up and down: later revisions leave the functions to the roles that may call them."""
    dialog = answered(house)
    role = f"receiver_{house.database}"
    with connect(house) as connection:
        connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(role)))
    try:
        with connect(house) as connection:
            grant(connection, role, [Kind.RECEIVER, Kind.DIALOG])
        before(house, dialog, "1", "2")
        answers(house, dialog, "a")
        engine = house.engine(role="migrate", poolclass=NullPool)
        with engine.begin() as migrating:
            downgrade(migrating, "0046")
        assert as_role(house, role, "saf.receive('shop')") == ["1"]
        with engine.begin() as migrating:
            upgrade(migrating, HEAD)
        assert as_role(house, role, f"saf.receive('shop', 1, 5, '{dialog.handle}')") == ["a"]
        assert as_role(house, role, "saf.receive('shop')") == ["2"]
    finally:
        with connect(house) as connection:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def as_role(dsn: Dsn, role: str, call: str) -> list[str]:
    """The bodies that a role receives."""
    with connect(dsn) as connection:
        connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
        found = fetch(connection, f"SELECT convert_from(body, 'UTF8') FROM {call}")
    return [body for (body,) in found]
