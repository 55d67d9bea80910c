"""Dispatch: what is read into memory, in which order, and what stays in the database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar
from uuid import uuid4

import psycopg
import pytest

import saf
from saf.broker.services import create_service, create_subscription, subscription
from saf.database import Dsn, fetch
from saf.log.shards import Member
from saf.receiving.dispatch import marking, source
from saf.receiving.dispatch.dispatcher import Dispatcher, run
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.dispatch.source import ReadAhead
from saf.receiving.dispatch.window import Window
from saf.receiving.hand import Reader
from saf.receiving.retries import Waiting
from tests.endpoints import Partner, dispatch, inbox, let_lanes_be_due, partner, settings
from tests.pipeline import connect
from tests.receivers import SUBSCRIPTION, put, store, waiting

__all__ = ["inbox", "partner"]

T = TypeVar("T")

LARGE, PART = "x" * 1500, "x" * 300
"""A body that fills memory where it is `small`, and one of which several fit."""


class Reading:
    """A dispatcher without its loop: it reads ahead, and an endpoint accepts what it sends."""

    def __init__(self, connection: psycopg.Connection[Any], **more: Any) -> None:
        found = subscription(connection, SUBSCRIPTION)
        member = Member(subscription_id=found.subscription_id, lease_seconds=30)
        member.join(connection)
        member.balance(connection)
        self.connection = connection
        self.reader = Reader(
            subscription_id=found.subscription_id,
            name=found.name,
            service=found.service,
            owner=member.member_id,
        )
        self.window = Window()
        self.window.own(source.owned(connection, self.reader))
        endpoint = Endpoint(url="http://127.0.0.1:1", **more)
        self.ahead = ReadAhead(self.window, self.reader, endpoint, "partner", self._ask)

    async def _ask(self, what: Callable[[psycopg.Connection[Any]], T]) -> T:
        return what(self.connection)

    def read(self) -> None:
        """As in a turn of a session."""
        self.ahead.look_again()
        if self.ahead.hungry:
            asyncio.run(self.ahead.fill())

    def mark(self) -> bool:
        marks = self.window.marks()
        if marks is None:
            return False
        marking.mark(self.connection, self.reader, marks)
        self.window.written(marks)
        return True

    def fail(self) -> None:
        """All that is there waits for another attempt, which is due."""
        self.read()
        while (walk := self.window.next()) is not None:
            one = walk.message
            waiting = Waiting(lane=one.lane, shard=one.shard, attempts=1, error="no", wait=0.0)
            self.window.wait(walk, waiting)
        self.mark()

    def send(self) -> list[str]:
        """Send all that is there; return the message ids, in order."""
        sent = []
        while True:
            self.read()
            while (walk := self.window.next()) is not None:
                sent.append(str(walk.message.message_id))
                self.window.done(walk)
            if not self.mark():
                return sent


@pytest.fixture
def reading(inbox: Dsn) -> Iterator[Reading]:
    with connect(inbox) as connection:
        yield Reading(connection)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From this call on, memory holds 1000 bytes."""
    return lambda: monkeypatch.setattr(source, "MAX_BYTES", 1000)


def new(inbox: Dsn, body: str, **columns: Any) -> str:
    """One more message; its id."""
    id_ = str(uuid4())
    put(inbox, body, message_id=id_, **columns)
    return id_


def test_nothing_is_read_and_nothing_lost_while_memory_is_full(
    inbox: Dsn, reading: Reading, small: Callable[[], None]
) -> None:
    small()
    new(inbox, LARGE, key="a")
    reading.read()
    large = reading.window.next()
    assert large is not None
    other = new(inbox, "2", key="b")
    reading.read()
    reading.mark()
    reading.window.done(large)
    assert reading.send() == [other]


def test_what_is_in_the_log_is_not_lost_when_due_messages_fill_memory(
    inbox: Dsn, reading: Reading, small: Callable[[], None]
) -> None:
    large = new(inbox, LARGE, key="a")
    reading.fail()
    other = new(inbox, "2", key="b")
    small()
    assert reading.send() == [large, other]


def test_due_messages_fill_memory_only_up_to_its_limit(
    inbox: Dsn, reading: Reading, small: Callable[[], None]
) -> None:
    for key in range(10):
        new(inbox, PART, key=f"k{key}")
    reading.fail()
    small()
    reading.read()
    assert 0 < reading.window.bytes <= 1000
    assert len(reading.send()) == 10


