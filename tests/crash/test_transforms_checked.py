"""Rounds with transforms and with streams, and what the checker finds of bugs in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from saf.broker.services import create_service
from saf.engine.source_session import SourceSession
from saf.engine.work import Receipt
from tests.crash import bugs
from tests.crash.evaluated import run_transforming, transforming_rules
from tests.crash.plan import QUALITIES
from tests.crash.transforms import check_made, watch
from tests.crash.world import World
from tests.destinations import NOWHERE
from tests.pipeline import Cycle, connect


class Transforming(Cycle):
    """A cycle with transforms of all services."""

    def deliver(self) -> list[Receipt]:
        rules = transforming_rules(self.rules, QUALITIES)
        return [
            receipt
            for number, item in enumerate(self.work)
            for receipt in run_transforming(number, item, rules)
        ]


@pytest.fixture
def transformed(world: Callable[[], World], monkeypatch: pytest.MonkeyPatch) -> Callable[[], World]:
    def build() -> World:
        made = world()
        monkeypatch.setattr("tests.crash.world.Cycle", Transforming)
        with connect(made.app) as connection:
            watch(connection)
        return made

    return build


def findings(world: World) -> set[str]:
    stores = [world.mom.conninfo, world.other.conninfo]
    app = world.app.conninfo
    return set(check_made(app, stores, QUALITIES, QUALITIES, world.past).findings)


def a_crash_after_the_store(world: World, point: str = "mom_commit") -> None:
    for service in QUALITIES:
        world.send(f"{service}-0", times=16)
    world.crash(point)
    world.forward(2)


def a_crash_before_the_position_is_committed(world: World) -> None:
    a_crash_after_the_store(world, "mark_forwarded")


def a_store_that_is_down(world: World) -> None:
    for _ in range(3):
        for service in QUALITIES:
            world.send(f"{service}-0", 6)
            world.send(f"{service}-1", poison=True)
        world.forward(other=NOWHERE)
    world.forward(3)


def a_source_that_goes_back(world: World) -> None:
    to_all(world)
    copy = world.backup(world.app)
    to_all(world)
    world.go_back(copy)
    repaired(world)


def a_store_that_goes_back(world: World) -> None:
    to_all(world)
    copy = world.backup(world.mom)
    to_all(world)
    world.store_goes_back(copy)
    repaired(world)


def to_all(world: World) -> None:
    """Messages for each service, forwarded."""
    for service in QUALITIES:
        world.send(f"{service}-0", times=10)
    world.forward()


def repaired(world: World) -> None:
    """What follows a set-back: somebody sends, forwarders refuse, a person repairs."""
    world.send("orders-0")
    world.forward()
    world.repair()
    world.forward(2)


def a_service_that_is_unknown_for_a_while(world: World) -> None:
    with connect(world.mom) as mom:
        create_service(mom, "elsewhere")
    a_store_that_is_down(world)
    with connect(world.mom) as mom:
        for service in QUALITIES:
            create_service(mom, service)
    world.forward(2)


SCENARIOS = (
    a_service_that_is_unknown_for_a_while,
    a_source_that_goes_back,
    a_store_that_goes_back,
    a_crash_after_the_store,
    a_crash_before_the_position_is_committed,
    a_store_that_is_down,
)
PLANTED = [
    (bugs.marks_are_not_compared, a_source_that_goes_back, "lost"),
    (bugs.a_repair_sends_nothing_again, a_store_that_goes_back, "lost"),
    (bugs.results_of_transforms_are_forgotten, a_crash_after_the_store, "unexpected"),
    (
        bugs.what_is_left_out_is_counted_before_the_position,
        a_crash_before_the_position_is_committed,
        "dropped_wrongly",
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_with_transforms_has_no_findings(
    transformed: Callable[[], World], scenario: Callable[[World], None]
) -> None:
    made = transformed()
    scenario(made)
    assert findings(made) == set()


def test_an_answer_that_gets_lost_counts_nothing_twice(
    transformed: Callable[[], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_once, written = SourceSession.__call__, set[str]()

    def answer_lost(self: SourceSession, write: Callable[..., Any]) -> Any:
        name, result = write.__qualname__, write_once(self, write)
        if name.startswith(("Task._settle.", "ParkedLanes.settle.")):
            written.add(name.partition(".")[0])
            return write_once(self, write)
        return result

    monkeypatch.setattr(SourceSession, "__call__", answer_lost)
    made = transformed()
    a_service_that_is_unknown_for_a_while(made)
    assert written == {"Task", "ParkedLanes"}
    assert findings(made) == set()


@pytest.mark.full
@pytest.mark.parametrize(("bug", "scenario", "finding"), PLANTED)
def test_a_planted_bug_of_transforms_is_found(
    transformed: Callable[[], World],
    bug: Callable[[pytest.MonkeyPatch], None],
    scenario: Callable[[World], None],
    finding: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = transformed()
    bug(monkeypatch)
    scenario(made)
    assert finding in findings(made)
