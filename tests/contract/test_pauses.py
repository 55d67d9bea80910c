"""Pauses: while an operator has paused a subscription, no receiver hands out its messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import saf
from saf.broker import services
from saf.cli.service import told_paused, told_resumed
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError
from saf.operating.doctor.broker import pauses
from saf.operating.doctor.patient import Limits, Patient
from saf.operating.status import memberships
from saf.receiving import link, retries
from saf.receiving.dispatch.session import Session
from saf.receiving.link import connected
from saf.receiving.loop import Loop
from saf.receiving.receive import Receiver
from saf.setaside.audit import audited
from tests.endpoints import Partner, dispatcher, dispatching, partner
from tests.pipeline import connect
from tests.processors import Counter, prepare_processors
from tests.receivers import SUBSCRIPTION, dead, effect, effects, let_keys_be_due, put, running
from tests.waits import until

__all__ = ["partner"]

SOON_SECONDS = 5.0
"""A second or two, on a busy machine."""


def pause(dsn: Dsn, name: str = SUBSCRIPTION, why: str = "") -> None:
    with connect(dsn) as connection:
        assert services.pause(connection, name, why)


def resume(dsn: Dsn, name: str = SUBSCRIPTION) -> None:
    with connect(dsn) as connection:
        assert services.resume(connection, name)


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until receivers have asked three times more whether their subscription is paused."""
    count = [0]

    def counted(ask: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            answer = ask(*arguments)
            count[0] += 1
            return answer

        return counting

    monkeypatch.setattr(retries, "look", counted(retries.look))
    monkeypatch.setattr(retries, "paused", counted(retries.paused))

    def again() -> None:
        before = count[0]
        until(lambda: count[0] >= before + 3)

    return again


def worker(inbox: Dsn, **options: Any) -> saf.Worker:
    made = saf.Worker(inbox, SUBSCRIPTION, **options)
    made.handler()(lambda message, connection: effect(connection, message))
    return made


def async_worker(inbox: Dsn) -> saf.Worker:
    made = saf.Worker(inbox, SUBSCRIPTION)

    @made.handler()
    async def handle(message: saf.Received, connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute(
            "INSERT INTO effect (key, body) VALUES (%s, %s)", [message.key, message.text()]
        )

    return made


def listening(inbox: Dsn) -> saf.Worker:
    with connect(inbox) as connection:
        link.switch(connection, on=True)
    return worker(inbox, listen=True)


def processors(inbox: Dsn) -> saf.Processors:
    return saf.Processors(inbox, SUBSCRIPTION, Counter)


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare_processors(mom)
    return mom


@pytest.mark.parametrize("make", [worker, async_worker, listening, processors])
def test_while_a_service_is_paused_nothing_is_handed_out_and_then_everything(
    inbox: Dsn, make: Callable[[Dsn], Loop], asks: Callable[[], None]
) -> None:
    put(inbox, "1", key="k")
    with running(make(inbox)):
        until(lambda: effects(inbox) == ["1"])
        pause(inbox)
        asks()
        put(inbox, "2", "3", key="k")
        asks()
        assert effects(inbox) == ["1"]
        resume(inbox)
        assert until(lambda: effects(inbox) == ["1", "2", "3"]) < SOON_SECONDS


def test_a_receiver_that_begins_in_a_pause_takes_nothing(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    pause(inbox)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert not delivery
    resume(inbox)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert [message.text() for message in delivery] == ["1"]


def test_a_busy_receiver_that_reads_ahead_stops_soon(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, found_paused = retries.look, [0]

    def counted(*arguments: Any) -> retries.Look:
        found = look(*arguments)
        found_paused[0] += found.paused
        return found

    monkeypatch.setattr(retries, "look", counted)
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) "
            "SELECT 'billing', 'k' || n % 7, n::text::bytea FROM generate_series(1, 20000) AS n"
        )
    made = worker(inbox, max_messages=5)
    with running(made):
        until(lambda: made.summary.handled > 100)
        pause(inbox)
        steady = [-1]

        def stands_still() -> bool:
            before, steady[0] = steady[0], made.summary.handled
            return before == steady[0]

        def for_half_a_second() -> bool:
            stands_still()
            return not threading.Event().wait(0.5) and stands_still()

        until(for_half_a_second, SOON_SECONDS)
        assert steady[0] < 20_000
        assert found_paused[0] < 5, "it asks rarely, although it has messages in memory"
        resume(inbox)
        until(lambda: made.summary.handled > steady[0] + 100)


def test_a_delivery_in_hand_ends_as_usual(inbox: Dsn) -> None:
    put(inbox, "1", "2", key="k")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        pause(inbox)
        for message in delivery:
            effect(delivery.connection, message)
    assert effects(inbox) == ["1", "2"]


def test_receive_gives_an_empty_delivery_in_a_pause(inbox: Dsn) -> None:
    put(inbox, "1")
    pause(inbox)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert not delivery
    with saf.receive(inbox, SUBSCRIPTION, wait_seconds=0.2) as delivery:
        assert not delivery

    async def awaited() -> int:
        async with saf.areceive(inbox, SUBSCRIPTION) as delivery:
            return len(delivery)

    assert asyncio.run(awaited()) == 0
    resume(inbox)
    assert asyncio.run(awaited()) == 1


def test_receive_that_waits_gets_its_message_soon_after_the_pause(inbox: Dsn) -> None:
    put(inbox, "1")
    pause(inbox)
    timer = threading.Timer(0.3, resume, [inbox])
    timer.start()
    with saf.receive(inbox, SUBSCRIPTION, wait_seconds=60) as delivery:
        assert [message.text() for message in delivery] == ["1"]
    timer.join()


def test_a_message_that_failed_is_not_tried_in_a_pause(inbox: Dsn) -> None:
    put(inbox, "1", key="k")
    made = worker(inbox)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        for message in delivery:
            delivery.park(message, "no")
    let_keys_be_due(inbox)
    pause(inbox)
    made.drain()
    assert (effects(inbox), dead(inbox)) == ([], [])
    with connect(inbox) as connection:
        assert fetch(connection, "SELECT attempts FROM saf.backoff WHERE subject = 'k'") == [(1,)]
    resume(inbox)
    made.drain()
    assert effects(inbox) == ["1"]


def test_other_subscriptions_of_the_service_go_on(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        services.create_subscription(connection, "audit", service=SUBSCRIPTION)
    put(inbox, "1")
    pause(inbox)
    with saf.receive(inbox, "audit") as delivery:
        assert len(delivery) == 1
    pause(inbox, "audit")
    resume(inbox)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert len(delivery) == 1


def test_a_dispatcher_sends_nothing_while_its_service_is_paused(
    inbox: Dsn, partner: Partner, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = [0], Session._look

    async def counted(session: Session) -> None:
        await look(session)
        looks[0] += 1

    monkeypatch.setattr(Session, "_look", counted)

    def again() -> None:
        before = looks[0]
        until(lambda: looks[0] >= before + 2)

    with dispatching(dispatcher(inbox, partner)):
        again()
        pause(inbox)
        again()
        put(inbox, "1", key="k")
        again()
        assert not partner.begun
        resume(inbox)
        until(lambda: len(partner.accepted) == 1)


def test_a_drain_says_that_its_subscription_is_paused(inbox: Dsn) -> None:
    put(inbox, "1")
    pause(inbox)
    made = worker(inbox)
    made.run(drain=True)
    assert (made.summary.exit_code, "paused" in str(made.summary)) == (75, True)
    resume(inbox)
    again = worker(inbox)
    again.run(drain=True)
    assert (again.summary.exit_code, again.summary.handled) == (0, 1)


@pytest.fixture
def counted_statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    execute = psycopg.Cursor.execute

    def noted(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        found.append(query if isinstance(query, str) else str(query))
        return execute(self, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", noted)
    return found


def test_nobody_asks_about_pauses_by_a_statement_of_its_own_while_there_are_none(
    inbox: Dsn, counted_statements: list[str]
) -> None:
    put(inbox, *map(str, range(5)))
    with connected(inbox) as raw:
        receiver = Receiver(raw, SUBSCRIPTION, saf.Policy(), 2)
        counted_statements.clear()
        for wait_seconds in (0, 0, 0, 0.1, 0.1):
            with receiver.delivery(wait_seconds):
                pass
    asking = [query for query in counted_statements if "paused_at" in query]
    assert asking
    assert {*asking} == {retries.LOOK}


def test_a_pause_is_recorded_with_who_and_why_and_shown(inbox: Dsn) -> None:
    pause(inbox, why="ledger closed")
    with connect(inbox) as connection:
        assert not services.pause(connection, SUBSCRIPTION, "again")
        (service,) = services.services(connection)
        (subscription,) = services.subscriptions(connection)
        for shown in (service, subscription):
            assert shown.paused_at is not None
            assert (shown.paused_by, shown.paused_why) == (
                connection.info.user,
                "ledger closed",
            )
        (membership,) = [
            one for one in memberships(connection) if one.backlog.subscription == SUBSCRIPTION
        ]
        assert membership.paused.endswith(": ledger closed")
        patient = Patient(
            name="mom", where="", connection=connection, limits=Limits(), clock=lambda: 0.0
        )
        ((severity, what, cure),) = pauses(patient)
        assert severity == "warning"
        assert what.startswith(f"service 'billing' was paused by {connection.info.user} at ")
        assert cure == "saf service resume billing --broker mom"
        assert services.resume(connection, SUBSCRIPTION, "done")
        assert not services.resume(connection, SUBSCRIPTION)
        assert not [*pauses(patient)]
        recorded = [(entry.action, entry.why) for entry in audited(connection)]
    assert recorded == [
        ("resume subscription billing", "done"),
        ("pause subscription billing", "ledger closed"),
    ]


def test_what_cannot_be_paused_is_named(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        services.create_subscription(connection, "all", service=None)
        with pytest.raises(ConfigurationError, match="has no subscription 'biling'"):
            services.pause(connection, "biling")
        with pytest.raises(ConfigurationError, match="has no service 'all'"):
            services.own_subscription(connection, "all")
        with pytest.raises(psycopg.errors.CheckViolation):
            connection.execute(
                "UPDATE saf.subscription SET paused_at = now(), paused_by = 'me', paused_why = '' "
                "WHERE name = 'forwarder'"
            )


def test_the_commands_say_what_they_did() -> None:
    assert told_paused("service", "a b", True) == (
        "service a b paused; `saf service resume 'a b'` continues"
    )
    assert told_paused("service", "a", False) == "service a is already paused"
    assert told_resumed("service", "a", True) == "service a resumed"
    assert told_resumed("service", "a", False) == "service a is not paused"
