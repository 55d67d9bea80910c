"""Dispatch: each message reaches its endpoint, in the order of its key, at least once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event

from saf.database import Dsn, fetch
from tests.endpoints import (
    Got,
    Partner,
    Reply,
    dispatch,
    dispatcher,
    dispatching,
    program,
    serving,
)
from tests.pipeline import connect
from tests.processes import start
from tests.receivers import dead, let_keys_be_due, prepare, put, store, waiting
from tests.waits import until

every_postgresql = pytest.mark.every_postgresql


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare(mom)
    return mom


@pytest.fixture
def partner() -> Iterator[Partner]:
    with serving(Partner()) as one:
        yield one


def unfinished(inbox: Dsn) -> int:
    """How many shards have an open batch."""
    with connect(inbox) as connection:
        ((count,),) = fetch(connection, "SELECT count(*) FROM saf.cursor WHERE open IS NOT NULL")
    return int(count)


def attempts(inbox: Dsn) -> list[tuple[Any, ...]]:
    with connect(inbox) as connection:
        return fetch(connection, "SELECT subject, attempts, error FROM saf.backoff ORDER BY 1")


@every_postgresql
def test_each_message_is_sent_once_in_the_order_of_its_key(inbox: Dsn, partner: Partner) -> None:
    store(inbox, keys=20, each=10, transactions=5)
    partner.after(0.005)
    done = dispatch(inbox, partner)
    assert partner.by_key() == {f"k{k}": list(range(1, 11)) for k in range(1, 21)}
    assert (done.summary.handled, done.summary.exit_code) == (200, 0)
    assert partner.most_in_flight > 1
    assert partner.overlaps == 0
    assert unfinished(inbox) == 0
    dispatch(inbox, partner)
    assert len(partner.begun) == 200


def test_a_slow_key_delays_no_other(inbox: Dsn, partner: Partner) -> None:
    release = asyncio.Event()

    async def answer(got: Got) -> Reply:
        if got.key == "k1":
            await asyncio.wait_for(release.wait(), 30)
        return 204, {}, b""

    partner.answer = answer
    store(inbox, keys=70, each=5)
    with dispatching(dispatcher(inbox, partner, timeout_seconds=30)):
        until(lambda: len(partner.accepted) == 69 * 5)
        store(inbox, keys=70, each=5)
        until(lambda: len(partner.accepted) >= 69 * 5 + 60)
        assert [got.key for got in partner.begun].count("k1") == 1
        release._loop.call_soon_threadsafe(release.set)  # type: ignore[attr-defined]
        until(lambda: len(partner.accepted) == 70 * 10)


def test_the_sdk_of_cloudevents_reads_what_is_sent(inbox: Dsn, partner: Partner) -> None:
    put(
        inbox,
        '{"total": 7}',
        key='Zürich "1"\r\n%',
        message_type="OrderPlaced",
        from_service="shop/1",
        headers='{"content-type": "application/json", "traceid": "a\\u00fc"}',
    )
    dispatch(inbox, partner)
    (got,) = partner.accepted
    event = from_http_event(HTTPMessage(headers=got.headers, body=got.body))
    assert event.get_type() == "OrderPlaced"
    assert event.get_source() == "/saf/shop%2F1"
    assert event.get_subject() == 'Zürich "1"\r\n%'
    assert event.get_id() == got.id
    assert event.get_data() == {"total": 7}
    assert event.get_attributes()["traceid"] == "aü"


def test_a_message_that_the_endpoint_rejects_is_a_dead_letter_with_its_answer(
    inbox: Dsn, partner: Partner
) -> None:
    async def answer(got: Got) -> Reply:
        return (422, {}, b"no such\norder") if got.body == b"2" else (200, {}, b"ok")

    partner.answer = answer
    put(inbox, "1", "2", "3", key="a")
    done = dispatch(inbox, partner)
    assert partner.by_key() == {"a": [1, 3]}
    assert dead(inbox) == [("2", "rejected")]
    assert done.summary.exit_code == 1
    with connect(inbox) as connection:
        ((error,),) = fetch(connection, "SELECT error FROM saf.dead_letter")
        ((status, kept),) = fetch(connection, "SELECT status, error FROM saf.attempt")
    assert error == kept == "HTTP 422: no such order"
    assert status == 422


def test_a_message_that_fails_waits_and_only_its_key_behind_it(
    inbox: Dsn, partner: Partner
) -> None:
    failing = True

    async def answer(got: Got) -> Reply:
        return (500, {}, b"oops") if failing and got.key == "a" else (200, {}, b"ok")

    partner.answer = answer
    put(inbox, "1", "2", key="a")
    put(inbox, "1", "2", key="b")
    assert dispatch(inbox, partner).summary.exit_code == 75
    assert partner.by_key() == {"b": [1, 2]}
    put(inbox, "3", key="a")
    dispatch(inbox, partner)
    assert waiting(inbox) == ["a"]
    assert unfinished(inbox) == 0
    failing = False
    let_keys_be_due(inbox)
    dispatch(inbox, partner)
    assert partner.by_key() == {"b": [1, 2], "a": [1, 2, 3]}
    assert waiting(inbox) == []


def test_after_its_last_attempt_a_message_is_a_dead_letter(inbox: Dsn, partner: Partner) -> None:
    async def answer(got: Got) -> Reply:
        return (500, {}, b"oops") if got.key == "a" else (200, {}, b"ok")

    partner.answer = answer
    put(inbox, "1", key="a")
    with dispatching(dispatcher(inbox, partner, attempts=3)):

        def tried() -> bool:
            put(inbox, "0", key="b")  # the endpoint is up
            let_keys_be_due(inbox)
            return bool(dead(inbox))

        until(tried)
    assert dead(inbox) == [("1", "failed")]
    assert len([got for got in partner.begun if got.key == "a"]) >= 3
    assert waiting(inbox) == []


def test_an_endpoint_that_is_down_uses_up_no_attempts(inbox: Dsn, partner: Partner) -> None:
    partner.always(503, b"maintenance")
    store(inbox, keys=10, each=3)
    with dispatching(dispatcher(inbox, partner, attempts=1, breaker_failures=3)):
        until(lambda: state(inbox) == "open")
        for _ in range(3):
            sent = len(partner.begun)
            let_probes_be_due(inbox)
            until(lambda before=sent: len(partner.begun) > before)  # type: ignore[misc]
        partner.answer = None
        let_probes_be_due(inbox)
        until(lambda: state(inbox) == "closed")

        def all_there() -> bool:
            let_keys_be_due(inbox)
            return len(partner.accepted) == 30

        until(all_there)
    assert partner.by_key() == {f"k{k}": [1, 2, 3] for k in range(1, 11)}
    assert dead(inbox) == []


def state(inbox: Dsn) -> str:
    with connect(inbox) as connection:
        found = fetch(connection, "SELECT state FROM saf.breaker")
    return str(found[0][0]) if found else "closed"


def let_probes_be_due(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.breaker SET next_probe_at = now() WHERE state = 'open'")


def test_what_was_in_flight_when_a_dispatcher_is_killed_is_sent_again_and_nothing_else(
    inbox: Dsn, partner: Partner
) -> None:
    store(inbox, keys=300, each=10)
    partner.after(0.05)
    more = {"max_in_flight": 200}
    victim = start(program, inbox, partner.url, more)
    until(lambda: len(partner.accepted) > 500 and partner.in_flight >= 150)
    victim.kill()
    victim.join()
    before = len(partner.begun)
    until(lambda: partner.in_flight == 0)
    one = dispatcher(inbox, partner, **more)
    with dispatching(one):
        until(lambda: len({got.id for got in partner.accepted}) == 3000)
        until(lambda: unfinished(inbox) == 0)
    assert partner.overlaps == 0
    times = Counter(got.id for got in partner.begun)
    again = [id_ for id_, count in times.items() if count > 1]
    assert before < 3000
    assert len(again) <= 2 * 200
    for numbers in partner.by_key().values():
        first = list(dict.fromkeys(numbers))
        assert first == list(range(1, 11))
        assert all(later - number <= 1 for number, later in pairwise(numbers))
