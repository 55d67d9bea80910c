"""Ways: where routes lead, for any routes and any message."""

from __future__ import annotations

from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saf.engine.parts import share
from saf.engine.resolving import Matcher
from saf.routing.matching import Match, Route, Routes, by_precedence
from saf.routing.route_choices import Asker

SERVICES = ["billing", "shipping", "é", ""]
BROKERS = [str(UUID(int=number)) for number in range(3)]
DESTINATIONS = ["mom", "erp", "crm"]

services = st.sampled_from(SERVICES)
brokers = st.none() | st.sampled_from(BROKERS)
a_route = st.builds(
    Route,
    service=st.none() | st.sampled_from(SERVICES[:2]),
    broker=st.none() | st.sampled_from(BROKERS[:2]),
    destination=st.sampled_from(DESTINATIONS),
)
some_routes = st.builds(
    lambda routes, fallback, topics, brokers: Routes(
        routes=tuple(by_precedence([*routes, *([fallback] if fallback else [])])),
        topics=topics,
        brokers=brokers,
    ),
    st.lists(a_route, unique=True),
    st.none() | st.just(Route(destination="default", fallback=True)),
    st.frozensets(st.sampled_from(SERVICES)),
    # each is another broker
    st.permutations(BROKERS).flatmap(
        lambda brokers: st.lists(st.sampled_from(DESTINATIONS), unique=True).map(
            lambda names: dict(zip(names, brokers, strict=False))
        )
    ),
)
messages = st.lists(st.tuples(services, brokers, st.none() | st.sampled_from("abc")), min_size=1)


def as_table(rows: list[tuple[str, str | None, str | None]]) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(range(100, 100 + len(rows)), pa.int64()),
            "to_service": pa.array([service for service, _, _ in rows], pa.string()),
            "to_broker": pa.array([b and UUID(b).bytes for _, b, _ in rows], pa.binary()),
            "key": pa.array([key for _, _, key in rows], pa.string()),
        }
    )


def matching(routes: Routes, service: str, broker: str | None) -> list[Route]:
    """The routes that count: of a message for a broker, those that may lead there."""
    found = [route for route in routes.routes if route.matches(service, broker)]
    if broker is not None:
        there = [name for name, one in routes.brokers.items() if one == broker]
        known = there or [r.destination for r in found if r.destination not in routes.brokers]
        found = [route for route in found if route.destination in known]
        if there and not found:
            return [Route(broker=broker, destination=there[0])]
    return [r for r in found if not r.fallback] or found


@given(some_routes, services, brokers)
def test_an_ordinary_services_way_is_all_of_the_most_specific_matches(
    routes: Routes, service: str, broker: str | None
) -> None:
    found = matching(routes, service, broker)
    match = routes.match(service, broker)
    if not found:
        assert match is None
    elif service not in routes.topics:
        assert match is not None
        best = max(route.specificity for route in found)
        assert set(match.routes) == {route for route in found if route.specificity == best}
        assert not match.to_all


@given(some_routes, services, brokers)
def test_what_is_for_a_broker_that_is_known_goes_there_and_never_to_another_one(
    routes: Routes, service: str, broker: str | None
) -> None:
    match = routes.match(service, broker)
    if broker in routes.brokers.values():
        assert match is not None
        assert {routes.brokers.get(name) for name in match.destinations} == {broker}
    elif broker is not None and match is not None:
        assert not {*match.destinations} & {*routes.brokers}


@given(some_routes, services, brokers)
def test_a_topics_way_is_every_destination_that_matches_once_by_its_most_specific_route(
    routes: Routes, service: str, broker: str | None
) -> None:
    found = matching(routes, service, broker)
    match = routes.match(service, broker)
    if found and broker is not None and broker not in routes.brokers.values():
        assert match is None or not match.to_all, "at most one of them is that broker"
    elif found and service in routes.topics:
        assert match is not None
        assert not match.shared
        assert sorted(match.destinations) == sorted({route.destination for route in found})
        for route in match.routes:
            same = [one for one in found if one.destination == route.destination]
            assert route.specificity == max(one.specificity for one in same)


def test_a_topics_destination_has_the_quality_of_its_most_specific_route() -> None:
    given = [
        Route(destination="erp", quality="at_least_once"),
        Route(service="billing", destination="erp", quality="at_most_once"),
        Route(service="billing", destination="crm"),
    ]
    routes = Routes(routes=tuple(by_precedence(given)), topics=frozenset({"billing"}))
    match = routes.match("billing", None)
    assert match is not None
    qualities = {route.destination: route.quality for route in match.routes}
    assert qualities == {"erp": "at_most_once", "crm": None}


@pytest.mark.parametrize("broker", [None, BROKERS[0]])
def test_the_default_destination_is_in_no_topics_match_beside_others(broker: str | None) -> None:
    default = Route(destination="default", fallback=True)
    routes = Routes(
        routes=tuple(
            by_precedence([default, Route(service="billing", broker=broker, destination="erp")])
        ),
        topics=frozenset({"billing", "shipping"}),
    )
    for_billing, for_shipping = (routes.match(one, broker) for one in ("billing", "shipping"))
    assert (for_billing and for_billing.destinations) == ("erp",)
    assert (for_shipping and for_shipping.destinations) == ("default",)


@given(some_routes, messages)
def test_a_chunk_is_routed_as_each_of_its_messages_would_be(
    routes: Routes, rows: list[tuple[str, str | None, str | None]]
) -> None:
    matcher = Matcher(routes)
    numbers = matcher.route(as_table(rows))["route"].to_pylist()
    matches = [None if number is None else matcher.matches[number] for number in numbers]
    assert matches == [routes.match(service, broker) for service, broker, _ in rows]


@given(some_routes, messages)
def test_each_message_of_a_chunk_that_is_shared_takes_one_route_of_its_way(
    routes: Routes, rows: list[tuple[str, str | None, str | None]]
) -> None:
    matcher = Matcher(routes)
    asked: list[Asker] = []

    def choose(among: dict[Asker, tuple[str, ...]]) -> dict[Asker, str]:
        asked.extend(among)
        return {asker: max(destinations) for asker, destinations in among.items()}

    before = matcher.route(as_table(rows))
    after = share(before, matcher.matches, choose)  # type: ignore[arg-type] # a stricter dict
    assert after.drop_columns(["route"]) == before.drop_columns(["route"])
    assert len(asked) == len(set(asked)), "each key once"
    for row in after.to_pylist():
        service, broker, key = rows[row["id"] - 100]
        match = routes.match(service, broker)
        taken: Match | None = None if row["route"] is None else matcher.matches[row["route"]]
        if match is None or not match.shared:
            assert taken == match
        elif key is None:
            assert taken == Match(routes=(match.routes[row["id"] % len(match.routes)],))
        else:
            assert Asker(service, broker, key) in asked
            assert taken is not None
            assert taken.destinations == (max(match.destinations),)


def test_a_key_that_two_services_have_takes_a_route_of_each_service() -> None:
    given = [
        Route(service=s, destination=f"{s} {n}") for s in ("billing", "shipping") for n in "12"
    ]
    matcher = Matcher(Routes(routes=tuple(by_precedence(given))))
    before = matcher.route(as_table([("billing", None, "k"), ("shipping", None, "k")]))
    choose = lambda among: {asker: max(names) for asker, names in among.items()}  # noqa: E731
    after = share(before, matcher.matches, choose)
    taken = [matcher.matches[number].destinations for number in after["route"].to_pylist()]
    assert taken == [("billing 2",), ("shipping 2",)]
