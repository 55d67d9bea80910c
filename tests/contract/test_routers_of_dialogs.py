"""Routers that redirect, and routes that share, with dialogs: each keeps its far end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.dialogs.statements import Code
from saf.operating.decide import retry
from saf.routing.route_choices import forget
from saf.routing.routers import add_router, remove_router
from saf.routing.routes import add_route
from saf.setaside.selection import DeadLetters
from tests import classifiers
from tests.dialogs import END, ERROR, SHOP, begin, end, receive, said, say, states
from tests.pipeline import bodies, connect, drain
from tests.receivers import dead
from tests.routing import without_default

DEPARTURES, WAREHOUSE = "departures", "warehouse"
BY_TEXT = "tests.classifiers:by_body_once"


@pytest.fixture
def places(new_broker: Callable[[str], Dsn]) -> dict[str, Dsn]:
    """A shop and two stores, with routes there and back."""
    made = {name: new_broker(name) for name in ("shop", "ewr", "jfk")}
    for name, service in (("shop", SHOP), ("ewr", "EWR"), ("jfk", "JFK")):
        with connect(made[name]) as connection:
            create_service(connection, service)
            if name == "shop":
                add_route(connection, "ewr", service="EWR")
                add_route(connection, "jfk", service="JFK")
            else:
                create_service(connection, WAREHOUSE)
                add_route(connection, "shop")
    return made


@pytest.fixture(autouse=True)
def router(places: dict[str, Dsn]) -> None:
    classifiers.asked.clear()
    with connect(places["shop"]) as connection:
        add_router(connection, DEPARTURES, "python", BY_TEXT)


def forward(places: dict[str, Dsn], chunk_rows: int = 100) -> None:
    for dsn in places.values():
        with without_default(dsn, chunk_rows, **places) as cycle:
            drain(cycle)


def ask(places: dict[str, Dsn], *texts: str, **options: Any) -> saf.Dialog:
    return begin(places["shop"], *texts, **{"to_service": DEPARTURES, **options})


def answer(connection: psycopg.Connection[Any], message: saf.Received) -> None:
    assert message.dialog is not None
    message.dialog.send(connection, f"got {message.text()}")


def far_ends(dsn: Dsn) -> list[tuple[str, UUID | None]]:
    with connect(dsn) as connection:
        return [(one.far_service, one.far_broker) for one in saf.conversations(connection)]


def addressed(dsn: Dsn) -> list[str]:
    with connect(dsn) as connection:
        rows = fetch(connection, "SELECT to_service FROM saf.outbox ORDER BY id")
    return [service for (service,) in rows]


# Redirecting


def test_a_dialog_reaches_its_target_once_and_bypasses_the_router_after_the_first_answer(
    places: dict[str, Dsn],
) -> None:
    dialog = ask(places, "EWR", "JFK")
    forward(places)
    say(places["shop"], dialog, "before the answer")
    forward(places)
    heard = receive(places["ewr"], "EWR", answer)
    assert said(heard) == ["EWR", "JFK", "before the answer"]
    assert {one.from_service for one in heard} == {SHOP}, "the true sender"
    forward(places)
    assert far_ends(places["shop"]) == [(DEPARTURES, None)]
    answers = receive(places["shop"], SHOP)
    assert [one.from_service for one in answers] == ["EWR"] * 3
    assert far_ends(places["shop"]) == [("EWR", None)]
    with connect(places["shop"]) as connection:
        remove_router(connection, DEPARTURES)
    say(places["shop"], dialog, "directly")
    assert addressed(places["shop"]) == [*[DEPARTURES] * 3, "EWR"]
    end(places["shop"], dialog)
    forward(places)
    assert said(receive(places["ewr"], "EWR")) == ["directly", END]
    assert bodies(places["jfk"]) == []
    assert classifiers.asked == [str(dialog.conversation_id)]


@pytest.mark.parametrize("failing", ["the shop", "the airport"])
def test_an_error_of_either_side_of_a_redirected_dialog_reaches_the_other(
    places: dict[str, Dsn], failing: str
) -> None:
    dialog = ask(places, "EWR")
    forward(places)
    (heard,) = receive(places["ewr"], "EWR")
    assert heard.dialog is not None
    here, there = (places["shop"], dialog), (places["ewr"], heard.dialog)
    first, second = (here, there) if failing == "the shop" else (there, here)
    with first[0].connect(role="test") as connection:
        first[1].end_with_error(connection, 17, "no")
    forward(places)
    (error,) = receive(second[0], second[1].service)
    assert error.json() == {"code": 17, "text": "no"}


def test_the_far_end_is_where_all_routers_in_a_row_have_led_with_the_broker_that_they_named(
    places: dict[str, Dsn],
) -> None:
    there = UUID(int=7)
    with connect(places["shop"]) as connection:
        add_router(connection, "first", "python", "tests.classifiers:to_second")
        add_router(connection, "second", "python", "tests.classifiers:to_ewr")
        add_route(connection, "jfk", service="EWR", broker=there)
    with connect(places["jfk"]) as connection:
        connection.execute("UPDATE saf.broker SET broker_id = %s", [there])
        create_service(connection, "EWR")
    ask(places, "1", to_service="first")
    forward(places)
    receive(places["jfk"], "EWR", answer)
    forward(places)
    receive(places["shop"], SHOP)
    assert far_ends(places["shop"]) == [("EWR", there)]


def test_a_dialog_whose_router_names_another_key_goes_on_by_the_router(
    places: dict[str, Dsn],
) -> None:
    with connect(places["shop"]) as connection:
        add_router(connection, DEPARTURES, "python", "tests.classifiers:one_by_one")
        add_route(connection, "jfk", service="s")
    with connect(places["jfk"]) as connection:
        connection.execute("UPDATE saf.broker SET broker_id = %s", [UUID(int=7)])
        create_service(connection, "s")
    dialog = ask(places, "k1")
    forward(places)
    receive(places["jfk"], "s", answer)
    forward(places)
    receive(places["shop"], SHOP)
    assert far_ends(places["shop"]) == [(DEPARTURES, None)]
    say(places["shop"], dialog, "k2")
    forward(places)
    assert said(receive(places["jfk"], "s")) == ["k2"]


# What cannot be resolved


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fail", "its classifier raised ValueError: told to fail"),
        ("nobody", "its classifier returns no service"),
        ("LGA", "it names 'LGA', which no route leads to"),
    ],
)
@pytest.mark.parametrize("chunk_rows", [1, 100])
def test_who_begins_a_dialog_that_cannot_be_redirected_gets_one_error_beside_the_dead_letters(
    places: dict[str, Dsn], text: str, why: str, chunk_rows: int
) -> None:
    failed = ask(places, text, "EWR")
    other = ask(places, "EWR")
    forward(places, chunk_rows)
    (error,) = receive(places["shop"], SHOP)
    assert (error.message_type, error.dialog) == (ERROR, failed)
    assert error.json() == {"code": Code.UNRESOLVED, "text": f"router 'departures': {why}"}
    assert sorted(states(places["shop"])) == ["conversing", "error"]
    assert dead(places["shop"]) == [(text, "unresolved"), ("EWR", "unresolved")]
    assert said(receive(places["ewr"], "EWR")) == ["EWR"]
    assert len(classifiers.asked) == 2, "the first of each"
    end(places["shop"], failed)
    end(places["shop"], other)
    forward(places)
    assert receive(places["shop"], SHOP) == []


def test_the_dead_letters_of_a_dialog_are_retried_in_their_order(places: dict[str, Dsn]) -> None:
    dialog = ask(places, "LGA", "2", "3")
    forward(places)
    assert len(dead(places["shop"])) == 3
    with connect(places["shop"]) as connection:
        add_route(connection, "ewr", service="LGA")
        retry(connection, DeadLetters(), "there is a route now")
    with connect(places["ewr"]) as connection:
        create_service(connection, "LGA")
    forward(places)
    assert said(receive(places["ewr"], "LGA")) == ["LGA", "2", "3"]
    assert dialog.is_initiator


# Routes that share


@pytest.mark.slow
def test_of_100_dialogs_two_routes_get_50_each_and_each_dialog_sticks_to_its_own_for_life(
    places: dict[str, Dsn], new_broker: Callable[[str], Dsn]
) -> None:
    with connect(places["shop"]) as connection:
        for name in ("ewr", "jfk"):
            add_route(connection, name, service=WAREHOUSE)
    with places["shop"].connect(role="test") as connection:
        dialogs = [
            saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE)
            for _ in range(100)
        ]
        for one in dialogs:
            one.send(connection, "1")
    forward(places)
    with connect(places["shop"]) as connection:
        places["lga"] = new_broker("lga")
        add_route(connection, "lga", service=WAREHOUSE)
        connection.execute("UPDATE saf.route_choice SET used_at = now() - interval '1 year'")
        assert forget(connection, 7 * 86400) == 0, "they are open"
    for number in ("2", "3"):
        with places["shop"].connect(role="test") as connection:
            for one in dialogs:
                one.send(connection, number)
        forward(places)
        for name in ("ewr", "jfk"):
            receive(places[name], WAREHOUSE, answer)
        forward(places)
        assert len(receive(places["shop"], SHOP)) == (200 if number == "2" else 100)
    assert bodies(places["lga"]) == []
    for name in ("ewr", "jfk"):
        with connect(places[name]) as connection:
            rows = fetch(connection, "SELECT conversation_id FROM saf.inbox")
        heard = Counter(conversation for (conversation,) in rows)
        assert len(heard) == 50
        assert set(heard.values()) == {3}
