"""Quiet: an idle receiver asks one question, and misses nothing by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import saf
from saf import database
from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.broker.services import create_subscription
from saf.database import Dsn
from saf.log.shards import Member
from saf.operating import decide
from saf.receiving import claim, polling
from saf.receiving.link import connected
from saf.receiving.receive import Receiver
from saf.setaside.selection import DeadLetters
from tests.pipeline import connect
from tests.receivers import SUBSCRIPTION, let_keys_be_due, prepare, put, store
from tests.waits import until

LONG_SECONDS = 600.0
"""Longer than any of these tests waits: a delivery that begins anew looks for itself."""


@pytest.fixture(autouse=True)
def sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the question does not tell is not found."""
    monkeypatch.setattr(polling, "SURE_SECONDS", 1e6)


class Idle:
    """A receiver that waits, and what it has looked for and got."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.got: list[str] = []
        self.asked = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            with self.receiver.delivery(LONG_SECONDS, self.stopping) as delivery:
                self.got += [message.text() for message in delivery]

    def gets(self, *bodies: str) -> None:
        until(lambda: sorted(self.got) == sorted(bodies))


@contextmanager
def idle(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch, subscription: str = SUBSCRIPTION
) -> Iterator[Idle]:
    """A receiver that found nothing some time ago."""
    still_quiet = Receiver._still_quiet
    with connected(inbox) as link:
        one = Idle(Receiver(link, subscription, saf.Policy(first_wait_seconds=0.0), 10))

        def counted(self: Receiver) -> bool:
            still = still_quiet(self)
            one.asked = one.asked + 1 if still else 0
            return still

        monkeypatch.setattr(Receiver, "_still_quiet", counted)
        thread = threading.Thread(target=one.run)
        thread.start()
        try:
            until(lambda: one.asked >= 2)
            yield one
        finally:
            one.stopping.set()
            thread.join()


def test_while_nothing_changes_it_looks_for_nothing_to_claim(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    look = claim.claim

    def counted(*arguments: Any) -> Any:
        looks.append(time.monotonic())
        return look(*arguments)

    monkeypatch.setattr(claim, "claim", counted)
    put(inbox, "0")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert len(delivery) == 1
    with idle(inbox, monkeypatch) as one:
        before = len(looks)
        until(lambda: one.asked >= 4)
        assert len(looks) == before
        put(inbox, "1")
        one.gets("1")


@pytest.mark.every_postgresql
def test_a_message_of_a_transaction_that_was_open_all_the_time_is_found(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inbox.connect(role="test") as slow:
        slow.execute("INSERT INTO saf.inbox (to_service, key, body) VALUES ('billing', 'k', '1')")
        with connect(inbox) as other:  # so that the snapshot names the one that is open
            other.execute("SELECT pg_current_xact_id()")
        with idle(inbox, monkeypatch) as one:
            slow.commit()
            one.gets("1")


def delayed(inbox: Dsn) -> None:
    put(inbox, "1", deliver_at=datetime.now(UTC) + timedelta(hours=1))
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert not delivery


def is_due(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.parked SET deliver_at = now()")
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")


def parked(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        for message in delivery:
            delivery.park(message, "not now")


def buried(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        for message in delivery:
            delivery.reject(message, "never")


def retried(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        decide.retry(connection, DeadLetters(), "the test says so")


@pytest.mark.parametrize(
    ("before", "then"), [(delayed, is_due), (parked, let_keys_be_due), (buried, retried)]
)
def test_what_becomes_due_or_is_retried_is_found(
    inbox: Dsn,
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[Dsn], None],
    then: Callable[[Dsn], None],
) -> None:
    before(inbox)
    with idle(inbox, monkeypatch) as one:
        then(inbox)
        one.gets("1")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What idle receivers ask."""
    asked: list[str] = []
    fetch = database.fetch

    def noted(raw: Any, query: str, *params: Any) -> Any:
        asked.append(query)
        return fetch(raw, query, *params)

    monkeypatch.setattr(polling, "fetch", noted)
    return asked


def test_while_nobody_writes_it_asks_for_the_snapshot_only(
    own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    # on a shared server, transactions of other databases move the snapshot
    inbox = own_server.create_database("inbox")
    migrate(inbox)
    prepare(inbox)
    put(inbox, "dead", "blocked", key="k")
    with saf.receive(inbox, SUBSCRIPTION, policy=saf.Policy(block=True)) as delivery:
        delivery.reject(delivery[0], "never")
    with idle(inbox, monkeypatch) as one:
        until(lambda: asked[-2:] == [polling.SNAPSHOT] * 2)
        put(inbox, "1")
        one.gets("1")


def test_a_cursor_that_was_set_back_is_found_after_a_while_though_nobody_writes_any_more(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(inbox, 1, 1)
    with idle(inbox, monkeypatch) as one:
        until(lambda: one.got)
        until(lambda: one.asked >= 2)
        before = [*one.got]
        monkeypatch.setattr(polling, "SURE_SECONDS", 0.5)
        one.receiver._quiet._until = time.monotonic() + 0.5
        with connect(inbox) as connection:
            connection.execute("UPDATE saf.cursor SET done = '1:1:'")
        until(lambda: one.got == before * 2)


def test_a_lane_that_becomes_due_is_found_though_nobody_writes(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    put(inbox, "1", key="k")
    policy = saf.Policy(first_wait_seconds=2.0)
    with saf.receive(inbox, SUBSCRIPTION, policy=policy) as delivery:
        for message in delivery:
            delivery.park(message, "not now")
    with idle(inbox, monkeypatch) as one:
        assert polling.SNAPSHOT not in asked  # which alone does not say what becomes due
        one.gets("1")


@pytest.mark.parametrize("fails", [True, False])
def test_what_another_had_in_hand_all_the_time_is_found(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    with connect(inbox) as connection:  # the second one: not the first that is found by its id
        create_subscription(connection, "second", service=SUBSCRIPTION)
    put(inbox, "1", "2", key="k")
    with connected(inbox) as link, ExitStack() as in_hand:
        in_hand.enter_context(suppress(ZeroDivisionError))
        other = Receiver(link, "second", saf.Policy(), 1)
        assert in_hand.enter_context(other.delivery())
        with idle(inbox, monkeypatch, "second") as one:
            if fails:
                in_hand.callback(raises)
            in_hand.close()
            one.gets(*(["1", "2"] if fails else ["2"]))


def raises() -> None:
    raise ZeroDivisionError


def test_shards_that_a_member_has_left_are_found(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inbox.connect(role="test", autocommit=True) as connection, connected(inbox) as link:
        subscription_id = Receiver(link, SUBSCRIPTION, saf.Policy(), 1).reader.subscription_id
        member = Member(subscription_id=subscription_id, lease_seconds=60)
        with idle(inbox, monkeypatch) as one:
            member.join(connection)
            member.balance(connection)
            store(inbox, 1, 1)
            until(lambda: one.asked >= 2)
            assert one.got == []
            member.leave(connection)
            one.gets("1")


def test_a_batch_that_a_member_has_in_hand_gives_nobody_else_something_to_look_for(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inbox.connect(role="test", autocommit=True) as connection, connected(inbox) as link:
        subscription_id = Receiver(link, SUBSCRIPTION, saf.Policy(), 1).reader.subscription_id
        member = Member(subscription_id=subscription_id, lease_seconds=60)
        with idle(inbox, monkeypatch) as one:
            member.join(connection)
            member.balance(connection)
            connection.execute("UPDATE saf.cursor SET open = pg_current_snapshot() WHERE shard = 1")
            one.asked = 0
            until(lambda: one.asked >= 3)
