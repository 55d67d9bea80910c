"""Dispatch: what is bounded, and by which clock."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any
from uuid import uuid4

import pytest

from saf.database import Dsn
from saf.received import READ, Received
from saf.receiving.dispatch import sending, session, source
from saf.receiving.dispatch.condition import Book, Condition
from saf.receiving.dispatch.http import Client
from saf.receiving.dispatch.judging import Judge
from saf.receiving.dispatch.progress import InHand
from saf.receiving.dispatch.replies import Answer, Meaning
from saf.receiving.dispatch.sending import Sender
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.dispatch.source import ReadAhead
from saf.receiving.dispatch.window import Walk, Window
from saf.receiving.hand import Reader
from tests.endpoints import (
    Got,
    Partner,
    Reply,
    dispatch,
    dispatcher,
    dispatching,
    inbox,
    partner,
)
from tests.pipeline import connect
from tests.receivers import dead, put, store
from tests.waits import until

__all__ = ["inbox", "partner"]


class Ahead(datetime):
    """The clock of a machine that somebody has set an hour forward."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Ahead:
        return cls.fromtimestamp(datetime.now(UTC).timestamp() + 3600, tz)


def test_a_clock_that_is_set_makes_no_message_expire(
    inbox: Dsn, partner: Partner, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(inbox, "1", key="a", expires_at=datetime.now(UTC) + timedelta(minutes=30))
    monkeypatch.setattr(sending, "datetime", Ahead)
    dispatch(inbox, partner)
    assert partner.by_key() == {"a": [1]}
    assert dead(inbox) == []


def test_batches_leave_in_doubt_no_more_than_is_promised(inbox: Dsn, partner: Partner) -> None:
    release = threading.Event()

    async def answer(_: Got) -> Reply:
        while not release.is_set():
            await asyncio.sleep(0.01)
        return 204, {}, b""

    def sent() -> int:
        return sum(len(json.loads(got.body)) for got in partner.begun)

    partner.answer = answer
    with connect(inbox) as connection:
        # three of them are as much as goes into one request
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) "
            "SELECT 'billing', 'k' || k, repeat('x', 400000)::bytea FROM generate_series(1, 25) k"
        )
    one = dispatcher(inbox, partner, mode="batch", batch_messages=10, max_in_flight=1)
    with dispatching(one):
        until(lambda: len(partner.begun) == 1)
        with connect(inbox) as connection, connection.transaction():
            connection.execute("SELECT FROM saf.cursor FOR UPDATE")
            release.set()
            until(lambda: sent() >= 20)
            assert sent() == 20
        until(lambda: one.summary.handled == 25)
    assert max(len(json.loads(got.body)) for got in partner.begun) == 3


