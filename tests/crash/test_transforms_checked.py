"""Rounds with transforms and with streams, and what the checker finds of bugs in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
    return set(check_made(world.app.conninfo, stores, QUALITIES, QUALITIES).findings)


def a_crash_after_the_store(world: World) -> None:
    for service in QUALITIES:
        world.send(f"{service}-0", times=16)
    world.crash("mom_commit")
    world.forward(2)


def a_store_that_is_down(world: World) -> None:
    for _ in range(3):
        for service in QUALITIES:
            world.send(f"{service}-0", 6)
            world.send(f"{service}-1", poison=True)
        world.forward(other=NOWHERE)
    world.forward(3)


SCENARIOS = (a_crash_after_the_store, a_store_that_is_down)
PLANTED = [(bugs.results_of_transforms_are_forgotten, a_crash_after_the_store, "unexpected")]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_with_transforms_has_no_findings(
    transformed: Callable[[], World], scenario: Callable[[World], None]
) -> None:
    made = transformed()
    scenario(made)
    assert findings(made) == set()


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
