"""Receiving one conversation, or one group, whatever waits before it in the same shard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import saf
from saf import Policy
from saf.database import Dsn, fetch
from saf.errors import DialogNotFound, UsageError
from saf.receiving import chosen
from tests import dialogs
from tests.dialogs import END, SHOP, TIMER, WAREHOUSE, receive, said
from tests.pipeline import connect
from tests.receivers import writes_nothing
from tests.talks import answered, answers, before, house_of, numbers

every_postgresql = pytest.mark.every_postgresql
AT_ONCE = Policy(first_wait_seconds=0)


@pytest.fixture
def house(app: Dsn) -> Dsn:
    return house_of(app)


def chosen_of(dsn: Dsn, **which: Any) -> list[str]:
    return said(receive(dsn, SHOP, **which))


@every_postgresql
def test_a_conversation_is_received_whatever_waits_before_it(house: Dsn) -> None:
    dialog = answered(house)
    before(house, dialog, *numbers(0, 30))
    answers(house, dialog, "a", "b")
    before(house, dialog, *numbers(30, 50))
    answers(house, dialog, "c")
    assert chosen_of(house, conversation=dialog) == ["a", "b", "c"]
    assert chosen_of(house, conversation=dialog.handle) == []
    assert chosen_of(house, max_messages=7) == numbers(0, 50)


def test_another_conversation_is_left_for_others(house: Dsn) -> None:
    one, other = answered(house), answered(house)
    answers(house, one, "1")
    answers(house, other, "2")
    assert chosen_of(house, conversation=one) == ["1"]
    assert chosen_of(house) == ["2"]


@pytest.mark.parametrize("backlog", [40, 700])
@pytest.mark.parametrize("times", [1, 3])
def test_what_arrives_after_a_batch_was_opened_is_received_too(
    house: Dsn, backlog: int, times: int
) -> None:
    dialog = answered(house)
    for n in range(0, backlog, 20):  # a deep backlog is cut between transactions
        before(house, dialog, *numbers(n, n + 20))
    plain, mine = list[str](), list[str]()
    for turn in range(times):
        with saf.receive(house, SHOP, max_messages=7) as delivery:
            plain += said(list(delivery))
        answers(house, dialog, f"a{turn}", f"b{turn}")
        with saf.receive(house, SHOP, conversation=dialog) as delivery:
            mine += said(list(delivery))
    assert mine == [f"{letter}{turn}" for turn in range(times) for letter in "ab"]
    answers(house, dialog, "last")
    plain += chosen_of(house, max_messages=11)
    assert plain == [*numbers(0, backlog), "last"]


def test_a_shard_with_too_many_messages_is_not_extended(
    house: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "ALL", chosen.ALL.replace(str(chosen.MOST), "30"))
    monkeypatch.setattr(chosen, "MOST", 30)
    dialog = answered(house)
    before(house, dialog, *numbers(0, 50))
    with saf.receive(house, SHOP, max_messages=7) as delivery:
        assert said(list(delivery)) == numbers(0, 7)
    answers(house, dialog, "a")
    assert chosen_of(house, conversation=dialog) == []
    assert chosen_of(house) == [*numbers(7, 50), "a"]


def test_a_group_is_received_and_no_other_dialog(house: Dsn) -> None:
    first = answered(house, "1")
    second = answered(house, "2", related=first)
    other = answered(house, "3")
    assert sorted(chosen_of(house, group=second)) == ["1", "2"]
    assert chosen_of(house, conversation=other) == ["3"]


def test_a_timer_and_an_end_are_messages_of_the_conversation(house: Dsn) -> None:
    dialog = answered(house)
    with connect(house) as connection, connection.transaction():
        dialog.start_timer(connection, 0.2)
    with saf.receive(house, SHOP, conversation=dialog, wait_seconds=20) as delivery:
        assert said(list(delivery)) == [TIMER]


def test_a_message_that_is_ahead_waits_for_the_missing_one(house: Dsn) -> None:
    dialog = answered(house)
    for number, body in ((2, "b"), (1, "a")):
        dialogs.put(
            house, dialog, number, body, to_service=SHOP, from_service=WAREHOUSE,
            from_initiator=False,
        )  # fmt: skip
        assert chosen_of(house, conversation=dialog) == ([] if number == 2 else ["a", "b"])


# Failures


def test_a_delivery_that_fails_is_repeated_and_then_a_dead_letter(house: Dsn) -> None:
    dialog = answered(house)
    before(house, dialog, "1", "2")
    answers(house, dialog, "bad", "next")
    attempts = [
        _fail(house, conversation=dialog, policy=AT_ONCE) for _ in range(AT_ONCE.max_attempts)
    ]
    alone = [(["bad"], n) for n in range(2, 6)]
    assert attempts[0] == (["bad", "next"], 1)
    assert attempts[1:] == alone
    (error,) = receive(house, SHOP, conversation=dialog, policy=AT_ONCE)
    assert error.json()["code"] == -2
    assert chosen_of(house) == ["1", "2"]
    with connect(house) as connection:
        assert fetch(connection, "SELECT body FROM saf.dead_letter") == [(b"bad",)]


def test_one_failure_does_not_keep_others_from_their_messages(house: Dsn) -> None:
    dialog = answered(house)
    before(house, dialog, *numbers(0, 5))
    answers(house, dialog, "a")
    assert _fail(house, max_messages=2) == (["0", "1"], 1)
    assert chosen_of(house, conversation=dialog, policy=AT_ONCE) == ["a"]
    assert chosen_of(house, policy=AT_ONCE) == numbers(0, 5)


def _fail(dsn: Dsn, **options: Any) -> tuple[list[str], int]:
    """Let a delivery fail; return its messages, and the attempt of the first one."""
    found = None
    with suppress(ZeroDivisionError), saf.receive(dsn, SHOP, **options) as delivery:
        found = said(list(delivery)), delivery[0].attempt
        raise ZeroDivisionError
    assert found is not None
    return found


def test_a_conversation_whose_lane_waits_is_not_overtaken(house: Dsn) -> None:
    dialog = answered(house, "a")
    with saf.receive(house, SHOP, policy=Policy(first_wait_seconds=3600)) as delivery:
        delivery.park(delivery[0], "later")
    answers(house, dialog, "b")
    assert chosen_of(house, conversation=dialog) == []
    with connect(house) as connection:
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    assert chosen_of(house, conversation=dialog) == ["a", "b"]


def test_receivers_of_everything_and_of_one_conversation_share_the_work(house: Dsn) -> None:
    talks = [answered(house) for _ in range(4)]
    with connect(house) as connection:
        connection.execute("CREATE TABLE done (n serial, body text)")

    def note(connection: psycopg.Connection[Any], message: saf.Received) -> None:
        connection.execute("INSERT INTO done (body) VALUES (%s)", [message.text()])

    def others() -> None:
        receive(house, SHOP, note, max_messages=3, wait_seconds=1)

    def mine(talk: saf.Dialog) -> None:
        receive(house, SHOP, note, max_messages=2, conversation=talk, wait_seconds=1)

    threads = [threading.Thread(target=others) for _ in range(2)]
    threads += [threading.Thread(target=mine, args=(talk,)) for talk in talks[:2]]
    for thread in threads:
        thread.start()
    for n in range(20):
        for number, talk in enumerate(talks):
            answers(house, talk, f"{number} {n}")
            before(house, talk, f"plain{number} {n}")
    for thread in threads:
        thread.join()
    receive(house, SHOP, note, policy=AT_ONCE)
    with connect(house) as connection:
        done = [body for (body,) in fetch(connection, "SELECT body FROM done ORDER BY n")]
    assert len(done) == len(set(done)) == 160
    for number in range(4):
        for name in (f"{number} ", f"plain{number} "):
            assert [one for one in done if one.startswith(name)] == [
                f"{name}{n}" for n in range(20)
            ]


# Waiting, and what is refused


@pytest.fixture
def late(house: Dsn) -> Iterator[saf.Dialog]:
    """A dialog that is answered a moment later, behind another message."""
    dialog = answered(house)

    def answer() -> None:
        before(house, dialog, "plain")
        answers(house, dialog, "late")

    timer = threading.Timer(0.5, answer)
    timer.start()
    yield dialog
    timer.join()


def test_a_receiver_waits_for_the_conversation(house: Dsn, late: saf.Dialog) -> None:
    with saf.receive(house, SHOP, conversation=late, wait_seconds=30) as delivery:
        assert said(list(delivery)) == ["late"]
    assert chosen_of(house) == ["plain"]


def test_a_task_waits_for_the_conversation(house: Dsn, late: saf.Dialog) -> None:
    async def wait() -> list[str]:
        async with saf.areceive(house, SHOP, conversation=late, wait_seconds=30) as delivery:
            return said(list(delivery))

    assert asyncio.run(wait()) == ["late"]


def test_a_look_that_finds_nothing_writes_nothing(house: Dsn) -> None:
    dialog = answered(house)
    before(house, dialog, "1")

    def look() -> None:
        assert chosen_of(house, conversation=dialog, wait_seconds=0.3) == []

    assert writes_nothing(house, look)


def test_what_makes_no_sense_is_refused(house: Dsn) -> None:
    dialog = answered(house)
    for given, error, match in (
        ({"conversation": uuid4()}, DialogNotFound, "no dialog|conversation"),
        ({"conversation": dialog, "group": dialog}, UsageError, "one of them"),
        ({"conversation": "x"}, UsageError, "a dialog or its handle"),
    ):
        with pytest.raises(error, match=match), saf.receive(house, SHOP, **given):
            pass
    wrong = pytest.raises(UsageError, match="receive from 'shop'")
    with wrong, saf.receive(house, WAREHOUSE, conversation=dialog):
        pass


def test_an_end_comes_in_order(house: Dsn) -> None:
    dialog = answered(house)
    answers(house, dialog, "a")
    with house.connect(role="test") as connection:
        find = "SELECT handle FROM saf.conversation WHERE NOT is_initiator"
        ((handle,),) = connection.execute(find).fetchall()
        saf.open_dialog(connection, handle).end(connection)
    assert chosen_of(house, conversation=dialog) == ["a", END]
