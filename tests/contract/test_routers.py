"""Routers: each message goes to the service that its classifier names, also after a crash."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from saf import Outbox
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, UsageError
from saf.failpoints import arm
from saf.operating import decide
from saf.operating.repair.reconcile import reconcile
from saf.operating.repair.replay import replay
from saf.routing.matching import Router
from saf.routing.route_choices import forget
from saf.routing.routers import add_router, enable_router, remove_router
from saf.routing.routes import (
    ConfiguredRouter,
    Declared,
    add_route,
    add_topic,
    configuration,
    current_routes,
)
from saf.setaside.selection import DeadLetters
from saf.setaside.waiting import parked
from tests import classifiers
from tests.destinations import NOWHERE, Broker
from tests.dying import Crash, crash
from tests.pipeline import bodies, connect, let_time_pass, stores
from tests.routing import run, without_default

CLASSIFIERS = "tests.classifiers"
BY_ORIGIN = f"{CLASSIFIERS}:by_origin"
BY_BODY = f"{CLASSIFIERS}:by_body"


@pytest.fixture
def ewr(new_broker: Broker) -> Dsn:
    return new_broker("ewr")


@pytest.fixture
def jfk(new_broker: Broker) -> Dsn:
    return new_broker("jfk")


@pytest.fixture
def source(source: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """With a route for each airport."""
    for destination in ("ewr", "jfk"):
        add_route(source, destination, service=destination.upper())
    return source


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    classifiers.asked.clear()
    yield
    arm("")


def send(connection: psycopg.Connection[Any], *texts: object, **more: Any) -> None:
    service = more.pop("service", "departures")
    with connection.transaction():
        for text in texts:
            Outbox(from_service="flights").send(connection, service, text, **more)


def flights(*origins: str | None) -> list[dict[str, str | None]]:
    return [{"origin": origin} for origin in origins]


def buried(connection: psycopg.Connection[Any]) -> list[tuple[str, str, str]]:
    """Of each dead letter its service, reason and error."""
    return [(one.service, one.reason, one.error) for one in DeadLetters().rows(connection)]


def inbox(dsn: Dsn, columns: str) -> list[tuple[Any, ...]]:
    with connect(dsn) as connection:
        return connection.execute(f"SELECT {columns} FROM saf.inbox ORDER BY id").fetchall()


# Redirecting


@pytest.mark.parametrize("kind", ["python", "arrow"])
def test_a_message_for_a_router_reaches_the_service_that_its_classifier_names_once(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn, kind: str
) -> None:
    function = BY_ORIGIN if kind == "python" else BY_BODY
    add_router(source, "departures", kind, function)
    for origin in ("EWR", "JFK", "EWR"):
        send(source, {"origin": origin} if kind == "python" else origin, key="N1")
    run(app, ewr=ewr, jfk=jfk)
    run(app, ewr=ewr, jfk=jfk)
    assert inbox(ewr, "to_service, from_service, key") == [("EWR", "flights", "N1")] * 2
    assert inbox(jfk, "to_service, from_service, key") == [("JFK", "flights", "N1")]
    assert len(classifiers.asked) == 3


@pytest.mark.parametrize(("kind", "name"), [("arrow", "with_all"), ("python", "one_by_one")])
def test_a_classifier_may_name_a_broker_and_a_key_too(
    *, app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn, kind: str, name: str
) -> None:
    add_router(source, "departures", kind, f"{CLASSIFIERS}:{name}")
    add_route(source, "ewr", service="s")
    with connect(jfk) as store:
        store.execute("UPDATE saf.broker SET broker_id = %s", [UUID(int=7)])
    send(source, "k1", "k2")
    run(app, ewr=ewr, jfk=jfk)
    stored = inbox(jfk, "to_service, to_broker, key")
    assert stored == [("s", UUID(int=7), "k1"), ("s", UUID(int=7), "k2")]
    assert bodies(ewr) == []


def test_other_messages_go_as_they_are_addressed(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "arrow", BY_BODY)
    for service, text in (("EWR", "1"), ("departures", "EWR"), ("JFK", "2"), ("departures", "JFK")):
        send(source, text, service=service)
    run(app, ewr=ewr, jfk=jfk)
    assert (bodies(ewr), bodies(jfk)) == (["1", "EWR"], ["2", "JFK"])
    assert len(classifiers.asked) == 2


def test_a_key_keeps_its_order_among_the_messages_that_a_store_gets(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "python", BY_ORIGIN)
    for number in range(60):
        body = {"origin": "EWR" if number % 3 else "JFK", "number": number}
        send(source, body, key=f"N{number % 4}")
    run(app, chunk_rows=7, ewr=ewr, jfk=jfk)
    numbers = [[json.loads(body)["number"] for body in bodies(dsn)] for dsn in (ewr, jfk)]
    assert sorted(numbers[0] + numbers[1]) == list(range(60))
    for some in numbers:
        for key in range(4):
            of_key = [number for number in some if number % 4 == key]
            assert of_key == sorted(of_key)


def test_a_router_may_resolve_to_a_topic_and_to_routes_that_share(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "arrow", BY_BODY)
    add_topic(source, "all")
    for service in ("all", "either"):
        for destination in ("ewr", "jfk"):
            add_route(source, destination, service=service)
    send(source, "all", key="k")
    send(source, *["either"] * 4)
    run(app, ewr=ewr, jfk=jfk)
    assert bodies(ewr) == bodies(jfk) == ["all", "either", "either"]


# Once


def test_a_router_classifies_the_first_message_of_a_key_and_later_ones_bypass_it(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "python", BY_ORIGIN, once_per="key")
    send(source, *flights("EWR", "JFK"), key="N1")
    send(source, *flights("JFK"), key="N2")
    run(app, chunk_rows=2, ewr=ewr, jfk=jfk)
    send(source, *flights(*["JFK"] * 10), key="N1")
    run(app, ewr=ewr, jfk=jfk)
    assert len(bodies(ewr)) == 12, "all of N1"
    assert len(bodies(jfk)) == 1
    assert classifiers.asked == ["N1", "N2"]


@pytest.mark.parametrize("kind", ["python", "arrow"])
def test_a_conversation_is_classified_once_whatever_the_router_says(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn, kind: str
) -> None:
    add_router(source, "departures", kind, BY_ORIGIN if kind == "python" else BY_BODY)
    texts = ["EWR", *["JFK"] * 10]
    conversation = UUID(int=1)
    for text in texts:
        body = json.dumps({"origin": text}) if kind == "python" else text
        source.execute(
            "INSERT INTO saf.outbox (to_service, key, conversation_id, body) "
            "VALUES ('departures', %s, %s, %s)",
            (str(conversation), conversation, body.encode()),
        )
    run(app, chunk_rows=3, ewr=ewr, jfk=jfk)
    assert len(bodies(ewr)) == len(texts)
    assert classifiers.asked == [str(conversation)]


def test_messages_without_a_key_are_classified_each(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "python", BY_ORIGIN, once_per="key")
    send(source, *flights("EWR", "JFK"))
    send(source, *flights("EWR", "JFK"), key="N1")
    run(app, ewr=ewr, jfk=jfk)
    assert (len(bodies(ewr)), len(bodies(jfk))) == (3, 1)


def test_of_a_key_whose_first_message_cannot_be_resolved_the_next_one_decides(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "python", BY_ORIGIN, once_per="key")
    send(source, *flights(None, None, "JFK", "EWR", None), key="N1")
    run(app, ewr=ewr, jfk=jfk)
    assert len(bodies(jfk)) == 3
    assert bodies(ewr) == []
    assert [reason for _, reason, _ in buried(source)] == ["unresolved"] * 2


def test_what_was_resolved_counts_after_a_crash_before_it_was_sent(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "python", BY_ORIGIN, once_per="key")
    send(source, *flights("EWR"), key="N1")
    for point in ("resolved", "mom_commit"):
        arm(point, crash)
        with without_default(app, ewr=ewr, jfk=jfk) as cycle, pytest.raises(Crash):
            cycle.run()
    send(source, *flights("JFK"), key="N1")
    run(app, ewr=ewr, jfk=jfk)
    run(app, ewr=ewr, jfk=jfk)
    assert [json.loads(body)["origin"] for body in bodies(ewr)] == ["EWR", "JFK"]
    assert classifiers.asked == ["N1"]


def test_what_is_not_used_any_more_is_forgotten(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "python", BY_ORIGIN, once_per="key")
    for key in ("N1", "N2"):
        send(source, *flights("EWR"), key=key)
    run(app, ewr=ewr, jfk=jfk)
    source.execute("UPDATE saf.resolved_conversation SET used_at = now() - interval '10 days'")
    send(source, *flights("EWR"), key="N2")
    run(app, ewr=ewr, jfk=jfk)
    assert forget(source, 7 * 86400) == 1
    left = source.execute("SELECT key FROM saf.resolved_conversation").fetchall()
    assert left == [("N2",)]


def test_what_was_resolved_is_kept_while_messages_wait_that_went_by_it(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "python", BY_ORIGIN, once_per="key")
    send(source, *flights("EWR"), key="N1")
    send(source, *flights("JFK"), key="N2")
    with without_default(app, ewr=NOWHERE, jfk=jfk) as cycle:
        cycle.run()
    source.execute("UPDATE saf.resolved_conversation SET used_at = now() - interval '30 days'")
    forget(source, 0)
    send(source, *flights("JFK"), key="N1")
    let_time_pass(app)
    run(app, ewr=ewr, jfk=jfk)
    run(app, ewr=ewr, jfk=jfk)
    assert [json.loads(body)["origin"] for body in bodies(ewr)] == ["EWR", "JFK"]
    source.execute("UPDATE saf.resolved_conversation SET used_at = now() - interval '30 days'")
    forget(source, 0)
    assert fetch(source, "SELECT key FROM saf.resolved_conversation") == []


# Read again


@pytest.mark.parametrize("kind", ["python", "arrow"])
def test_a_batch_read_again_goes_where_it_went_though_the_router_has_changed(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn, kind: str
) -> None:
    function = BY_ORIGIN if kind == "python" else BY_BODY
    add_router(source, "departures", kind, function)
    for origin in ["EWR", "JFK"] * 10:
        send(source, {"origin": origin} if kind == "python" else origin)
    arm("mom_commit", crash)
    with without_default(app, chunk_rows=7, ewr=ewr, jfk=jfk) as cycle, pytest.raises(Crash):
        cycle.run()
    remove_router(source, "departures")
    run(app, chunk_rows=7, ewr=ewr, jfk=jfk)
    assert (len(bodies(ewr)), len(bodies(jfk))) == (10, 10)


def test_dead_letters_of_a_batch_read_again_are_there_once(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "python", BY_ORIGIN)
    send(source, *flights("EWR", None, "JFK", None))
    for point in ("set_aside", "mom_commit", "mark_forwarded"):
        arm(point, crash)
        with without_default(app, ewr=ewr, jfk=jfk) as cycle, pytest.raises(Crash):
            cycle.run()
    run(app, ewr=ewr, jfk=jfk)
    assert (len(bodies(ewr)), len(bodies(jfk)), len(buried(source))) == (1, 1, 2)


# Failures


@pytest.mark.parametrize("kind", ["python", "arrow"])
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("fail", "told to fail"),
        ("nobody", "its classifier returns no service"),
        ("LGA", "it names 'LGA', which no route leads to"),
        ("x" * 256, "not a service name"),
        ("", "not a service name"),
    ],
)
def test_a_classifier_that_raises_says_nothing_or_names_an_unknown_service_makes_a_dead_letter(
    *,
    app: Dsn,
    source: psycopg.Connection[Any],
    ewr: Dsn,
    jfk: Dsn,
    kind: str,
    text: str,
    error: str,
) -> None:
    name = "by_body" if kind == "arrow" else "by_text"
    add_router(source, "departures", kind, f"{CLASSIFIERS}:{name}")
    send(source, *["EWR"] * 5, text, *["JFK"] * 5, text, "EWR", key="N1")
    run(app, ewr=ewr, jfk=jfk)
    assert (len(bodies(ewr)), len(bodies(jfk))) == (6, 5)
    assert len(buried(source)) == 2
    for service, reason, why in buried(source):
        assert (service, reason) == ("departures", "unresolved"), "as it was sent"
        assert why.startswith("router 'departures': ")
        assert error in why


@pytest.mark.parametrize(
    ("kind", "name", "error"),
    [
        ("arrow", "too_few", "2 answers to 1 messages"),
        ("arrow", "by_origin", "raised"),
        ("python", "of_the_wrong_type", "no name, saf.Resolved or None"),
    ],
)
def test_a_classifier_that_answers_something_else_makes_dead_letters_that_say_what(
    *, app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, kind: str, name: str, error: str
) -> None:
    add_router(source, "departures", kind, f"{CLASSIFIERS}:{name}")
    send(source, "1", "2", "3")
    send(source, "neighbour", service="EWR")
    run(app, ewr=ewr)
    assert bodies(ewr) == ["neighbour"]
    assert [error in why for _, _, why in buried(source)] == [True] * 3


def test_a_dead_letter_that_is_retried_is_classified_again(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "arrow", BY_BODY)
    send(source, "LGA", "nobody", key="N1")
    run(app, ewr=ewr, jfk=jfk)
    assert len(buried(source)) == 2
    add_route(source, "ewr", service="LGA")
    decide.retry(source, DeadLetters(), "there is a route now")
    run(app, ewr=ewr, jfk=jfk)
    assert inbox(ewr, "to_service, key") == [("LGA", "N1")]
    assert [why for _, _, why in buried(source)] == [
        "router 'departures': its classifier returns no service"
    ]
    assert source.execute("SELECT count(*) FROM saf.parked").fetchone() == (0,)


def test_routers_in_a_row_are_followed_and_a_loop_or_more_than_sixteen_is_refused(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn
) -> None:
    for number in range(20):
        add_router(source, f"r{number}", "python", f"{CLASSIFIERS}:to_first")
    for name in ("a", "b"):
        add_router(source, name, "python", f"{CLASSIFIERS}:back")
    add_route(source, "ewr", service="r20")
    for service in ("r4", "r3", "a", "r20", "r19"):
        send(source, service, service=service)
    run(app, ewr=ewr)
    assert bodies(ewr) == ["r4", "r20", "r19"], "r4 takes sixteen"
    assert buried(source) == [
        (
            "r3",
            "unresolved",
            "router 'r3': more than 16 routers in a row: "
            + " -> ".join(f"r{number}" for number in range(3, 20)),
        ),
        ("a", "unresolved", "router 'a': a loop of routers: a -> b -> a"),
    ]


def test_a_function_that_cannot_be_imported_makes_its_messages_wait_and_nobody_elses(
    *,
    app: Dsn,
    source: psycopg.Connection[Any],
    ewr: Dsn,
    jfk: Dsn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_router(source, "departures", "python", "not_there_yet:classify")
    send(source, *flights("EWR", "EWR"), key="N1")
    send(source, "neighbour", service="JFK")
    run(app, ewr=ewr, jfk=jfk)
    assert bodies(jfk) == ["neighbour"]
    (lane,) = parked(source).shown
    assert (lane.kind, lane.subject, lane.messages) == ("route", "departures", 2)
    assert "cannot load 'not_there_yet:classify'" in lane.error
    assert buried(source) == []

    (tmp_path / "not_there_yet.py").write_text("def classify(message): return 'EWR'\n")
    monkeypatch.syspath_prepend(tmp_path)
    send(source, {"number": 3}, key="N1")
    run(app, ewr=ewr, jfk=jfk)
    assert bodies(ewr) == [], "behind those that wait"
    let_time_pass(app)
    run(app, ewr=ewr, jfk=jfk)
    assert bodies(ewr) == ['{"origin":"EWR"}', '{"origin":"EWR"}', '{"number":3}']
    assert parked(source).lanes == 0
    sys.modules.pop("not_there_yet")


def test_what_waited_for_a_route_goes_by_the_router_that_has_come(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    send(source, *flights("EWR", "JFK", None, "EWR"), key="N1")
    run(app, ewr=ewr, jfk=jfk)
    assert [lane.messages for lane in parked(source).shown] == [4]
    add_router(source, "departures", "python", BY_ORIGIN)
    let_time_pass(app)
    send(source, *flights("EWR"), key="N1")
    run(app, ewr=ewr, jfk=jfk)
    assert inbox(ewr, "to_service") == [("EWR",)] * 3
    assert inbox(jfk, "to_service") == [("JFK",)]
    assert len(buried(source)) == 1


# Looking after


def test_reconciling_finds_each_message_where_its_router_has_sent_it(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "arrow", BY_BODY)
    add_router(source, "arrivals", "arrow", f"{CLASSIFIERS}:with_all")
    add_topic(source, "all")
    for destination in ("ewr", "jfk"):
        add_route(source, destination, service="all")
    add_route(source, "jfk", service="s")
    send(source, *["EWR", "all", "JFK", "nobody"] * 5, key="k")
    send(source, *[f"another key {number}" for number in range(10)], service="arrivals", key="k")
    run(app, ewr=ewr, jfk=jfk)
    destinations = stores(ewr=ewr, jfk=jfk)
    assert reconcile("app", app, destinations, retention_seconds=1e6).same
    with connect(ewr) as store:
        store.execute("DELETE FROM saf.inbox WHERE to_service = 'EWR'")
    outcome = reconcile("app", app, destinations, retention_seconds=1e6)
    assert outcome.counts == {"lost": 5}


def test_what_is_replayed_is_classified_again(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    add_router(source, "departures", "arrow", BY_BODY)
    send(source, *["EWR", "JFK"] * 3, key="k")
    run(app, ewr=ewr, jfk=jfk)
    lost = fetch(source, "SELECT shard, id FROM saf.outbox ORDER BY id")
    found = replay(source, lost, current_routes(source), "the disks died")
    assert [len(ids) for ids in found.values()] == [6]
    send(source, "EWR", key="k")
    run(app, ewr=ewr, jfk=jfk)
    assert (len(bodies(ewr)), len(bodies(jfk))) == (7, 6)
    assert parked(source).lanes == 0


# What is configured


def test_a_router_that_is_disabled_or_removed_is_an_ordinary_service(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn
) -> None:
    add_router(source, "departures", "arrow", BY_BODY)
    add_route(source, "ewr", service="departures")
    send(source, "EWR")
    run(app, ewr=ewr)
    enable_router(source, "departures", enabled=False)
    send(source, "EWR")
    run(app, ewr=ewr)
    enable_router(source, "departures")
    send(source, "EWR")
    run(app, ewr=ewr)
    remove_router(source, "departures")
    send(source, "EWR")
    run(app, ewr=ewr)
    services = [service for (service,) in inbox(ewr, "to_service")]
    assert services == ["EWR", "departures", "EWR", "departures"]


def test_a_router_of_the_file_counts_and_a_row_stands_in_for_it(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn
) -> None:
    router = Router(service="departures", kind="arrow", expression=BY_BODY)
    declared = Declared(routers=(ConfiguredRouter(router=router, origin="saf.toml"),))
    assert configuration(source, None, declared).in_force.routers == (router,)
    enable_router(source, "departures", enabled=False, declared=declared)
    assert configuration(source, None, declared).in_force.routers == ()
    enable_router(source, "departures")
    assert [one.origin for one in configuration(source, None, declared).routers] == ["saf.router"]
    send(source, "EWR")
    with without_default(app, ewr=ewr) as cycle:
        cycle.broker.declared = declared
        cycle.run()
    assert bodies(ewr) == ["EWR"]


def test_a_router_that_cannot_be_is_refused(source: psycopg.Connection[Any]) -> None:
    add_topic(source, "prices")
    with pytest.raises(UsageError, match="'prices' is a topic"):
        add_router(source, "prices", "arrow", BY_BODY)
    add_router(source, "departures", "arrow", BY_BODY)
    with pytest.raises(UsageError, match="'departures' is a router"):
        add_topic(source, "departures")
    for wrong in (
        {"service": ""},
        {"kind": "java"},
        {"expression": "tests.classifiers"},
        {"expression": " ", "kind": "sql"},
        {"once_per": "day"},
    ):
        values = {"service": "s", "kind": "arrow", "expression": BY_BODY, **wrong}
        with pytest.raises(UsageError):
            add_router(source, **values)
    with pytest.raises(ConfigurationError, match="no 'arrivals', only 'departures'"):
        remove_router(source, "arrivals")


def test_to_a_router_that_forwards_messages_go_as_to_any_service(
    source: psycopg.Connection[Any],
) -> None:
    add_router(source, "departures", "python", BY_ORIGIN, mode="forward")
    assert current_routes(source).routers == ()
    add_router(source, "departures", "python", BY_ORIGIN, mode="redirect")
    assert [one.service for one in current_routes(source).routers] == ["departures"]


def test_dead_letters_of_several_reasons_die_in_the_order_in_which_they_were_sent(
    app: Dsn, source: psycopg.Connection[Any], ewr: Dsn, jfk: Dsn
) -> None:
    """And so they are retried in it."""
    add_router(source, "departures", "python", BY_ORIGIN)
    send(source, *flights("XXX", None, "XXX", None, "YYY"), key="k")
    run(app, ewr=ewr, jfk=jfk)
    died = fetch(source, "SELECT id FROM saf.dead_letter ORDER BY dead_letter_id")
    assert died == fetch(source, "SELECT id FROM saf.outbox ORDER BY id")