def test_delayed_messages_that_do_not_fit_into_memory_together_are_sent_in_the_order_of_their_times(
    inbox: Dsn, reading: Reading, small: Callable[[], None]
) -> None:
    third, first, second = (
        new(inbox, PART, key="a", deliver_at=f"2999-01-0{day}") for day in (3, 1, 2)
    )
    assert reading.send() == []
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.parked SET deliver_at = deliver_at - interval '990 years'")
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    small()
    assert reading.send() == [first, second, third]


@pytest.mark.parametrize(("max_in_flight", "messages"), [(1, 320), (20, 400)])
def test_memory_has_room_for_20_messages_a_request_and_for_at_least_320(
    inbox: Dsn, max_in_flight: int, messages: int
) -> None:
    store(inbox, keys=40, each=25)
    with connect(inbox) as connection:
        reading = Reading(connection, max_in_flight=max_in_flight)
        for _ in range(2):  # the second time, memory is full
            reading.read()
            assert reading.window.held == messages
        assert len(reading.send()) == 1000
        # as many as are read of a shard at a time: its batch has an end nevertheless
        assert fetch(connection, "SELECT FROM saf.cursor WHERE open IS NOT NULL") == []


def test_a_read_that_ends_within_a_shard_leaves_nothing_out(inbox: Dsn) -> None:
    store(inbox, keys=60, each=7)
    with connect(inbox) as connection:
        rows = fetch(connection, "SELECT message_id::text, key, body FROM saf.inbox")
        sent = Reading(connection, max_in_flight=1).send()
    numbers = {id_: (key, int(body)) for id_, key, body in rows}
    by_key: dict[str, list[int]] = {}
    for key, number in map(numbers.__getitem__, sent):
        by_key.setdefault(key, []).append(number)
    assert by_key == {f"k{key}": [1, 2, 3, 4, 5, 6, 7] for key in range(1, 61)}


def test_the_key_that_has_been_due_for_longest_is_read_first(inbox: Dsn, reading: Reading) -> None:
    for key in "abc":
        new(inbox, "1", key=key)
    reading.fail()
    with connect(inbox) as connection:
        for key, seconds in (("a", 2), ("b", 3), ("c", 1)):
            connection.execute(
                "UPDATE saf.backoff SET next_attempt_at = now() - make_interval(secs => %s) "
                "WHERE subject = %s",
                [seconds, key],
            )
    (due,) = source.due_lanes(
        reading.connection,
        reading.reader,
        list(reading.window.shards),
        [],
        awaited=False,
        limit=1,
        max_bytes=1000,
    )
    assert due.name == "b"


def test_a_run_without_loop_sends_all_that_waits_behind_a_message_in_order(
    inbox: Dsn, partner: Partner
) -> None:
    partner.always(500)
    put(inbox, *map(str, range(1, 46)), key="a")
    dispatch(inbox, partner)
    partner.answer = None
    let_lanes_be_due(inbox)
    assert dispatch(inbox, partner).exit_code == 0
    assert partner.by_key() == {"a": list(range(1, 46))}


def leave_to_handlers(inbox: Dsn, name: str) -> None:
    """A worker that has no handler for what there is."""
    worker = saf.Worker(inbox, name)

    @worker.handler("OrderPaid")
    def handle(message: saf.Received, _: object) -> None:
        raise AssertionError(message)

    with suppress(saf.SafError):
        worker.drain()


def test_a_subscription_that_listens_in_sends_what_a_worker_has_left_of_a_dialog(
    inbox: Dsn, partner: Partner
) -> None:
    with connect(inbox) as connection:
        create_subscription(connection, "audit", service=SUBSCRIPTION)
    put(inbox, "1", key="a", conversation_id=uuid4(), from_initiator=True, sequence=0)
    leave_to_handlers(inbox, "audit")
    assert waiting(inbox) == ["a"]
    endpoint = settings(partner).model_copy(update={"subscription": "audit"})
    run([Dispatcher("partner", endpoint, inbox)], drain=True)
    assert partner.by_key() == {"a": [1]}
    assert waiting(inbox) == []


def test_a_key_that_waits_for_a_handler_is_sent_whatever_waits_for_another_subscription(
    inbox: Dsn, partner: Partner
) -> None:
    with connect(inbox) as connection:
        create_subscription(connection, "all", service=None)
        create_service(connection, "other")
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body, conversation_id, from_initiator, "
            "sequence) VALUES ('other', 'a', '1', gen_random_uuid(), true, 0)"
        )
    leave_to_handlers(inbox, "all")
    put(inbox, "2", key="a")
    leave_to_handlers(inbox, SUBSCRIPTION)
    assert waiting(inbox) == ["a", "a"]
    assert dispatch(inbox, partner).exit_code == 0
    assert partner.by_key() == {"a": [2]}
