"""Dispatch: an endpoint that is stored in a broker is changed, removed and added again."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from saf.broker.services import create_services, subscription
from saf.database import Dsn, fetch
from saf.errors import EndpointRemoved
from saf.receiving.dispatch import dispatcher, stored
from saf.receiving.dispatch.condition import Book, Condition
from saf.receiving.dispatch.dispatcher import Dispatcher
from saf.receiving.dispatch.session import Session
from saf.receiving.dispatch.settings import Endpoint
from tests.endpoints import Partner, dispatching, held, inbox, partner, serving, state
from tests.pipeline import connect
from tests.receivers import SUBSCRIPTION, put
from tests.waits import until

__all__ = ["inbox", "partner"]


@pytest.fixture
def person(inbox: Dsn) -> Iterator[psycopg.Connection[Any]]:
    """The connection of who looks after endpoints."""
    with connect(inbox) as connection:
        yield connection


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until the dispatcher has looked how its endpoint is, and has done what follows."""
    counts: Counter[str] = Counter()
    look = Session._look

    async def counted(session: Session) -> None:
        await look(session)
        counts["looks"] += 1

    def again() -> None:
        before = counts["looks"]
        until(lambda: counts["looks"] >= before + 3)

    monkeypatch.setattr(Session, "_look", counted)
    return again


def add(connection: psycopg.Connection[Any], partner: Partner) -> None:
    stored.add(connection, "partner", partner.url, subscription=SUBSCRIPTION, settings={})


def read(inbox: Dsn) -> Dispatcher:
    """A dispatcher of the endpoint as it is stored now."""
    with connect(inbox) as connection:
        one = stored.stored(connection, "mom", ["127.0.0.0/8"])["partner"]
    assert isinstance(one, Endpoint)
    return Dispatcher("partner", one, inbox)


def book(connection: psycopg.Connection[Any]) -> Book:
    number = subscription(connection, SUBSCRIPTION).subscription_id
    return Book(subscription_id=number, endpoint="partner")


@contextmanager
def until_removed(one: Dispatcher) -> Iterator[None]:
    """A dispatcher, until its endpoint is not there any more."""
    with pytest.raises(EndpointRemoved, match="was removed"), dispatching(one), left(one.dsn):
        yield


@contextmanager
def left(inbox: Dsn) -> Iterator[None]:
    """At the end of the block, wait until nobody dispatches."""
    yield
    with connect(inbox) as connection:
        until(lambda: not fetch(connection, "SELECT name FROM saf.member"))


