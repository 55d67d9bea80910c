"""Routing services that redirect: they put two ends together, which then do without them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.dialogs.dialog import FRAGMENT_BYTES
from saf.dialogs.set_back import compare_all, received_dialogs
from saf.dialogs.statements import DIRECT, Code
from saf.errors import ConfigurationError
from saf.routing.route_choices import forget
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from saf.routing_service import RoutingService
from tests import classifiers
from tests.dialogs import END, ERROR, SHOP, begin, end, receive, said, say, states
from tests.hub import BY_TEXT, DEPARTURES, Hub
from tests.pipeline import bodies, connect
from tests.receivers import dead
from tests.signing import key, signer
from tests.sql_api import ByPython, BySql, Message, Python, Receiver, Sql

BROKER = "SELECT broker_id FROM saf.broker"
ARRIVED = "SELECT conversation_id, from_initiator, sequence, message_type, source FROM saf.inbox"
ANSWERED = "SELECT headers -> 'saf-redirected' FROM saf.inbox"
FAR = "SELECT far_service, far_broker FROM saf.conversation"
KEPT = "SELECT service, kept_until > now() FROM saf.resolved_conversation"


@pytest.fixture
def hub(new_broker: Any) -> Hub:
    return Hub.at(new_broker, "redirect")


@pytest.fixture(autouse=True)
def afresh() -> None:
    classifiers.asked.clear()


def ask(hub: Hub, *texts: str, **options: Any) -> saf.Dialog:
    """Begin a dialog of the shop with the router."""
    return begin(hub.app, *texts, to_service=DEPARTURES, **options)


def answer(connection: psycopg.Connection[Any], message: saf.Received) -> None:
    assert message.dialog is not None
    message.dialog.send(connection, f"got {message.text()}")


def rows(dsn: Dsn, query: str) -> list[tuple[Any, ...]]:
    with connect(dsn) as connection:
        return list(fetch(connection, query))


def broker(dsn: Dsn) -> Any:
    return rows(dsn, BROKER)[0][0]


def test_the_target_gets_the_dialog_and_after_its_answer_the_router_gets_nothing(hub: Hub) -> None:
    dialog = ask(hub, "EWR", "JFK 1")
    hub.carry()
    say(hub.app, dialog, "JFK 2")
    hub.carry()
    heard = receive(hub.ewr, "EWR", answer)
    assert said(heard) == ["EWR", "JFK 1", "JFK 2"]
    assert {(one.conversation_id, one.from_service) for one in heard} == {
        (dialog.conversation_id, SHOP)
    }
    hub.forward()
    replies = receive(hub.app, SHOP)
    assert said(replies) == ["got EWR", "got JFK 1", "got JFK 2"]
    assert rows(hub.hub, ARRIVED) == [
        (dialog.conversation_id, True, number, None, broker(hub.app)) for number in (1, 2, 3)
    ]
    assert rows(hub.app, FAR) == [("EWR", broker(hub.ewr))]
    say(hub.app, dialog, "JFK 3")
    hub.carry()
    assert said(receive(hub.ewr, "EWR")) == ["JFK 3"]
    assert rows(hub.hub, f"{ARRIVED} WHERE sequence IS DISTINCT FROM NULL OFFSET 3") == []
    assert rows(hub.hub, f"SELECT message_type FROM ({ARRIVED}) AS a WHERE sequence IS NULL") == [
        (DIRECT,)
    ]
    assert classifiers.asked == [str(dialog.conversation_id)]
    assert states(hub.hub) == []
    assert dead(hub.hub) == []


@pytest.mark.parametrize("there", [ByPython(), BySql()], ids=["python", "sql"])
@pytest.mark.parametrize("here", [ByPython(), BySql()], ids=["python", "sql"])
def test_either_end_may_be_received_from_sql(hub: Hub, here: Receiver, there: Receiver) -> None:
    dialog = ask(hub, "EWR")
    hub.carry()

    def got(connection: psycopg.Connection[Any], message: Message) -> None:
        assert message.handle is not None
        api = Sql() if isinstance(there, BySql) else Python()
        api.say(connection, message.handle, "done")

    assert there.deliver(hub.ewr, "EWR", got) == 1
    hub.forward()
    assert rows(hub.app, ANSWERED) == [({"by": DEPARTURES},)]
    assert here.deliver(hub.app, SHOP, lambda *_: None) == 1
    assert rows(hub.app, FAR) == [("EWR", broker(hub.ewr))]
    say(hub.app, dialog, "directly")
    hub.carry()
    assert said(receive(hub.ewr, "EWR")) == ["directly"]
    assert rows(hub.hub, KEPT) == [("EWR", None)]


def test_a_message_that_comes_directly_waits_for_one_that_is_still_at_the_router(hub: Hub) -> None:
    dialog = ask(hub, "EWR")
    hub.carry()
    say(hub.app, dialog, "by the router")
    hub.forward()  # as far as the hub
    receive(hub.ewr, "EWR", answer)
    hub.forward()
    receive(hub.app, SHOP)
    say(hub.app, dialog, "directly")
    hub.forward()
    assert said(receive(hub.ewr, "EWR")) == []
    hub.carry()
    assert said(receive(hub.ewr, "EWR")) == ["by the router", "directly"]


def test_a_large_body_is_passed_on_in_its_fragments(hub: Hub) -> None:
    large = "EWR" + "." * FRAGMENT_BYTES
    with connect(hub.hub) as connection:
        add_router(connection, DEPARTURES, "python", "tests.classifiers:by_beginning_once")
    with hub.app.connect(role="test") as connection:
        dialog = saf.begin_dialog(connection, from_service=SHOP, to_service=DEPARTURES)
        dialog.send(connection, large, fragment_bytes=FRAGMENT_BYTES // 2)
        dialog.send(connection, "JFK", headers={"mine": 1})
    hub.carry()
    heard: list[str] = []
    receive(hub.ewr, "EWR", lambda _, message: heard.append(message.text()))
    assert heard == [large, "JFK"]


def test_the_lifetime_counts_from_the_beginning(hub: Hub) -> None:
    dialog = ask(hub, "EWR", lifetime=600)
    hub.carry()
    receive(hub.ewr, "EWR")
    ((begun,),) = rows(hub.app, "SELECT expires_at FROM saf.conversation")
    ((there,),) = rows(hub.ewr, "SELECT expires_at FROM saf.conversation")
    assert abs(begun - there) < timedelta(seconds=0.01)
    assert dialog.conversation_id


@pytest.mark.parametrize("ending", ["the shop", "the airport"])
def test_an_end_of_either_side_reaches_the_other(hub: Hub, ending: str) -> None:
    dialog = ask(hub, "EWR")
    hub.carry()
    (first,) = receive(hub.ewr, "EWR")
    assert first.dialog is not None
    here, there = (hub.app, dialog), (hub.ewr, first.dialog)
    one, other = (here, there) if ending == "the shop" else (there, here)
    say(*one, "goodbye")
    end(*one)
    hub.carry()
    assert said(receive(other[0], other[1].service)) == ["goodbye", END]
    end(*other)
    hub.carry()
    receive(one[0], one[1].service)
    assert states(hub.app) == states(hub.ewr) == ["closed"]
    assert dead(hub.hub) == []


def test_the_resolution_is_kept_while_messages_may_come_by_the_router(hub: Hub) -> None:
    silent, quick = ask(hub, "EWR"), ask(hub, "EWR")
    ask(hub, "EWR", lifetime=600)
    hub.carry()
    assert rows(hub.hub, KEPT) == [("EWR", True)] * 3
    receive(hub.ewr, "EWR", answer)
    hub.forward()
    with saf.receive(hub.app, SHOP, conversation=quick) as delivery:
        assert said(list(delivery)) == ["got EWR"]
    hub.carry()
    assert sorted(kept is True for _, kept in rows(hub.hub, KEPT)) == [False, True, True]
    with connect(hub.hub) as connection:
        connection.execute(
            "UPDATE saf.resolved_conversation SET used_at = used_at - interval '40 days', "
            "kept_until = kept_until - interval '40 days'"
        )
        assert forget(connection, 86400) == 2
    assert len(rows(hub.hub, KEPT)) == 1
    say(hub.app, silent, "after a long silence")
    hub.carry()
    assert said(receive(hub.ewr, "EWR")) == ["after a long silence"]


def test_after_the_end_by_the_router_its_resolution_is_forgotten_like_others(hub: Hub) -> None:
    dialog = ask(hub, "EWR")
    hub.carry()
    end(hub.app, dialog)
    hub.carry()
    assert rows(hub.hub, KEPT) == [("EWR", None)]


def test_the_initiator_hears_that_its_dialog_cannot_be_resolved_and_another_may_answer(
    hub: Hub,
) -> None:
    dialog, other = ask(hub, "nobody", "JFK"), ask(hub, "JFK")
    hub.carry()
    (error,) = receive(hub.app, SHOP)
    assert (error.conversation_id, error.message_type) == (dialog.conversation_id, ERROR)
    assert error.json()["code"] == Code.UNRESOLVED
    assert "its classifier returns no service" in error.json()["text"]
    assert len(dead(hub.hub)) == 2
    assert rows(hub.app, "SELECT answered_by FROM saf.conversation") == [(None,)] * 2
    assert said(receive(hub.jfk, "JFK", answer)) == ["JFK"]
    hub.forward()
    assert said(receive(hub.app, SHOP)) == ["got JFK"]
    assert other.conversation_id


def test_a_message_whose_first_one_is_missing_is_a_dead_letter_until_that_has_come(
    hub: Hub,
) -> None:
    dialog = ask(hub, "EWR", "JFK 1")
    with connect(hub.app) as connection:
        connection.execute("DELETE FROM saf.outbox WHERE sequence = 1")
    hub.carry()
    ((reason, error),) = rows(hub.hub, "SELECT reason, error FROM saf.dead_letter")
    assert reason == "unresolved"
    assert "the first message was not resolved" in error
    assert said(receive(hub.app, SHOP)) == []
    assert dialog.conversation_id


def test_a_message_of_no_dialog_is_passed_on_as_it_is(hub: Hub) -> None:
    with hub.app.connect(role="test") as connection:
        id_ = saf.Outbox(from_service=SHOP).send(
            connection, DEPARTURES, "JFK", key="k", headers={"mine": 1}
        )
    hub.carry()
    (message,) = receive(hub.jfk, "JFK")
    assert (message.message_id, message.key, message.text()) == (id_, "k", "JFK")
    assert message.headers["mine"] == 1
    assert bodies(hub.ewr) == []


def test_a_router_that_gives_another_key_gets_all_messages(hub: Hub) -> None:
    with connect(hub.hub) as connection:
        add_router(connection, DEPARTURES, "python", "tests.classifiers:to_ewr_by_body")
    dialog = ask(hub, "EWR")
    hub.carry()
    receive(hub.ewr, "EWR", answer)
    hub.forward()
    assert said(receive(hub.app, SHOP)) == ["got EWR"]
    assert rows(hub.app, FAR) == [(DEPARTURES, None)]
    say(hub.app, dialog, "again")
    hub.carry()
    assert said(receive(hub.ewr, "EWR")) == ["again"]


def test_a_message_is_redirected_once(hub: Hub) -> None:
    with connect(hub.jfk) as connection:
        create_service(connection, "second")
        add_router(connection, "second", "python", BY_TEXT)
    with connect(hub.hub) as connection:
        add_route(connection, "jfk", service="second")
    dialog = ask(hub, "second")
    hub.carry()
    assert RoutingService(hub.jfk, "second").drain() == 0
    hub.forward()
    (error,) = receive(hub.app, SHOP)
    assert error.conversation_id == dialog.conversation_id
    assert "router 'departures' has redirected it" in error.json()["text"]


def test_signatures_of_both_ends_are_verified_though_the_router_has_no_key(hub: Hub) -> None:
    keys = saf.Keys({"shop-1": key()}, redirected_from=[DEPARTURES])
    with hub.app.connect(role="test") as connection:
        dialog = saf.begin_dialog(
            connection, from_service=SHOP, to_service=DEPARTURES, signer=signer()
        )
        dialog.send(connection, "EWR")
    hub.forward()
    hub.service(require_signed=True, keys=keys).drain()
    hub.forward()
    signed: dict[str, Any] = {"require_signed": True, "keys": keys, "signer": signer()}
    assert said(receive(hub.ewr, "EWR", answer, **signed)) == ["EWR"]
    hub.forward()
    assert said(receive(hub.app, SHOP, **signed)) == ["got EWR"]
    assert rows(hub.app, FAR) == [("EWR", broker(hub.ewr))]
    hub.forward()
    hub.service(require_signed=True, keys=keys).drain()
    assert rows(hub.hub, KEPT) == [("EWR", None)]
    assert dead(hub.hub) == []
    assert dialog.conversation_id


@pytest.mark.parametrize(("before", "after"), [("redirect", "forward"), ("forward", "redirect")])
def test_the_mode_of_a_router_with_open_dialogs_does_not_change(
    hub: Hub, before: str, after: str
) -> None:
    def becomes(mode: str) -> None:
        with connect(hub.hub) as connection:
            add_router(connection, DEPARTURES, "python", BY_TEXT, mode=mode)

    becomes(before)
    dialog = ask(hub, "EWR")
    hub.carry()
    serving = hub.service()
    becomes(after)
    with pytest.raises(
        ConfigurationError, match=f"1 of its dialogs have begun when it was {before}"
    ):
        serving.drain()
    becomes(before)
    end(hub.app, dialog)
    assert hub.carry() == 1
    becomes(after)
    ask(hub, "JFK")
    assert hub.carry() == 1
    assert len(bodies(hub.jfk)) == 1


def test_a_repair_takes_no_message_that_was_passed_on_for_a_target_of_the_router(hub: Hub) -> None:
    ask(hub, "EWR")
    hub.carry()
    with connect(hub.hub) as connection:
        assert received_dialogs(connection, broker(hub.app), "hub") == []
        assert compare_all(connection) == 0
        assert fetch(connection, "SELECT 1 FROM saf.outbox WHERE NOT from_initiator") == []


def test_a_repair_takes_no_message_that_was_passed_on_by_a_router_of_a_file(hub: Hub) -> None:
    ask(hub, "EWR")
    hub.carry()
    with connect(hub.hub) as connection:  # as if saf.toml had it
        connection.execute("DELETE FROM saf.router")
        assert received_dialogs(connection, broker(hub.app), "hub") == []
        compare_all(connection)
        assert fetch(connection, "SELECT 1 FROM saf.outbox WHERE NOT from_initiator") == []


def test_only_the_router_that_was_addressed_redirects(hub: Hub) -> None:
    dialog = ask(hub, "EWR")
    hub.carry()
    receive(hub.ewr, "EWR", answer)
    with connect(hub.ewr) as connection:
        connection.execute(
            "UPDATE saf.outbox SET headers = jsonb_set(headers, '{saf-redirected,by}', '\"other\"')"
        )
    hub.forward()
    assert said(receive(hub.app, SHOP)) == ["got EWR"]
    assert rows(hub.app, FAR) == [(DEPARTURES, None)]
    assert dialog.conversation_id
