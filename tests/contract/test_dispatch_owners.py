"""Dispatch: what a dispatcher does that owns no shard, because others have them all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from saf.broker.migrate import migrate
from saf.broker.services import subscription
from saf.database import Dsn
from saf.log.shards import Member
from saf.receiving.dispatch.dispatcher import Dispatcher
from saf.receiving.dispatch.session import Session
from tests.endpoints import Partner, dispatcher, dispatching, held, partner
from tests.pipeline import connect
from tests.receivers import SUBSCRIPTION, prepare, put
from tests.waits import until

__all__ = ["partner"]


@pytest.fixture
def of_shards(new_database: Callable[[str], Dsn]) -> Callable[[int], Dsn]:
    """Creates an inbox with so many shards."""

    def new(shards: int) -> Dsn:
        inbox = new_database("few")
        migrate(inbox, shards=shards)
        prepare(inbox)
        return inbox

    return new


@pytest.fixture
def release(partner: Partner) -> Callable[[], None]:
    """The partner answers nothing until this is called."""
    return held(partner, 204)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How many turns and looks each session has had, by the name of its endpoint."""
    counts: Counter[tuple[str, str]] = Counter()
    turn, look = Session._turn, Session._look

    async def counted_turn(session: Session) -> None:
        counts[session.name, "turns"] += 1
        await turn(session)

    async def counted_look(session: Session) -> None:
        await look(session)
        counts[session.name, "looks"] += 1

    monkeypatch.setattr(Session, "_turn", counted_turn)
    monkeypatch.setattr(Session, "_look", counted_look)
    return counts


def drain(one: Dispatcher) -> None:
    """Send what is there and due, and end; in 30 seconds, whatever is there."""
    asyncio.run(asyncio.wait_for(one.run(asyncio.Event(), drain=True), 30))


def named(name: str, inbox: Dsn, partner: Partner) -> Dispatcher:
    return Dispatcher(name, dispatcher(inbox, partner).endpoint, inbox)


def test_a_dispatcher_without_a_shard_rests(
    of_shards: Callable[[int], Dsn], partner: Partner, turns: Counter[tuple[str, str]]
) -> None:
    inbox = of_shards(1)
    first, second = named("first", inbox, partner), named("second", inbox, partner)
    with dispatching(first):
        until(lambda: turns["first", "looks"])
        with dispatching(second):
            until(lambda: turns["second", "looks"] >= 3)
    assert turns["second", "turns"] < 20
    put(inbox, "1", key="a")
    drain(second)
    assert partner.by_key() == {"a": [1]}


def test_a_run_without_loop_ends_where_others_have_all_shards(
    of_shards: Callable[[int], Dsn],
    partner: Partner,
    release: Callable[[], None],
) -> None:
    inbox = of_shards(1)
    put(inbox, "1", key="a")
    with dispatching(named("first", inbox, partner)):
        until(lambda: partner.in_flight)
        second = named("second", inbox, partner)
        drain(second)
        assert second.exit_code == 0
        release()
        until(lambda: partner.accepted)


def test_a_run_without_loop_waits_for_the_shards_that_it_is_to_have(
    of_shards: Callable[[int], Dsn],
    partner: Partner,
    turns: Counter[tuple[str, str]],
    release: Callable[[], None],
) -> None:
    inbox = of_shards(2)
    for number in range(1, 9):
        put(inbox, "1", key=f"k{number}")
    second = named("second", inbox, partner)
    with dispatching(named("first", inbox, partner)), ThreadPoolExecutor(1) as threads:
        until(lambda: partner.in_flight == 8)  # so no shard is free to leave
        draining = threads.submit(drain, second)
        until(lambda: turns["second", "looks"] >= 3)
        assert not draining.done()
        release()
        draining.result()
        until(lambda: len(partner.accepted) == 8)


def test_a_run_without_loop_takes_over_from_who_has_died(
    of_shards: Callable[[int], Dsn], partner: Partner
) -> None:
    inbox = of_shards(1)
    with connect(inbox) as connection:
        number = subscription(connection, SUBSCRIPTION).subscription_id
        dead = Member(subscription_id=number, lease_seconds=60)
        dead.join(connection)
        assert dead.balance(connection) == 1
    put(inbox, "1", key="a")
    drain(named("second", inbox, partner))
    assert partner.by_key() == {"a": [1]}
