"""Taken ahead: chosen messages of an open batch are complete before those in front of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any

import pytest

import saf
from saf.broker import services
from saf.database import Dsn, fetch
from saf.receiving import claim
from saf.receiving.ahead import Chosen, take
from saf.receiving.delivery import Delivery
from saf.receiving.hand import Reader
from saf.receiving.inbox import inbox_status
from saf.receiving.link import Link, connected
from saf.receiving.receive import Receiver
from saf.receiving.retries import Policy
from tests.pipeline import connect
from tests.receivers import (
    SUBSCRIPTION,
    dead,
    effect,
    effects,
    keys_of_one_shard,
    prepare,
    put,
    waiting,
)


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    """Six messages of two keys in one shard, in turn."""
    prepare(mom)
    first, second = keys_of_one_shard(2)
    for number in (1, 3, 5):
        put(mom, str(number), key=first)
        put(mom, str(number + 1), key=second)
    return mom


def reader(mom: Dsn) -> Reader:
    with connect(mom) as connection:
        found = services.subscription(connection, SUBSCRIPTION)
    return Reader(subscription_id=found.subscription_id, name=SUBSCRIPTION, service=SUBSCRIPTION)


def chosen(mom: Dsn, *bodies: str) -> list[Chosen]:
    with connect(mom) as connection:
        rows = fetch(
            connection,
            "SELECT shard, txid::text::bigint, id FROM saf.inbox "
            "WHERE convert_from(body, 'UTF8') = ANY (%(bodies)s) ORDER BY id",
            {"bodies": list(bodies)},
        )
    return [Chosen(*row) for row in rows]


@contextmanager
def ahead(mom: Dsn, places: list[Chosen]) -> Iterator[Delivery[Any]]:
    """A delivery of chosen messages, as a receiver makes one."""
    with connected(mom) as link, _ahead(mom, link, places) as delivery:
        yield delivery


@contextmanager
def _ahead(mom: Dsn, link: Link, places: list[Chosen]) -> Iterator[Delivery[Any]]:
    with link.transaction():
        hand = claim.claim_shard(link.raw, reader(mom), places[0].shard, 1)
        assert hand is not None
        take(link.raw, hand, places)
        delivery: Delivery[Any] = Delivery(link.connection, link.raw, hand, Policy())
        yield delivery
        delivery.settle()


def received(mom: Dsn) -> list[str]:
    with saf.receive(mom, SUBSCRIPTION) as delivery:
        for message in delivery:
            effect(delivery.connection, message)
        return [message.text() for message in delivery]


def test_chosen_messages_are_received_once_and_the_others_in_their_order(inbox: Dsn) -> None:
    with ahead(inbox, chosen(inbox, "2", "6", "4")) as delivery:
        assert [message.text() for message in delivery] == ["2", "4", "6"]
    with connect(inbox) as connection:
        (status,) = inbox_status(connection)
    assert status.unread == 3
    assert received(inbox) == ["1", "3", "5"]
    assert received(inbox) == []
    with connect(inbox) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.cursor WHERE open IS NOT NULL") == [(0,)]


def test_a_choice_that_is_older_than_the_locks_hands_nothing_out_again(inbox: Dsn) -> None:
    places = chosen(inbox, "1", "2", "4")
    with saf.receive(inbox, SUBSCRIPTION, max_messages=1) as delivery:
        assert [message.text() for message in delivery] == ["1"]
    with ahead(inbox, places[1:2]) as delivery:
        assert [message.text() for message in delivery] == ["2"]
    with ahead(inbox, places) as delivery:
        assert [message.text() for message in delivery] == ["4"]
    assert received(inbox) == ["3", "5", "6"]
    with ahead(inbox, places) as delivery:
        assert not delivery


def test_a_message_of_the_next_batch_is_not_taken_out_of_this_one(inbox: Dsn) -> None:
    with saf.receive(inbox, SUBSCRIPTION, max_messages=1):
        pass
    put(inbox, "7", key=keys_of_one_shard(1)[0])
    with ahead(inbox, chosen(inbox, "7")) as delivery:
        assert not delivery
    assert received(inbox) == ["2", "3", "4", "5", "6"]
    assert received(inbox) == ["7"]


def test_a_delivery_ahead_that_is_rolled_back_completes_nothing(inbox: Dsn) -> None:
    with suppress(ZeroDivisionError), ahead(inbox, chosen(inbox, "4", "2")) as delivery:
        for message in delivery:
            effect(delivery.connection, message)
        assert 1 / 0
    worker = saf.Worker(inbox, SUBSCRIPTION, policy=Policy(first_wait_seconds=0))
    worker.handler()(lambda message, connection: effect(connection, message))
    worker.drain()
    assert sorted(effects(inbox)) == ["1", "2", "3", "4", "5", "6"]
    assert [body for body in effects(inbox) if int(body) % 2] == ["1", "3", "5"]
    assert [body for body in effects(inbox) if not int(body) % 2] == ["2", "4", "6"]


def test_a_receiver_that_has_prefetched_messages_does_not_hand_out_those_taken_since(
    inbox: Dsn,
) -> None:
    """The position may stay where it was, so another column has to show it."""
    with connected(inbox) as link:
        receiver = Receiver(link, SUBSCRIPTION, Policy(), 1)
        seen = []
        while True:
            with receiver.delivery() as delivery:
                seen += [message.text() for message in delivery]
            if len(seen) == 2:
                assert receiver._prefetch.is_ready or receiver._prefetch.goes_on
                with ahead(inbox, chosen(inbox, "4")) as taken:
                    assert [message.text() for message in taken] == ["4"]
                seen.append("-")
            if not delivery:
                break
    assert sorted(seen) == ["-", "1", "2", "3", "5", "6"]


def test_messages_that_a_stop_leaves_are_put_back(inbox: Dsn) -> None:
    stopping = Event()
    with ahead(inbox, chosen(inbox, "2", "4", "6")) as delivery:
        delivery.until(stopping)
        for message in delivery:
            assert message.text() == "2"
            stopping.set()
    assert waiting(inbox) == []
    assert received(inbox) == ["1", "3", "4", "5", "6"]


def test_a_message_that_fails_ahead_waits_in_the_lane_of_its_key(inbox: Dsn) -> None:
    _, second = keys_of_one_shard(2)
    with ahead(inbox, chosen(inbox, "2", "4")) as delivery:
        for message in delivery:
            delivery.park(message, "not yet")
    assert waiting(inbox) == [second]
    assert received(inbox) == ["1", "3", "5"]
    worker = saf.Worker(inbox, SUBSCRIPTION)
    worker.handler()(lambda message, connection: effect(connection, message))
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    worker.drain()
    assert effects(inbox) == ["1", "3", "5", "2", "4", "6"]


def test_expired_and_delayed_messages_keep_their_fates(mom: Dsn) -> None:
    prepare(mom)
    key = keys_of_one_shard(1)[0]
    put(mom, "1", key=key)
    put(mom, "expired", key=key, expires_at="2020-01-01 00:00:00+00")
    put(mom, "late", key=key, deliver_at="9000-01-01 00:00:00+00")
    with ahead(mom, chosen(mom, "expired", "late")) as delivery:
        assert not delivery
    assert dead(mom) == [("expired", "expired")]
    with connect(mom) as connection:
        assert fetch(connection, "SELECT body FROM saf.parked") == [(b"late",)]
    assert received(mom) == ["1"]
