"""Explaining: which routes a message would take now, and in words why not the others."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg

from saf.routing.explain import Explanation, explain
from saf.routing.matching import PYTHON
from saf.routing.route_choices import Asker, choose
from saf.routing.routers import add_router
from saf.routing.routes import add_route, add_topic, enable_route


def reasons(found: Explanation) -> dict[str, str]:
    return {one.route.route.destination: one.why for one in found.verdicts if not one.takes}


def test_why_a_route_is_not_taken_is_said(source: psycopg.Connection[Any]) -> None:
    there, elsewhere = uuid4(), UUID(int=7)
    add_route(source, "taken", service="s")
    add_route(source, "wildcard")
    add_route(source, "other service", service="t")
    add_route(source, "other broker", service="s", broker=elsewhere)
    add_route(source, "disabled", service="s")
    enable_route(source, "disabled", service="s", enabled=False)
    add_route(source, "expired", service="s", expires_at=datetime.now(UTC) - timedelta(days=1))
    for broker in (None, str(there)):
        found = explain(source, "s", broker)
        assert found.destinations == ("taken",)
        why = reasons(found)
        assert why["wildcard"] == "less specific than service 's' to 'taken'"
        assert why["other service"] == "for another service, 't'"
        assert why["other broker"] == f"for another broker, {elsewhere}"
        assert why["disabled"] == "disabled"
        assert why["expired"].startswith("expired at ")


def test_of_routes_that_share_a_key_takes_the_one_that_it_has_chosen(
    source: psycopg.Connection[Any],
) -> None:
    for destination in ("a", "b"):
        add_route(source, destination, service="s")
    assert set(explain(source, "s").destinations) == {"a", "b"}
    assert set(explain(source, "s", key="k").destinations) == {"a", "b"}
    with source.transaction():
        choose(source, {Asker("s", None, "k"): ["b"]})
    found = explain(source, "s", key="k")
    assert found.destinations == ("b",)
    assert reasons(found) == {"a": "shares, and key 'k' has chosen 'b'"}


def test_a_topics_message_goes_everywhere_once(source: psycopg.Connection[Any]) -> None:
    add_topic(source, "s")
    for service, destination in (("s", "a"), (None, "a"), (None, "b")):
        add_route(source, destination, service=service)
    found = explain(source, "s")
    assert sorted(found.destinations) == ["a", "b"]
    assert reasons(found) == {
        "a": "the topic goes there by a more specific route, service 's' to 'a'"
    }


def test_a_routers_message_is_not_lost_and_one_without_a_route_is(
    source: psycopg.Connection[Any],
) -> None:
    add_router(source, "departures", PYTHON, "tests.classifiers:by_origin")
    assert not explain(source, "departures").lost
    assert explain(source, "nobody").lost
    assert explain(source, "departures").as_dict()["router"] is True