def test_answers_are_marked_as_they_come(
    inbox: Dsn, partner: Partner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LOOK_SECONDS", 60.0)
    store(inbox, keys=10, each=1)
    one = dispatcher(inbox, partner, max_in_flight=1)
    with dispatching(one):
        # two unmarked messages are as many as may be in doubt
        until(lambda: one.summary.handled == 10, 30)


def received(id_: int, **more: Any) -> Received:
    columns = {"message_id": uuid4().bytes, "key": f"k{id_}", "shard": 1, "id": id_, "body": b""}
    return Received(tuple((columns | more).get(name) for name in READ))


def a_window() -> Window:
    window = Window()
    window.own([InHand(shard=1, epoch=1, batch=1, done="1:1:", open="9:9:", position=0)])
    return window


@pytest.mark.parametrize(
    ("keys", "each", "size", "hungry"),
    [(3, 1, 1, True), (4, 1, 1, False), (1, 9, 1, True), (1, 10, 1, False), (1, 2, 10, False)],
    ids=["few keys", "many keys", "few messages", "many messages", "many bytes"],
)
def test_no_more_is_read_than_memory_is_for(
    monkeypatch: pytest.MonkeyPatch, keys: int, each: int, size: int, *, hungry: bool
) -> None:
    monkeypatch.setattr(source, "MOST", 10)
    monkeypatch.setattr(source, "MAX_BYTES", 40)
    endpoint = Endpoint(url="http://127.0.0.1:1", max_in_flight=2)
    reader = Reader(subscription_id=1, name="billing", service="billing")

    async def ask(_: object) -> Any:
        raise AssertionError("nothing is to be read")

    window = a_window()
    for number in range(keys * each):
        window.add(received(number + 1, key=f"k{number % keys}", body=b"x" * size))
    assert ReadAhead(window, reader, endpoint, "partner", ask).hungry is hungry


@pytest.mark.parametrize(
    ("more", "reply"),
    [({}, False), ({"from_initiator": True}, False), ({"from_initiator": True}, True)],
    ids=["expired", "left to a worker", "of a dialog"],
)
def test_what_a_rate_has_held_back_is_settled_at_once_when_its_turn_comes(
    more: dict[str, Any], *, reply: bool
) -> None:
    endpoint = Endpoint(url="http://127.0.0.1:1", rate="20/s", reply=reply)
    window = a_window()
    window.add(received(1, expires_at=datetime.now(UTC) + timedelta(hours=1), **more))
    judge = Judge(window, Book(subscription_id=1, endpoint="partner"), endpoint, converses=True)

    async def work() -> None:
        told = asyncio.Event()
        sender = Sender(window, judge, endpoint, Client(endpoint), told.set)
        assert sender.bucket is not None
        while sender.bucket.take(asyncio.get_running_loop().time()) == 0:
            pass
        sender.start()
        assert not told.is_set()
        if not more:
            sender.clock = datetime.now(UTC) + timedelta(hours=2), time.monotonic()
        async with asyncio.timeout(10):
            await told.wait()
        await sender.cancel()

    asyncio.run(work())


def two_in_flight() -> tuple[Window, Judge, list[Walk]]:
    window, endpoint = Window(), Endpoint(url="http://127.0.0.1:1")
    window.own([InHand(shard=1, epoch=1, batch=1, done="1:1:", open=None, position=0)])
    judge = Judge(window, Book(subscription_id=1, endpoint="partner"), endpoint, converses=False)
    for id_ in (1, 2):
        window.add(received(id_))
    return window, judge, [walk for walk in (window.next(), window.next()) if walk is not None]


def test_what_several_messages_are_told_by_an_endpoint_that_is_removed_changes_nothing() -> None:
    _, judge, walks = two_in_flight()
    judge.condition = Condition(state="removed")
    later = Answer(meaning=Meaning.WAITS, seconds=0.1, status=503, retry_after=100.0)
    judge.answered_together(walks, later)
    assert judge.condition == Condition(state="removed")
    assert judge.to_write == []
    assert [(str(walk.state), walk.alone) for walk in walks] == [("queued", False)] * 2


FAILED = Answer(meaning=Meaning.WAITS, seconds=0.1, status=503)
DONE = Answer(meaning=Meaning.DONE, seconds=0.1, status=204)


def counted(window: Window) -> dict[str, int]:
    """The attempts of the keys that wait."""
    marks = window.marks()
    assert marks is not None
    return {lane: waiting.attempts for lane, waiting in {**marks.waiting, **marks.counted}.items()}


def test_an_endpoint_that_accepts_several_messages_is_up_and_earlier_attempts_count() -> None:
    window, judge, (first, second) = two_in_flight()
    judge.answered(first, FAILED)
    judge.answered_together([second], DONE)
    assert counted(window) == {"k1": 1}


def test_a_look_at_an_endpoint_that_is_up_forgets_no_failure() -> None:
    window, judge, (first, second) = two_in_flight()
    judge.answered(first, FAILED)
    judge.hear(Condition())
    judge.answered(second, DONE)
    assert counted(window) == {"k1": 1}


def test_failures_before_an_endpoint_was_down_count_no_more_once_it_is_up() -> None:
    window, judge, (first, second) = two_in_flight()
    judge.answered(first, FAILED)
    judge.hear(Condition(state="open", probe_in=1.0))
    judge.hear(Condition())
    judge.answered(second, DONE)
    assert counted(window) == {"k1": 0}


def test_what_is_to_be_sent_alone_is_remembered_with_the_message_only() -> None:
    window, judge, walks = two_in_flight()
    judge.answered_together(walks, Answer(meaning=Meaning.REJECTED, seconds=0.1, status=400))
    assert [(str(walk.state), walk.alone) for walk in walks] == [("queued", True)] * 2
    assert window.marks() is not None
    window.own([])
    window.own([InHand(shard=1, epoch=2, batch=1, done="1:1:", open=None, position=0)])
    window.add(received(1))
    again = window.next()
    assert again is not None
    assert not again.alone
