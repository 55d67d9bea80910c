"""Groups of dialogs, monologs, and what is remembered of conversations."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

import saf
from saf.broker.services import create_service, create_subscription
from saf.database import Dsn, fetch
from saf.dialogs.conversations import clean_up
from saf.errors import DialogEnded, DialogNotFound, UsageError
from saf.log.shards import shard_of
from saf.operating.maintenance import purge_broker
from saf.testing.clock import let_time_pass
from tests.dialogs import (
    END,
    SHOP,
    WAREHOUSE,
    begin,
    end,
    forward,
    prepare,
    put,
    receive,
    said,
    say,
    states,
)
from tests.pipeline import connect


@pytest.fixture(autouse=True)
def _ends(app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)


def replied(app: Dsn, mom: Dsn) -> None:
    """The target answers all that it gets."""

    def reply(connection: object, message: saf.Received) -> None:
        assert message.dialog is not None
        message.dialog.send(connection, "reply")  # type: ignore[arg-type] # psycopg's

    forward(app, mom)
    receive(mom, WAREHOUSE, reply)
    forward(app, mom)


def in_another_shard(app: Dsn, *others: saf.Dialog, **options: saf.Dialog) -> saf.Dialog:
    taken = {shard_of(str(other.conversation_id), 64) for other in others}
    while True:
        dialog = begin(app, **options)
        if shard_of(str(dialog.conversation_id), 64) not in taken:
            say(app, dialog, "1")
            return dialog


def test_related_dialogs_are_in_one_receivers_hand_at_a_time_and_others_are_free(
    app: Dsn, mom: Dsn
) -> None:
    first = begin(app, "1")
    second = in_another_shard(app, first, related=first)
    in_another_shard(app, first, second)
    replied(app, mom)
    hands: list[list[saf.Received]] = []
    order: list[str] = []

    def other() -> None:
        with saf.receive(app, SHOP, max_messages=1) as delivery:
            order.append("second")
            hands.append(list(delivery))

    with connect(app) as connection:
        groups = dict(fetch(connection, "SELECT handle, group_id FROM saf.conversation"))
    with saf.receive(app, SHOP, max_messages=1) as one:
        threads = [threading.Thread(target=other) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        ((mine,), free) = list(one), list(hands)
        order.append("first")
    for thread in threads:
        thread.join()
    received = [mine, *(message for hand in hands for message in hand)]
    assert len(received) == 3
    group = {id(m): m.dialog and groups[m.dialog.handle] for m in received}
    related = [m for m in received if group[id(m)] == groups[first.handle]]
    assert len(related) == 2
    if mine in related:
        assert len(free) == 1, "the related one waited, and the other did not"
        assert order[:2] == ["second", "first"]


def test_a_group_has_a_place_for_the_applications_state(app: Dsn, mom: Dsn) -> None:
    first = begin(app, "1")
    second = begin(app, "1", related=first.handle)
    alone = begin(app, "1")
    with app.connect(role="test") as connection:
        assert saf.group_state(connection, first) is None
        saf.set_group_state(connection, first, {"open": 2})
    with app.connect(role="test") as connection:
        assert saf.group_state(connection, second) == {"open": 2}
        assert saf.group_state(connection, alone) is None
        saf.move_dialog(connection, alone, first)
        saf.move_dialog(connection, second, None)
        assert saf.group_state(connection, alone) == {"open": 2}
        assert saf.group_state(connection, second) is None
        saf.set_group_state(connection, alone, None)
        assert saf.group_state(connection, first) is None
    with mom.connect(role="test") as connection:
        with pytest.raises(DialogNotFound):
            saf.group_state(connection, first)
        with pytest.raises(DialogNotFound):
            saf.set_group_state(connection, first, 1)
        with pytest.raises(DialogNotFound):
            saf.move_dialog(connection, first, None)


def test_a_receiver_waits_for_who_holds_the_group_and_takes_what_was_moved_meanwhile(
    app: Dsn, mom: Dsn
) -> None:
    first, second = begin(app, "1"), begin(app, "1")
    replied(app, mom)
    done: list[str] = []
    with app.connect(role="test") as connection:
        saf.move_dialog(connection, second, first)
        thread = threading.Thread(target=lambda: done.extend(said(receive(app, SHOP))))
        thread.start()
        time.sleep(0.5)
        assert done == []
        connection.commit()
        thread.join()
    assert done == ["reply", "reply"]


# Monologs


def test_a_monolog_reaches_all_subscribers_in_order_and_a_late_one_from_where_it_says(
    app: Dsn, mom: Dsn
) -> None:
    with connect(mom) as connection:
        create_service(connection, "prices")
        create_subscription(connection, "screen", service="prices")
    with app.connect(role="test") as connection:
        monolog = saf.begin_monolog(connection, from_service="exchange", topic="prices")
        for price in ("1", "2"):
            monolog.send(connection, price)
    forward(app, mom)
    with connect(mom) as connection:
        create_subscription(connection, "late", service="prices", start="now")
        create_subscription(connection, "historian", service="prices")
    say(app, monolog, "3")
    end(app, monolog)
    assert states(app) == ["closed"]
    forward(app, mom)
    heard = {name: receive(mom, name) for name in ("prices", "screen", "late", "historian")}
    assert said(heard["late"]) == ["3", END]
    for name in ("prices", "screen", "historian"):
        assert said(heard[name]) == ["1", "2", "3", END]
        assert [one.sequence for one in heard[name]] == [1, 2, 3, 4]
        assert {one.conversation_id for one in heard[name]} == {monolog.conversation_id}
        assert {one.dialog for one in heard[name]} == {None}
    assert states(mom) == []


# Listing, cleaning up, forgetting


def test_conversations_are_listed_as_they_stand(app: Dsn, mom: Dsn) -> None:
    one, other = begin(app, "1", contract=None, lifetime=60), begin(app)
    forward(app, mom)
    put(mom, one, 3, "3")
    receive(mom, WAREHOUSE)
    with connect(app) as connection:
        found = saf.conversations(connection)
        assert [each.handle for each in found] == [one.handle, other.handle]
        assert [each.state for each in found] == ["conversing", "started_outbound"]
        assert [each.send_sequence for each in found] == [1, 0]
        assert saf.conversations(connection, states=["closed"]) == []
        assert saf.conversations(connection, service="nobody") == []
        (only,) = saf.conversations(connection, handle=one.handle)
        assert only.expires_at is not None
        with pytest.raises(UsageError, match="unknown state 'open', only started_outbound"):
            saf.conversations(connection, states=["open"])
    with connect(mom) as connection:
        (there,) = saf.conversations(connection, limit=5)
        assert (there.receive_sequence, there.ahead) == (1, 1)


def test_cleaning_up_closes_this_end_and_the_other_one_is_not_told(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app, "1")
    forward(app, mom)
    receive(mom, WAREHOUSE)
    with connect(mom) as connection:
        (there,) = saf.conversations(connection)
        clean_up(connection, there.handle)
        with pytest.raises(DialogNotFound):
            clean_up(connection, dialog.handle)
    say(app, dialog, "2")
    forward(app, mom)
    assert receive(mom, WAREHOUSE) == []
    assert receive(app, SHOP) == []
    assert (states(app), states(mom)) == (["conversing"], ["closed"])
    with app.connect(role="test") as connection:
        dialog.end(connection)
        with pytest.raises(DialogEnded):
            dialog.send(connection, "3")


def test_a_closed_conversation_is_remembered_as_long_as_messages_are_kept(app: Dsn) -> None:
    begin(app)
    end(app, begin(app))

    def purge() -> int:
        with connect(app) as connection:
            return purge_broker(
                connection, retention_seconds=3 * 86400, rotate_after_seconds=1e9
            ).conversations

    assert purge() == 0
    let_time_pass(app, timedelta(days=2))
    assert purge() == 0
    let_time_pass(app, timedelta(days=2))
    assert purge() == 1
    assert states(app) == ["started_outbound"]
    with connect(app) as connection:
        assert len(fetch(connection, "SELECT FROM saf.conversation_group")) == 1
