"""What an endpoint knows: locked while in a hand, complete before it counts, kept for a while."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import saf
from saf.database import Dsn, fetch
from saf.dialogs.conversations import forget
from saf.dialogs.statements import Code
from saf.testing.clock import let_time_pass
from tests.dialogs import (
    END,
    ERROR,
    WAREHOUSE,
    begin,
    end,
    forward,
    prepare,
    put,
    receive,
    said,
    states,
)
from tests.pipeline import connect
from tests.receivers import let_keys_be_due
from tests.waits import blocked, until


@pytest.fixture(autouse=True)
def _ends(app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)


def is_locked(dsn: Dsn, table: str) -> bool:
    """Whether somebody else has its only row."""
    with connect(dsn) as connection:
        rows = fetch(connection, f"SELECT FROM saf.{table}")
        free = fetch(connection, f"SELECT FROM saf.{table} FOR NO KEY UPDATE SKIP LOCKED")
    assert len(rows) == 1
    return not free


# In a hand


def test_an_endpoint_and_its_group_are_in_one_hand_until_its_delivery_ends(
    app: Dsn, mom: Dsn
) -> None:
    """Who replies on it from elsewhere waits, and finds what the messages have led to."""
    begin(app, "1")
    forward(app, mom)
    receive(mom, WAREHOUSE)
    with connect(mom) as connection:
        (there,) = saf.conversations(connection)
        dialog = saf.open_dialog(connection, there.handle)
    put(mom, begin_again(app, there), 2, "2")
    with saf.receive(mom, WAREHOUSE) as delivery:
        assert said(list(delivery)) == ["2"]
        assert is_locked(mom, "conversation")
        assert is_locked(mom, "conversation_group")
        with mom.connect(role="test") as other:
            other.execute("SET lock_timeout = '100ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                dialog.send(other, "a reply")
    assert not is_locked(mom, "conversation")


def test_a_receiver_waits_for_who_is_ending_the_dialog_and_then_drops_what_came(
    app: Dsn, mom: Dsn
) -> None:
    begin(app, "1")
    forward(app, mom)
    (first,) = receive(mom, WAREHOUSE)
    assert first.dialog is not None
    put(mom, begin_again(app, first), 2, "2")
    with (
        ThreadPoolExecutor() as pool,
        connect(mom) as watcher,
        mom.connect(role="test") as ending,
    ):
        first.dialog.end(ending)
        received = pool.submit(receive, mom, WAREHOUSE)
        until(lambda: blocked(watcher))
        assert not received.done()
        ending.commit()
        assert received.result(60) == []


def begin_again(app: Dsn, there: Any) -> saf.Dialog:
    """The initiator's end of a conversation."""
    with connect(app) as connection:
        ((handle,),) = fetch(
            connection,
            "SELECT handle FROM saf.conversation WHERE conversation_id = %(id)s",
            {"id": there.conversation_id},
        )
        return saf.open_dialog(connection, handle)


def test_the_state_of_a_group_is_one_transactions_at_a_time(app: Dsn) -> None:
    dialog = begin(app)
    with app.connect(role="test") as one, app.connect(role="test") as two:
        saf.group_state(one, dialog)
        two.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            saf.group_state(two, dialog)


def test_a_dialog_leaves_a_group_only_when_nobody_has_it_in_hand(app: Dsn) -> None:
    first, second = begin(app), begin(app)
    for held in (first, second):
        with app.connect(role="test") as one, app.connect(role="test") as two:
            saf.group_state(one, held)
            two.execute("SET lock_timeout = '100ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                saf.move_dialog(two, first, second)


# Complete


def test_an_end_waits_for_what_was_said_before_it(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app)
    put(mom, dialog, 1, "1")
    put(mom, dialog, 3, "", message_type=END)
    assert said(receive(mom, WAREHOUSE)) == ["1"]
    assert states(mom) == ["conversing"]
    put(mom, dialog, 2, "2")
    assert said(receive(mom, WAREHOUSE)) == ["2", END]
    assert states(mom) == ["disconnected_inbound"]


@pytest.mark.parametrize(
    ("second", "length"),
    [
        pytest.param(False, 4, id="a part less, of which the others are as long as the whole"),
        pytest.param(True, 7, id="all parts, which are shorter than the whole"),
    ],
)
def test_a_body_whose_parts_do_not_come_to_what_the_last_one_says_is_an_error(
    app: Dsn, mom: Dsn, *, second: bool, length: int
) -> None:
    dialog = begin(app)
    fragment = {"headers": '{"saf-dialog": {}, "saf-fragment": 1}'}
    put(mom, dialog, 1, "01", **fragment)
    put(mom, dialog, 2, "02", **(fragment if second else {}))
    whole = f'{{"saf-dialog": {{}}, "saf-whole": {{"fragments": 3, "bytes": {length}}}}}'
    put(mom, dialog, 3, "03", headers=whole)
    *_, error = receive(mom, WAREHOUSE)
    assert error.json() == {
        "code": Code.VIOLATION,
        "text": "message 3: fragments are missing",
    }


# Ended here


def test_an_end_that_was_ended_here_stays_closed_though_its_last_message_is_tried_again(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1")
    end(app, dialog)
    forward(app, mom)
    with saf.receive(mom, WAREHOUSE) as delivery:
        _, last = delivery
        assert last.dialog is not None
        last.dialog.end(delivery.connection)
        delivery.park(last, "not now")
    assert states(mom) == ["closed"]
    let_keys_be_due(mom)
    assert receive(mom, WAREHOUSE) == []
    assert states(mom) == ["closed"]


# Kept


def test_a_closed_conversation_is_remembered_for_a_day_whatever_the_retention(app: Dsn) -> None:
    """A repeat of its first message would begin it anew."""
    end(app, begin(app))
    with connect(app) as connection:
        assert forget(connection, 0) == 0
        let_time_pass(app, timedelta(hours=25))
        assert forget(connection, 0) == 1


def test_a_conversation_that_is_open_is_not_forgotten_and_neither_is_a_group_in_use(
    app: Dsn,
) -> None:
    first = begin(app)
    second = begin(app, related=first)
    alone = begin(app)
    for dialog in (second, alone):
        end(app, dialog)
    let_time_pass(app, timedelta(days=3))
    with connect(app) as connection:
        assert forget(connection, 0) == 2
        assert [one.handle for one in saf.conversations(connection)] == [first.handle]
        groups = "SELECT group_id = (SELECT group_id FROM saf.conversation) \
            FROM saf.conversation_group"
        assert fetch(connection, groups) == [(True,)]


def test_what_waited_for_a_message_that_is_missing_goes_when_the_dialog_is_over(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1", contract=None, lifetime=60)
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == ["1"]
    put(mom, dialog, 3, "3")
    assert receive(mom, WAREHOUSE) == []
    let_time_pass(mom, timedelta(minutes=2))
    assert said(receive(mom, WAREHOUSE)) == [ERROR]
    with connect(mom) as connection:
        assert fetch(connection, "SELECT FROM saf.parked") == []
        assert fetch(connection, "SELECT FROM saf.backoff") == []
