"""The checker finds what is wrong after set-backs, at receivers and at hubs: planted bugs.

Each scenario is run as it is, and must come out clean, and then with its bug.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from saf.database import Dsn
from saf.routing_service import RoutingService
from tests.crash import bugs, hostile
from tests.crash.consumers import POLICY
from tests.crash.talks import COUNTER
from tests.crash.world import World
from tests.crash.writers import TABLES
from tests.pipeline import connect

PATIENT = 300
"""How often the hostile writer does something."""


def a_source_that_goes_back(world: World) -> None:
    world.send(times=3)
    world.forward()
    copy = world.backup(world.app)
    world.send(times=2)
    world.forward()
    world.go_back(copy)
    world.send()
    world.forward()
    world.repair()
    world.forward(2)


def a_store_that_goes_back(world: World) -> None:
    world.send(times=3)
    world.forward()
    copy = world.backup(world.mom)
    world.send(times=2)
    world.forward()
    world.store_goes_back(copy)
    world.send()
    world.forward()
    world.repair()
    world.forward(2)


def a_receiver_in_a_batch(world: World) -> None:
    world.send(times=3)
    world.forward()
    world.consume(5)


def a_talk_by_a_hub(world: World) -> None:
    assert world.hub is not None
    for _ in range(2):
        world.talk()
        world.forward(hub0=world.hub)
        RoutingService(world.hub, COUNTER, policy=POLICY).drain()
        world.carry(world.hub)
        world.hear()
        RoutingService(world.hub, COUNTER, policy=POLICY).drain()
        world.carry(world.hub)
        world.hear()


def a_poison_message(world: World) -> None:
    world.send(poison=True)
    world.forward()


PLANTED = [
    (bugs.marks_are_not_compared, a_source_that_goes_back, "lost"),
    (bugs.a_repair_does_not_go_on_after_what_destinations_know, a_source_that_goes_back, "left"),
    (bugs.a_repair_sends_nothing_again, a_store_that_goes_back, "lost"),
    (bugs.a_receiver_forgets_how_far_it_got, a_receiver_in_a_batch, "received_wrongly"),
    (bugs.a_hub_passes_nothing_on, a_talk_by_a_hub, "lost"),
    (bugs.dead_for_another_reason, a_poison_message, "dead_wrongly"),
]


@pytest.fixture
def with_hub(
    world: Callable[[], World], new_broker: Callable[[str], Dsn]
) -> Callable[[Callable[[World], None]], World]:
    def build(scenario: Callable[[World], None]) -> World:
        made = world()
        if scenario is a_talk_by_a_hub:
            made.hub = new_broker("hub")
        return made

    return build


@pytest.mark.full
@pytest.mark.parametrize("scenario", list(dict.fromkeys(scenario for _, scenario, _ in PLANTED)))
def test_a_scenario_without_a_bug_has_no_findings(
    with_hub: Callable[[Callable[[World], None]], World], scenario: Callable[[World], None]
) -> None:
    made = with_hub(scenario)
    scenario(made)
    assert made.findings() == set()


@pytest.mark.full
@pytest.mark.parametrize(("bug", "scenario", "finding"), PLANTED)
def test_a_planted_bug_is_found(
    with_hub: Callable[[Callable[[World], None]], World],
    bug: Callable[[pytest.MonkeyPatch], None],
    scenario: Callable[[World], None],
    finding: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = with_hub(scenario)
    bug(monkeypatch)
    scenario(made)
    assert finding in made.findings()


@pytest.mark.parametrize("may_read", [False, True])
def test_what_a_hostile_writer_may_do_without_the_right_to_is_found(
    app: Dsn, may_read: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if may_read:
        bugs.a_writer_may_read(monkeypatch)
    allowed, chance = tmp_path / "allowed", random.Random(7)
    allowed.write_text("")
    with connect(app) as connection:
        connection.execute(TABLES)
        connection.execute(hostile.CREATE)
        hostile.admit(connection)
    with psycopg.connect(make_conninfo(app.conninfo, user=hostile.ROLE)) as connection:
        monkeypatch.setattr(hostile, "IDLE_SECONDS", 0.0)
        for _ in range(PATIENT):
            hostile.do_something(connection, chance, allowed)
    tried = set(allowed.read_text().splitlines())
    assert tried == ({hostile.FORBIDDEN[0]} if may_read else set())
