"""What is addressed to a broker goes to that broker, or waits: it is stored at no other one."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from saf.database import Dsn
from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.identities import WAIT_SECONDS, Identities
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.failpoints import arm
from saf.routing.explain import explain
from saf.routing.routes import add_route, add_topic
from saf.setaside.lane import Lane
from saf.setaside.waiting import parked
from tests.destinations import NOWHERE, count, know
from tests.dying import Crash, crash
from tests.pipeline import bodies, let_time_pass, stores
from tests.routing import broker_id, run, send, without_default

pytestmark = pytest.mark.usefixtures("disarmed")

Broker = Callable[[str], Dsn]


def run_knowing(app: Dsn, where: Mapping[str, Dsn]) -> None:
    """The same as `run`, of destinations in a dict."""
    run(app, 100, **where)


def run_unknowing(app: Dsn, chunk_rows: int = 100, **where: Dsn) -> None:
    """A run of a forwarder that has not learned who its destinations are."""
    with without_default(app, chunk_rows, **where) as cycle:
        cycle.broker.identities = None
        assert [r.error for r in cycle.run() if r.error] == []


def lanes(source: psycopg.Connection[Any]) -> dict[str, tuple[int, str]]:
    """By lane how many messages are parked in it, and why."""
    return {str(lane.own): (lane.messages, lane.error) for lane in parked(source).shown}


# By itself


def test_a_message_for_a_broker_finds_the_destination_that_is_it_without_a_route(
    app: Dsn, source: psycopg.Connection[Any], mom: Dsn, new_broker: Broker
) -> None:
    hubs = {name: new_broker(name) for name in ("hub1", "hub2")}
    for name in hubs:
        add_route(source, name, service="s")  # which share
    add_route(source, "mom")
    for number in range(40):
        name = f"hub{number % 2 + 1}"
        send(source, name, key=f"k{number}", to_broker=broker_id(hubs[name]))
    send(source, "mom", service="t")
    run_knowing(app, {"mom": mom, **hubs})
    assert {name: bodies(dsn) for name, dsn in hubs.items()} == {n: [n] * 20 for n in hubs}
    assert bodies(mom) == ["mom"]
    assert count(app, "parked") == 0


def test_of_the_routes_that_lead_to_the_broker_the_most_specific_says_how(
    app: Dsn, source: psycopg.Connection[Any], mom: Dsn
) -> None:
    add_route(source, "mom", quality="at_least_once")
    there = str(broker_id(mom))
    with without_default(app, mom=mom) as cycle:
        send(source, "1", to_broker=broker_id(mom))
        (work,) = cycle.open()
        match = work.routes.match("s", there)
        assert match is not None
        assert [route.quality for route in match.routes] == ["at_least_once"]


def test_a_message_for_a_broker_that_nobody_knows_waits_and_says_who_it_is_for(
    app: Dsn, source: psycopg.Connection[Any], mom: Dsn, new_broker: Broker
) -> None:
    shop = new_broker("shop")
    add_route(source, "mom")
    send(source, "1", "2", key="k", to_broker=broker_id(shop))
    send(source, "neighbour", key="k")
    run(app, mom=mom)
    assert bodies(mom) == ["neighbour"]
    ((lane, (messages, error)),) = lanes(source).items()
    assert (lane, messages) == (f"route for service 's' at broker {broker_id(shop)}", 2)
    assert f"no destination is known to be broker {broker_id(shop)}" in error
    assert f"destination 'mom' is {broker_id(mom)}" in error
    run(app, mom=mom)
    assert count(app, "parked") == 2
    let_time_pass(app)
    run(app, mom=mom)
    assert count(app, "parked") == 2, "tried again when due"
    send(source, "3", key="k", to_broker=broker_id(shop))
    let_time_pass(app)
    run(app, mom=mom, shop=shop)
    assert bodies(shop) == ["1", "2", "3"]
    assert count(app, "parked") == count(app, "backoff") == 0


def test_a_copy_of_a_topic_that_is_for_a_broker_goes_there_alone(
    app: Dsn, source: psycopg.Connection[Any], mom: Dsn, new_broker: Broker
) -> None:
    erp = new_broker("erp")
    add_topic(source, "s")
    for destination in ("mom", "erp"):
        add_route(source, destination, service="s")
    send(source, "for erp", key="k", to_broker=broker_id(erp))
    send(source, "for a stranger", key="k", to_broker=uuid4())
    send(source, "for all", key="k")
    run_unknowing(app, mom=mom, erp=erp)
    assert (bodies(mom), bodies(erp)) == (["for all"], ["for all"])
    let_time_pass(app)
    run(app, mom=mom, erp=erp)
    assert (bodies(mom), bodies(erp)) == (["for all"], ["for all", "for erp"])
    assert count(app, "parked") == 1


# Refused


def test_a_destination_refuses_what_is_for_another_broker_and_the_neighbours_go_on(
    app: Dsn, source: psycopg.Connection[Any], mom: Dsn, new_broker: Broker
) -> None:
    shop = new_broker("shop")
    add_route(source, "mom", service="s")
    for number in range(30):
        to_broker = (broker_id(shop), broker_id(mom), None)[number % 3]
        send(source, str(number), key="k", to_broker=to_broker)
    run_unknowing(app, 7, mom=mom)
    assert bodies(mom) == [str(number) for number in range(30) if number % 3]
    ((lane, (messages, error)),) = lanes(source).items()
    assert (lane, messages) == (f"route for service 's' at broker {broker_id(shop)}", 10)
    assert f"'mom' is broker {broker_id(mom)}, and refuses messages for {broker_id(shop)}" in error
    assert count(app, "dead_letter") == 0
    send(source, "30", key="k", to_broker=broker_id(shop))
    let_time_pass(app)
    run_unknowing(app, 7, mom=mom)
    assert count(app, "parked") == 11, "refused again, in order, and not lost"
    let_time_pass(app)
    run(app, 7, mom=mom, shop=shop)
    assert bodies(shop) == [str(number) for number in range(0, 31, 3)]
    assert count(app, "parked") == count(app, "backoff") == 0


@pytest.mark.parametrize(
    "point", ["mom_insert", "mom_commit", "set_aside", "mark_forwarded", "mark_commit"]
)
@pytest.mark.parametrize("times", [1, 2])
def test_a_crash_while_some_are_refused_loses_and_doubles_nothing(
    app: Dsn,
    source: psycopg.Connection[Any],
    mom: Dsn,
    new_broker: Broker,
    *,
    point: str,
    times: int,
) -> None:
    shop = new_broker("shop")
    add_route(source, "mom", service="s")
    for number in range(12):
        send(source, str(number), key="k", to_broker=broker_id((mom, shop)[number % 2]))
    arm(f"{point}:{times}", crash)
    with pytest.raises(Crash):
        run_unknowing(app, 5, mom=mom)
    run_unknowing(app, 5, mom=mom)
    let_time_pass(app)
    run(app, 5, mom=mom, shop=shop)
    assert bodies(mom) == [str(number) for number in range(0, 12, 2)]
    assert bodies(shop) == [str(number) for number in range(1, 12, 2)]
    assert count(app, "parked") == count(app, "backoff") == 0


def test_what_is_sent_at_most_once_is_refused_and_waits_as_well(
    app: Dsn, source: psycopg.Connection[Any], mom: Dsn, new_broker: Broker
) -> None:
    shop = new_broker("shop")
    add_route(source, "mom", service="s", quality="at_most_once")
    send(source, "shop's", to_broker=broker_id(shop))
    send(source, "mom's", to_broker=broker_id(mom))
    run_unknowing(app, mom=mom)
    assert bodies(mom) == ["mom's"]
    assert (count(app, "parked"), count(app, "dead_letter")) == (1, 0)
    let_time_pass(app)
    run(app, mom=mom, shop=shop)
    assert (bodies(mom), bodies(shop)) == (["mom's"], ["shop's"])


# What is known


def test_a_batch_that_is_read_again_goes_by_what_was_known_when_it_was_opened(
    app: Dsn, source: psycopg.Connection[Any], mom: Dsn, new_broker: Broker
) -> None:
    shop = new_broker("shop")
    send(source, *[str(number) for number in range(10)], key="k", to_broker=broker_id(shop))
    arm("mom_commit:2", crash)
    with without_default(app, 4, mom=mom, shop=shop) as cycle, pytest.raises(Crash):
        cycle.run()
    assert len(bodies(shop)) == 8
    run_unknowing(app, 3, mom=mom, shop=shop)
    assert bodies(shop) == [str(number) for number in range(10)]


def test_a_destination_that_does_not_answer_is_who_it_was_before(
    app: Dsn, source: psycopg.Connection[Any], mom: Dsn, new_broker: Broker
) -> None:
    shop = new_broker("shop")
    add_route(source, "mom")
    send(source, "1", to_broker=broker_id(shop))
    run(app, mom=mom, shop=shop)
    send(source, "2", to_broker=broker_id(shop))
    send(source, "neighbour")
    run(app, mom=mom, shop=NOWHERE)
    assert bodies(mom) == ["neighbour"]
    assert [lane.own for lane in parked(source).shown] == [Lane(destination="shop")]
    let_time_pass(app)
    run(app, mom=mom, shop=shop)
    assert bodies(shop) == ["1", "2"]


def test_what_is_for_a_broker_does_not_wait_while_the_one_destination_of_all_routes_is_down(
    app: Dsn, source: psycopg.Connection[Any], mom: Dsn, new_broker: Broker
) -> None:
    shop = new_broker("shop")
    add_route(source, "mom")
    send(source, "for mom")
    send(source, "a reply", to_broker=broker_id(shop))
    run(app, mom=NOWHERE, shop=shop)
    send(source, "another", to_broker=broker_id(shop))
    run(app, mom=NOWHERE, shop=shop)
    assert bodies(shop) == ["a reply", "another"]
    let_time_pass(app)
    run(app, mom=mom, shop=shop)
    assert bodies(mom) == ["for mom"]


def test_a_destination_that_hangs_is_waited_for_once_and_shortly(mom: Dsn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = Dsn(f"host=127.0.0.1 port={silent.getsockname()[1]} dbname=x")
        identities = Identities(stores(mom=mom, hanging=hanging, down=NOWHERE))
        expected = {"mom": str(broker_id(mom)), "hanging": None, "down": None}
        began = time.monotonic()
        assert identities.known() == expected
        first = time.monotonic() - began
        assert first >= WAIT_SECONDS
        assert identities.known() == expected
        assert time.monotonic() - began - first < WAIT_SECONDS / 2


def test_explain_says_who_a_destination_is_and_why_it_does_not_count(
    source: psycopg.Connection[Any], mom: Dsn, new_broker: Broker
) -> None:
    shop = new_broker("shop")
    add_route(source, "mom", service="s")
    known = {"mom": str(broker_id(mom)), "shop": str(broker_id(shop))}

    def said(broker: UUID) -> tuple[tuple[str, ...], list[str]]:
        one = explain(source, "s", str(broker), identities=known)
        return one.destinations, [verdict.why for verdict in one.verdicts]

    destinations, why = said(broker_id(shop))
    assert destinations == ("shop",)
    assert why == [f"destination 'mom' is another broker, {known['mom']}", "it is that broker"]
    assert said(broker_id(mom)) == (("mom",), ["the most specific match"])
    assert said(UUID(int=1))[0] == ()


def test_at_most_once_goes_to_a_service_that_has_become_known_since_others_wait_for_it(
    app: Dsn, source: psycopg.Connection[Any], mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Learning(PostgresInbox):
        """Gets to know a service after it has refused it."""

        def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
            answer = super().store(chunk, exactly_once=exactly_once)
            if isinstance(answer, Refusal):
                know(mom, "s")
            return answer

    know(mom, "another")
    add_route(source, "mom", service="s")
    add_route(source, "mom", service="s", broker=broker_id(mom), quality="at_most_once")
    send(source, "waits", key="k")
    send(source, "once", key="k", to_broker=broker_id(mom))
    monkeypatch.setattr("saf.destinations.postgresql.inbox.PostgresInbox", Learning)
    run(app, mom=mom)
    assert (bodies(mom), count(app, "parked"), count(app, "dead_letter")) == (["once"], 1, 0)
