"""Replicas of a routing service that are killed anywhere: nothing lost, nothing twice, in order."""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable

import pytest

import saf
from saf.database import Dsn, fetch
from tests.dialogs import SHOP, receive
from tests.hub import DEPARTURES, Hub, replica
from tests.pipeline import connect
from tests.processes import start, wait
from tests.receivers import dead, let_the_server_notice, waiting
from tests.tiers import sized

POINTS = (
    *("receive_read", "receive_handled", "receive_settled", "receive_committed"),
    "attempt_counted",
)
DIALOGS, KEYS, ROUNDS, EACH = 12, 6, 3, 5


@pytest.fixture(params=["forward", "redirect"])
def hub(request: pytest.FixtureRequest, new_broker: Callable[[str], Dsn]) -> Hub:
    return Hub.at(new_broker, request.param)


def let_it_die(hub: Hub, chance: random.Random) -> int:
    """Two replicas at once, again and again, until nothing is left; return how many were killed."""
    killed = 0
    for turn in range(100):
        points = [f"{chance.choice(POINTS)}:{chance.randint(1, 5)}" for _ in range(2)]
        processes = [start(replica, hub.hub, failpoint=p if turn < 2 else "") for p in points]
        codes = [wait(process) for process in processes]
        assert set(codes) <= {0, -signal.SIGKILL}
        killed += codes.count(-signal.SIGKILL)
        let_the_server_notice(hub.hub)
        with connect(hub.hub) as connection:
            ((failed,),) = fetch(connection, "SELECT count(allowance) FROM saf.cursor")
        if turn >= 2 and not failed and not waiting(hub.hub):
            return killed
        time.sleep(0.05)
    raise AssertionError("it does not come to an end")


def by_conversation(messages: list[saf.Received]) -> dict[object, list[str]]:
    found: dict[object, list[str]] = defaultdict(list)
    for one in messages:
        found[one.conversation_id or one.key].append(one.text())
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2][: sized(1, 2)])
def test_replicas_that_are_killed_anywhere_lose_and_repeat_nothing_and_keep_the_order(
    hub: Hub, seed: int
) -> None:
    chance, killed, number = random.Random(seed), 0, 0
    airports = {"EWR": hub.ewr, "JFK": hub.jfk}
    with hub.app.connect(role="test") as connection:
        dialogs = [
            saf.begin_dialog(connection, from_service=SHOP, to_service=DEPARTURES)
            for _ in range(DIALOGS)
        ]
    where = dict(zip(dialogs, ["EWR", "JFK"] * DIALOGS, strict=False))
    heard: dict[str, list[saf.Received]] = {name: [] for name in airports}
    answers: list[saf.Received] = []

    def answer(connection: object, message: saf.Received) -> None:
        if message.dialog is not None:
            message.dialog.send(connection, message.body)  # type: ignore[arg-type] # psycopg's

    for round_ in range(ROUNDS):
        with hub.app.connect(role="test") as connection:
            for number in range(round_ * EACH, (round_ + 1) * EACH):
                for one in dialogs:
                    one.send(connection, f"{number}" if number else where[one])
                for key in range(KEYS):
                    name = ("EWR", "JFK")[key % 2]
                    saf.Outbox().send(connection, DEPARTURES, name, key=f"{name} {key}")
        hub.forward()
        killed += let_it_die(hub, chance)
        hub.forward()
        for name, dsn in airports.items():
            heard[name] += receive(dsn, name, answer)
        hub.forward()
        killed += let_it_die(hub, chance)
        hub.forward()
        answers += receive(hub.app, SHOP)
    assert killed > 0
    said = [str(number) for number in range(1, number + 1)]
    assert by_conversation(answers) == {one.conversation_id: [where[one], *said] for one in dialogs}
    for name in airports:
        expected = [[name, *said]] * (DIALOGS // 2) + [[name] * len(said) + [name]] * (KEYS // 2)
        assert sorted(by_conversation(heard[name]).values()) == sorted(expected)
        assert all(str(one.key).startswith(name) for one in heard[name] if not one.dialog)
    assert dead(hub.hub) == []


@pytest.mark.full
@pytest.mark.slow
def test_two_replicas_share_the_work_and_neither_direction_waits_for_ever(hub: Hub) -> None:
    with hub.app.connect(role="test") as connection:
        dialogs = [
            saf.begin_dialog(connection, from_service=SHOP, to_service=DEPARTURES)
            for _ in range(20)
        ]
        for one in dialogs:
            one.send(connection, "EWR")
    hub.carry()
    mine = {one.dialog for one in receive(hub.ewr, "EWR") if one.dialog}
    for round_ in range(3):
        for dsn, ends in ((hub.app, dialogs), (hub.ewr, mine)):
            with dsn.connect(role="test") as connection:
                for one in ends:
                    for number in range(5):
                        one.send(connection, f"{round_} {number}")
        hub.forward()
        # what goes one way is in other shards than what comes back of the same dialogs
        processes = [start(replica, hub.hub) for _ in range(3)]
        assert [wait(process) for process in processes] == [0, 0, 0]
        hub.forward()
    expected = [f"{round_} {number}" for round_ in range(3) for number in range(5)]
    for dsn, service in ((hub.app, SHOP), (hub.ewr, "EWR")):
        said = by_conversation(receive(dsn, service))
        assert list(said.values()) == [expected] * 20
    assert (dead(hub.hub), waiting(hub.hub)) == ([], [])
