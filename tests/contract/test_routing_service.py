"""Routing services: routers that forward, with dialogs passed on both ways, exactly once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

import saf
from saf import routing_service
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.dialogs.dialog import FRAGMENT_BYTES
from saf.dialogs.statements import Code
from saf.errors import ConfigurationError, UsageError
from saf.message import MAX_HOPS
from saf.operating.decide import discard
from saf.routing.routers import add_router, enable_router
from saf.routing.routes import add_route, remove_route
from saf.routing_service import RoutingService
from saf.setaside.dropped import dropped
from saf.setaside.selection import DeadLetters
from saf.testing.clock import let_time_pass
from tests import classifiers
from tests.dialogs import END, ERROR, REFUSES, SHOP, begin, end, receive, said, say, states
from tests.hub import BY_TEXT, DEPARTURES, Hub
from tests.pipeline import bodies, connect
from tests.receivers import dead, waiting
from tests.signing import key, signer


@pytest.fixture
def hub(new_broker: Any) -> Hub:
    return Hub.at(new_broker)


@pytest.fixture(autouse=True)
def afresh() -> None:
    classifiers.asked.clear()


def ask(hub: Hub, *texts: str, **options: Any) -> saf.Dialog:
    """Begin a dialog of the shop with the router."""
    return begin(hub.app, *texts, to_service=DEPARTURES, **options)


def send(hub: Hub, *texts: str, service: str = DEPARTURES, **more: Any) -> None:
    with hub.app.connect(role="test") as connection:
        for text in texts:
            saf.Outbox(from_service=SHOP).send(connection, service, text, **more)


def answer(connection: psycopg.Connection[Any], message: saf.Received) -> None:
    assert message.dialog is not None
    message.dialog.send(connection, f"got {message.text()}")


def dialogs(messages: list[saf.Received]) -> list[saf.Dialog]:
    """Their dialogs, each once."""
    return list(dict.fromkeys(one.dialog for one in messages if one.dialog))


def joined(hub: Hub) -> int:
    with connect(hub.hub) as connection:
        ((count,),) = fetch(connection, "SELECT count(*) FROM saf.resolved_conversation")
    return int(count)


def inbox(dsn: Dsn, expressions: str) -> list[tuple[Any, ...]]:
    with connect(dsn) as connection:
        return list(fetch(connection, f"SELECT {expressions} FROM saf.inbox ORDER BY id"))


# Dialogs


def test_of_a_dialog_the_first_message_is_classified_and_all_others_and_replies_follow(
    hub: Hub,
) -> None:
    dialog = ask(hub, "EWR", *[f"JFK {number}" for number in range(5)])
    hub.carry()
    say(hub.app, dialog, *[f"JFK {number}" for number in range(5, 10)])
    hub.carry()
    heard = receive(hub.ewr, "EWR", answer)
    assert said(heard) == ["EWR", *[f"JFK {number}" for number in range(10)]]
    assert {(one.from_service, one.sequence) for one in heard} == {
        (DEPARTURES, number) for number in range(1, 12)
    }
    hub.carry()
    replies = receive(hub.app, SHOP)
    assert said(replies) == [f"got {one.text()}" for one in heard]
    assert dialogs(replies) == [dialog]
    assert bodies(hub.jfk) == []
    assert classifiers.asked == [str(dialog.conversation_id)]
    assert joined(hub) == 2


def test_a_large_body_is_classified_whole_and_passed_on_both_ways(hub: Hub) -> None:
    large = "EWR" + "." * FRAGMENT_BYTES
    with connect(hub.hub) as connection:
        by_beginning = "tests.classifiers:by_beginning_once"
        add_router(connection, DEPARTURES, "python", by_beginning, mode="forward")
    with hub.app.connect(role="test") as connection:
        dialog = saf.begin_dialog(connection, from_service=SHOP, to_service=DEPARTURES)
        dialog.send(connection, large, fragment_bytes=FRAGMENT_BYTES // 2)
        dialog.send(connection, "JFK", headers={"mine": 1})
    hub.carry()
    heard: list[str] = []

    def hear(connection: psycopg.Connection[Any], message: saf.Received) -> None:
        heard.append(message.text())
        if message.service == "EWR":
            answer(connection, message)

    messages = receive(hub.ewr, "EWR", hear)
    assert heard == [large, "JFK"]
    assert [one.headers.get("mine") for one in messages] == [None, 1]
    hub.carry()
    receive(hub.app, SHOP, hear)
    assert heard[2:] == [f"got {large}", "got JFK"]
    assert classifiers.asked == [str(dialog.conversation_id)]


@pytest.mark.parametrize("ending", ["the shop", "the airport"])
def test_an_end_of_either_side_reaches_the_other_and_nothing_is_left_at_the_hub(
    hub: Hub, ending: str
) -> None:
    dialog = ask(hub, "EWR")
    hub.carry()
    (mine,) = dialogs(receive(hub.ewr, "EWR"))
    here, there = (hub.app, dialog), (hub.ewr, mine)
    first, second = (here, there) if ending == "the shop" else (there, here)
    say(*first, "and goodbye")
    end(*first)
    hub.carry()
    assert said(receive(second[0], second[1].service)) == ["and goodbye", END]
    assert states(second[0]) == ["disconnected_inbound"]
    end(*second)
    hub.carry()
    assert receive(first[0], first[1].service) == []
    assert states(hub.app) == states(hub.ewr) == ["closed"]
    assert states(hub.hub) == ["closed", "closed"]
    assert joined(hub) == 0


@pytest.mark.parametrize("failing", ["the shop", "the airport"])
def test_an_error_of_either_side_reaches_the_other_with_the_original_inside(
    hub: Hub, failing: str
) -> None:
    dialog = ask(hub, "EWR")
    hub.carry()
    (mine,) = dialogs(receive(hub.ewr, "EWR"))
    here, there = (hub.app, dialog), (hub.ewr, mine)
    first, second = (here, there) if failing == "the shop" else (there, here)
    with first[0].connect(role="test") as connection:
        first[1].end_with_error(connection, 17, "no such flight")
    hub.carry()
    (error,) = receive(second[0], second[1].service)
    assert error.message_type == ERROR
    assert error.json() == {
        "code": 17,
        "text": "router 'departures': no such flight",
        "original": {"code": 17, "text": "no such flight"},
    }
    end(*second)
    hub.carry()
    assert states(hub.app) == states(hub.ewr) == ["closed"]
    assert states(hub.hub) == ["closed", "closed"]
    assert joined(hub) == 0


@pytest.mark.parametrize("on_its_way", ["to the hub", "from the hub"])
def test_the_first_message_that_is_given_up_on_its_way_is_an_error_at_all_ends_that_there_are(
    hub: Hub, on_its_way: str
) -> None:
    reaches_the_hub = on_its_way == "from the hub"
    source, there = (hub.hub, hub.ewr) if reaches_the_hub else (hub.app, hub.hub)
    with connect(there) as connection:
        connection.execute(REFUSES.format(number=1))
    ask(hub, "EWR", "2")
    hub.carry()
    assert receive(hub.ewr, "EWR") == []
    with connect(source) as connection:
        assert len(discard(connection, DeadLetters(), "nobody needs it")) == 1
    with connect(there) as connection:
        connection.execute("DROP TRIGGER refuses ON saf.inbox")
    hub.carry()
    hub.carry()
    heard = [*receive(hub.app, SHOP), *receive(hub.ewr, "EWR")]
    assert said(heard) == [ERROR] * (1 + reaches_the_hub)
    assert {one.json()["code"] for one in heard} == {Code.GIVEN_UP}
    assert states(hub.app) == ["error"]
    assert states(hub.hub) == ["closed"] * (1 + reaches_the_hub)
    assert states(hub.ewr) == ["error"] * reaches_the_hub
    assert joined(hub) == 0
    for dsn in hub.places.values():
        with connect(dsn) as connection:
            assert fetch(connection, "SELECT FROM saf.parked") == []


def test_both_dialogs_have_one_contract_and_one_lifetime(hub: Hub) -> None:
    dialog = ask(hub, contract="ordering", lifetime=600)
    with hub.app.connect(role="test") as connection:
        dialog.send(connection, "EWR", message_type="note")
    let_time_pass(hub.app, timedelta(seconds=100))
    hub.carry()
    (heard,) = receive(hub.ewr, "EWR")
    assert heard.dialog is not None
    assert str(heard.dialog.contract) == "'ordering' version 1"
    with pytest.raises(saf.WrongDirection), hub.ewr.connect(role="test") as connection:
        heard.dialog.send(connection, {"amount": 1}, message_type="order")
    for dsn, left in ((hub.app, 500), (hub.hub, 500), (hub.ewr, 500)):
        with connect(dsn) as connection:
            seconds = [
                (one.expires_at - one.created_at).total_seconds()
                for one in saf.conversations(connection)
                if one.expires_at is not None
            ]
            ((over,),) = fetch(
                connection, "SELECT bool_and(expires_at <= now() + '600 s') FROM saf.conversation"
            )
        assert over, (left, seconds)


def test_when_the_lifetime_is_over_all_ends_get_to_know_and_the_hub_ends_its_own(hub: Hub) -> None:
    ask(hub, "EWR", lifetime=600)
    hub.carry()
    receive(hub.ewr, "EWR")
    for dsn in hub.places.values():
        let_time_pass(dsn, timedelta(seconds=601))
    hub.carry()
    for dsn, service in ((hub.app, SHOP), (hub.ewr, "EWR")):
        (error,) = receive(dsn, service)
        assert error.json()["code"] == Code.EXPIRED
    assert states(hub.hub) == ["closed", "closed"]
    assert joined(hub) == 0


def test_an_end_of_the_hub_that_was_closed_meanwhile_is_left_closed(hub: Hub) -> None:
    ask(hub, "EWR", lifetime=600)
    hub.forward()
    let_time_pass(hub.hub, timedelta(seconds=601))
    with saf.receive(hub.hub, DEPARTURES) as delivery:
        errors = [one for one in delivery if one.message_type == ERROR]
        for error in errors:
            assert error.dialog is not None
            error.dialog.end(delivery.connection)
            routing_service._go_on(delivery.connection, delivery, error, None)
    assert errors
    assert states(hub.hub) == ["closed"]


def test_what_is_said_after_the_other_side_has_ended_is_dropped_as_it_would_be_there(
    hub: Hub,
) -> None:
    dialog = ask(hub, "EWR")
    hub.carry()
    (mine,) = dialogs(receive(hub.ewr, "EWR"))
    say(hub.ewr, mine, "last words")
    end(hub.ewr, mine)
    say(hub.app, dialog, "too late")
    hub.carry()
    assert said(receive(hub.app, SHOP)) == ["last words", END]
    assert receive(hub.ewr, "EWR") == []
    assert (dead(hub.hub), waiting(hub.hub)) == ([], [])
    with connect(hub.hub) as connection:
        assert [(one.reason, one.messages) for one in dropped(connection)] == [("ended", 1)]


def test_a_dialog_that_was_silent_for_long_goes_on_where_it_was(hub: Hub) -> None:
    from saf.routing.route_choices import forget

    dialog = ask(hub, "EWR")
    hub.carry()
    with connect(hub.hub) as connection:
        connection.execute("UPDATE saf.resolved_conversation SET used_at = now() - interval '1 y'")
        assert forget(connection, 7 * 86400) == 0
    say(hub.app, dialog, "JFK")
    hub.carry()
    assert said(receive(hub.ewr, "EWR")) == ["EWR", "JFK"]


# Messages of no dialog


def test_a_message_of_no_dialog_is_sent_on_as_it_is(hub: Hub) -> None:
    send(hub, "EWR", key="N1", message_type="boarding", headers={"gate": 7})
    send(hub, "JFK", key="N1")
    with connect(hub.app) as connection:
        ((sent,),) = fetch(connection, "SELECT message_id FROM saf.outbox ORDER BY id LIMIT 1")
    hub.carry()
    ((service, sender, key, kind, headers, message_id),) = inbox(
        hub.ewr, "to_service, from_service, key, message_type, headers, message_id"
    )
    assert (service, sender, key, kind) == ("EWR", SHOP, "N1", "boarding")
    assert headers == {"gate": 7, "saf-hops": 1, "content-type": "text/plain; charset=utf-8"}
    assert message_id != sent
    assert bodies(hub.jfk) == ["JFK"]


@pytest.mark.parametrize("forged", [-1_000_000, "many", None])
def test_no_sender_makes_a_circle_of_routing_services_longer(hub: Hub, forged: object) -> None:
    send(hub, "EWR", headers={"saf-hops": forged})
    hub.carry()
    assert inbox(hub.ewr, "headers->'saf-hops'") == [(1,)]


DIGITS = """{"total": 1.10, "few": 0.1000000000000000055, "more": 1e400, "less": 1e-400}"""
LONGER = DIGITS.replace("1.10", "1" * 5000)
"""With a number that Python does not read."""
NUMBERS = "{0}->>'total', {0}->>'few', {0}->>'more', {0}->>'less'"


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    ("how", "headers"),
    [
        ("a message", DIGITS),
        ("a message", LONGER),
        ("a dialog", DIGITS),
        ("a dialog in fragments", DIGITS),
    ],
)
def test_numbers_in_headers_are_sent_on_to_the_last_digit(
    hub: Hub, how: str, headers: str, signed: bool
) -> None:
    text = "EWR" + "." * FRAGMENT_BYTES * how.endswith("fragments")
    if how == "a message":
        send(hub, text)
    else:
        with connect(hub.hub) as connection:
            name = "tests.classifiers:by_beginning_once"
            add_router(connection, DEPARTURES, "python", name, mode="forward")
        ask(hub, text)
    with connect(hub.app) as connection:
        connection.execute("UPDATE saf.outbox SET headers = headers || %s::jsonb", [headers])
    hub.forward()
    hub.service(signer=signer(key_id="hub-1") if signed else None).drain()
    hub.forward()
    with connect(hub.ewr) as connection:
        asked = {"headers": headers}
        sent = fetch(connection, f"SELECT {NUMBERS.format('%(headers)s::jsonb')}", asked)
    assert set(inbox(hub.ewr, NUMBERS.format("headers"))) == set(sent)
    if signed and headers == DIGITS:
        keys = {"hub-1": key()}
        heard = receive(hub.ewr, "EWR", require_signed=True, keys=keys)
        assert [one.signed_by for one in heard] == ["hub-1"]


def test_messages_of_one_key_are_sent_on_in_their_order_and_classified_as_the_router_says(
    hub: Hub,
) -> None:
    with connect(hub.hub) as connection:
        add_router(connection, DEPARTURES, "python", BY_TEXT, once_per="key", mode="forward")
    send(hub, "EWR", *[f"{number}" for number in range(50)], key="N1")
    send(hub, "JFK", "x", key="N2")
    hub.forward()
    hub.service(max_messages=7).drain()
    hub.forward()
    assert bodies(hub.ewr) == ["EWR", *[f"{number}" for number in range(50)]]
    assert bodies(hub.jfk) == ["JFK", "x"]
    assert set(classifiers.asked) == {"N1", "N2"}
    assert len(classifiers.asked) == 2


def test_an_arrow_function_gets_a_delivery_at_once_and_may_name_a_broker_and_a_key(
    hub: Hub,
) -> None:
    with connect(hub.hub) as connection:
        name = "tests.classifiers:with_all"
        add_router(connection, DEPARTURES, "arrow", name, mode="forward")
    there = UUID(int=7)
    with connect(hub.jfk) as connection:
        create_service(connection, "s")
        connection.execute("UPDATE saf.broker SET broker_id = %s", [there])
    send(hub, "k1", "k2", key="N1")
    hub.carry()
    assert inbox(hub.jfk, "to_service, key, to_broker") == [("s", "k1", there), ("s", "k2", there)]


def test_a_monolog_is_sent_on_to_one_service_with_its_numbers(hub: Hub) -> None:
    with hub.app.connect(role="test") as connection:
        monolog = saf.begin_monolog(connection, from_service=SHOP, topic=DEPARTURES)
        for text in ("EWR", "JFK", "delayed"):
            monolog.send(connection, text)
    hub.carry()
    assert [(one.text(), one.sequence) for one in receive(hub.ewr, "EWR")] == [
        ("EWR", 1), ("JFK", 2), ("delayed", 3),
    ]  # fmt: skip


# What cannot be resolved


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fail", "its classifier raised ValueError: told to fail"),
        ("nobody", "its classifier returns no service"),
        ("LGA", "it names 'LGA', which no route leads to"),
    ],
)
def test_who_begins_a_dialog_that_cannot_be_resolved_gets_an_error_and_others_are_untouched(
    hub: Hub, text: str, why: str
) -> None:
    failed, other = ask(hub, text, "and more"), ask(hub, "EWR")
    hub.carry()
    (error,) = receive(hub.app, SHOP)
    assert error.dialog == failed
    assert error.json() == {"code": Code.UNRESOLVED, "text": f"router 'departures': {why}"}
    assert dead(hub.hub) == [(text, "unresolved")]
    assert said(receive(hub.ewr, "EWR")) == ["EWR"]
    end(hub.app, failed)
    end(hub.app, other)
    hub.carry()
    assert states(hub.app) == ["closed", "disconnected_outbound"]
    assert len(classifiers.asked) == 2


@pytest.mark.parametrize("text", ["fail", "nobody", "LGA"])
def test_a_message_of_no_dialog_that_cannot_be_resolved_is_a_dead_letter(
    hub: Hub, text: str
) -> None:
    send(hub, "EWR", text, "JFK", key="N1")
    hub.carry()
    assert dead(hub.hub) == [(text, "unresolved")]
    assert (bodies(hub.ewr), bodies(hub.jfk)) == (["EWR"], ["JFK"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("a dialog", marks=pytest.mark.full), "a message"])
def test_a_circle_of_routing_services_ends_after_sixteen(hub: Hub, kind: str) -> None:
    with connect(hub.hub) as connection:
        create_service(connection, "a")
        create_service(connection, "b")
        for name in ("a", "b"):
            add_router(connection, name, "python", "tests.classifiers:back", mode="forward")
            add_route(connection, "hub", service=name)
    if kind == "a dialog":
        begin(hub.app, "round and round", to_service="a")
    else:
        send(hub, "round and round", service="a")
    hub.forward("shop")
    there_and_back = 2 if kind == "a dialog" else 1
    for _ in range(there_and_back * (MAX_HOPS + 1)):
        for name in ("a", "b"):
            RoutingService(hub.hub, name).drain()
        hub.forward("hub")
    assert dead(hub.hub) == [("round and round", "unresolved")]
    if kind == "a dialog":
        (error,) = receive(hub.app, SHOP)
        assert error.json()["code"] == Code.UNRESOLVED
        text = "router 'a': more than 16 routing services in a row"
        assert error.json()["original"]["text"] == text
        assert set(states(hub.hub)) == {"closed"}


# Deployment


def test_without_its_router_or_its_function_it_ends_and_nothing_is_received(
    hub: Hub, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(hub, "EWR")
    hub.forward()
    with connect(hub.hub) as connection:
        enable_router(connection, DEPARTURES, enabled=False)
        with pytest.raises(ConfigurationError, match="no router 'departures', or it is disabled"):
            hub.service().run()
        add_router(connection, DEPARTURES, "python", "not_here_yet:classify", mode="forward")
        for _ in range(10):
            with pytest.raises(ConfigurationError, match="cannot load 'not_here_yet:classify'"):
                hub.service().run()
    assert (dead(hub.hub), waiting(hub.hub)) == ([], [])
    (tmp_path / "not_here_yet.py").write_text("def classify(message): return 'JFK'\n")
    monkeypatch.syspath_prepend(tmp_path)
    hub.carry()
    assert said(receive(hub.jfk, "JFK")) == ["EWR"]


def test_what_changes_at_the_broker_counts_from_the_next_delivery_on(hub: Hub) -> None:
    service = hub.service()
    send(hub, "EWR", "LGA")
    hub.forward()
    service.drain()
    with connect(hub.hub) as connection:
        add_route(connection, "ewr", service="LGA")
        remove_route(connection, "ewr", service="EWR")
    send(hub, "EWR", "LGA")
    hub.forward()
    service.drain()
    assert dead(hub.hub) == [("LGA", "unresolved"), ("EWR", "unresolved")]


def test_a_classifier_in_sql_is_refused_because_nobody_here_could_evaluate_it(hub: Hub) -> None:
    with (
        connect(hub.hub) as connection,
        pytest.raises(UsageError, match="in SQL, which needs Spark: a router that forwards has a"),
    ):
        add_router(connection, DEPARTURES, "sql", "text", mode="forward")


# Told to stop


class OneByOne(RoutingService):
    """Stops after each message of a dialog."""

    def _one(self, *what: Any) -> bool:
        done = super()._one(*what)
        self.stop()
        return done


def test_a_routing_service_that_is_told_to_stop_passes_on_the_rest_later_once_and_in_order(
    hub: Hub,
) -> None:
    for number in range(2):
        ask(hub, "EWR", *[f"EWR {number} {place}" for place in range(3)])
    send(hub, "EWR", "JFK")
    hub.forward("shop")
    serving = OneByOne(hub.hub, DEPARTURES)
    passed = [serving.drain() for _ in range(12)]
    assert max(passed) <= 3, "a message of a dialog, and those of none before it"
    assert sum(passed) == 10
    hub.forward("hub")
    heard = said(receive(hub.ewr, "EWR"))
    assert sorted(heard) == sorted(
        ["EWR", "EWR", "EWR", *[f"EWR {n} {place}" for n in range(2) for place in range(3)]]
    )
    for number in range(2):
        mine = [one for one in heard if one.startswith(f"EWR {number}")]
        assert mine == sorted(mine)
    assert bodies(hub.jfk) == ["JFK"]