def conditions(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    return fetch(
        connection,
        "SELECT s.name, b.state, b.paused_at IS NOT NULL "
        "FROM saf.breaker b JOIN saf.subscription s USING (subscription_id) ORDER BY 1",
    )


def test_an_endpoint_that_is_removed_gets_nothing_more(
    inbox: Dsn,
    partner: Partner,
    person: psycopg.Connection[Any],
    looks: Callable[[], None],
) -> None:
    add(person, partner)
    with until_removed(read(inbox)):
        put(inbox, "1", key="a")
        until(lambda: len(partner.accepted) == 1)
        book(person).pause(person)
        looks()
        put(inbox, "2", key="a")
        looks()
        stored.remove(person, "partner")
    assert partner.by_key() == {"a": [1]}
    add(person, partner)
    with dispatching(read(inbox)):
        until(lambda: partner.by_key() == {"a": [1, 2]})


def test_a_message_whose_endpoint_is_gone_is_delivered_once_an_operator_resumes_the_endpoint(
    inbox: Dsn, partner: Partner, person: psycopg.Connection[Any], looks: Callable[[], None]
) -> None:
    add(person, partner)
    partner.always(410)
    put(inbox, "1", "2", key="a")
    with dispatching(read(inbox)):
        until(lambda: state(inbox) == "disabled")
        looks()
        partner.answer = None
        book(person).resume(person)
        until(lambda: partner.by_key() == {"a": [1, 2]})


def test_a_probe_that_disables_an_endpoint_is_one_more_failure(
    person: psycopg.Connection[Any],
) -> None:
    one = book(person)
    one.down(person, "HTTP 503", 0.0)
    one.disable(person, "HTTP 410")
    assert one.look(person) == Condition(state="disabled", failures=2, error="HTTP 410")


@pytest.mark.parametrize("status", [410, 503])
def test_what_an_endpoint_says_that_was_removed_is_not_said_of_the_one_of_its_name(
    inbox: Dsn, partner: Partner, person: psycopg.Connection[Any], status: int
) -> None:
    release = held(partner, status)
    add(person, partner)
    put(inbox, "1", key="a")
    with serving(Partner()) as other:
        with until_removed(read(inbox)):
            until(lambda: partner.in_flight == 1)
            stored.remove(person, "partner")
            add(person, other)
            release()
        assert state(inbox) == "closed"
        with dispatching(read(inbox)):
            until(lambda: other.by_key() == {"a": [1]})


def test_what_is_in_flight_to_an_endpoint_that_is_removed_is_marked(
    inbox: Dsn,
    partner: Partner,
    person: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ending, end = threading.Event(), Session._end

    async def noted(session: Session, stop_seconds: float) -> None:
        ending.set()
        await end(session, stop_seconds)

    monkeypatch.setattr(Session, "_end", noted)
    release = held(partner, 204)
    add(person, partner)
    put(inbox, "1", "2", key="a")
    with until_removed(one := read(inbox)):
        until(lambda: partner.in_flight == 1)
        stored.remove(person, "partner")
        until(ending.is_set)
        release()
    assert one.summary.handled == 1
    assert partner.by_key() == {"a": [1]}


def test_a_loop_goes_on_at_once_with_an_endpoint_that_is_removed_and_added_again(
    inbox: Dsn,
    partner: Partner,
    person: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "FIND_SECONDS", 0.1)
    add(person, partner)
    endpoint = read(inbox).endpoint

    def find() -> list[Dispatcher]:
        return [Dispatcher("partner", endpoint, inbox)]  # it was not looked for meanwhile

    def work() -> None:
        put(inbox, "1", key="a")
        until(lambda: partner.accepted)
        stored.remove(person, "partner")
        until(lambda: any(line["event"] == "endpoint_not_dispatched" for line in lines))
        add(person, partner)
        put(inbox, "2", key="a")
        until(lambda: len(partner.accepted) == 2, dispatcher.AGAIN_SECONDS / 3)

    with capture_logs() as lines, ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        working.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))
        dispatcher.run([], find=find)
        working.result()


def test_an_endpoint_that_is_added_begins_anew_whatever_was_at_its_subscription(
    partner: Partner, person: psycopg.Connection[Any]
) -> None:
    book(person).disable(person, "HTTP 410")
    book(person).pause(person)
    add(person, partner)
    assert conditions(person) == [(SUBSCRIPTION, "closed", False)]


def test_an_endpoint_that_moves_to_another_subscription_leaves_its_condition_at_neither(
    partner: Partner, person: psycopg.Connection[Any]
) -> None:
    create_services(person, ["orders"])
    add(person, partner)
    book(person).disable(person, "HTTP 410")
    there = subscription(person, "orders").subscription_id
    Book(subscription_id=there, endpoint="other").pause(person)
    stored.put(person, "partner", partner.url, subscription="orders", settings={})
    assert conditions(person) == [(SUBSCRIPTION, "closed", False), ("orders", "closed", False)]


def test_an_endpoint_that_is_changed_stays_paused(
    partner: Partner, person: psycopg.Connection[Any]
) -> None:
    add(person, partner)
    book(person).pause(person)
    stored.put(
        person, "partner", partner.url, subscription=SUBSCRIPTION, settings={"mode": "plain"}
    )
    assert conditions(person) == [(SUBSCRIPTION, "closed", True)]
