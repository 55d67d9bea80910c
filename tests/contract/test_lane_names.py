"""No two lanes have one name in marks, whatever services are called, and no name changes."""

from __future__ import annotations

from itertools import product
from uuid import UUID, uuid4

import pytest

from saf.database import Dsn, fetch
from saf.destinations.marks import place_name
from saf.setaside.lane import Kind, Lane
from saf.setaside.waiting import parked
from tests.destinations import route
from tests.pipeline import bodies, connect, let_time_pass
from tests.routing import run, send

AT, OTHER = UUID(int=7), UUID("8c0ffee0-0000-4000-8000-00000000000a")


def test_no_two_lanes_have_the_same_name() -> None:
    endings = ["", "@", "@@", *(f"@{one}{more}" for one in (AT, OTHER) for more in ("", "@", "@@"))]
    endings += [f"{one}@{other}" for one, other in product(endings, endings)]
    services = {f"x{ending}" for ending in endings}
    lanes = [
        Lane(kind=kind, subject=service, broker=broker)
        for kind in (Kind.ROUTE, Kind.FOUND_ROUTE)
        for service in services
        for broker in (None, AT, OTHER)
    ]
    lanes += [Lane(kind=Kind.SERVICE, subject=service) for service in services]
    lanes += [Lane(kind=kind) for kind in (Kind.MAIN, Kind.RETRY, Kind.REPLAY, Kind.DOUBT)]
    lanes += [Lane(kind=kind) for kind in (Kind.FOUND_RETRY, Kind.FOUND_REPLAY)]
    assert len({place_name(lane) for lane in lanes}) == len(lanes)


@pytest.mark.parametrize(
    ("lane", "name"),
    [
        (Lane(), ""),
        (Lane(kind=Kind.RETRY), "retry"),
        (Lane(kind=Kind.REPLAY), "replay"),
        (Lane(kind=Kind.DOUBT), "doubt"),
        (Lane(kind=Kind.SERVICE, subject="a:b"), "service:a:b"),
        (Lane(kind=Kind.SERVICE, subject=f"a@{AT}"), f"service:a@{AT}"),
        (Lane(kind=Kind.ROUTE, subject="a@b"), "route:a@b"),
        (Lane(kind=Kind.ROUTE, subject="a", broker=AT), f"route:a@{AT}"),
        (Lane(kind=Kind.FOUND_ROUTE, subject="a"), "found:route:a"),
        (Lane(kind=Kind.FOUND_ROUTE, subject="a", broker=AT), f"found:route:a@{AT}"),
        (Lane(kind=Kind.FOUND_RETRY), "found:retry"),
        (Lane(kind=Kind.FOUND_REPLAY), "found:replay"),
    ],
)
def test_a_lane_is_called_as_the_marks_of_all_destinations_call_it(lane: Lane, name: str) -> None:
    assert place_name(lane) == name


def test_a_service_that_is_called_like_another_one_at_a_broker_has_a_lane_of_its_own(
    app: Dsn, mom: Dsn
) -> None:
    nobody = uuid4()
    named = f"s@{nobody}"
    with connect(app) as source, connect(mom) as store:
        send(source, "to nobody", key="k", to_broker=nobody)
        send(source, "1", service=named, key="k")
        run(app, mom=mom)
        assert {(lane.subject, lane.broker) for lane in parked(source).shown} == {
            ("s", nobody),
            (named, None),
        }
        route(source, named, "mom")
        let_time_pass(app)
        run(app, mom=mom)
        send(source, "2", service=named, key="k")
        run(app, mom=mom)
        assert bodies(mom) == ["1", "2"]
        marks = fetch(store, "SELECT lane FROM saf.watermark WHERE starts_with(lane, 'found')")
        assert marks == [(f"found:route:{named}@",)]
        (left,) = parked(source).shown
        assert (left.subject, left.broker, left.messages) == ("s", nobody, 1)
