"""The checker finds what is wrong: planted bugs, each with the scenario that brings it out.

Each scenario is run as it is, and must come out clean, and then with its bug.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from saf.engine.source_session import SourceSession
from saf.engine.storing import Storing
from saf.errors import Fenced
from saf.operating.maintenance import purge_broker
from tests.crash import bugs
from tests.crash.checker import Verdict
from tests.crash.sources import compare
from tests.crash.world import World
from tests.crash.writers import count_up
from tests.destinations import NOWHERE
from tests.dying import Crash
from tests.pipeline import connect

# Scenarios


def a_crash_after_the_store(world: World) -> None:
    world.send(times=5)
    world.crash("mom_commit")
    world.forward()


def a_crash_before_the_store(world: World) -> None:
    world.send(times=5)
    world.crash("mom_insert")
    world.forward()


def a_late_committer(world: World) -> None:
    with world.late("orders-0"):
        world.send("orders-1", 3)
        world.forward()
    world.forward()


def a_commit_during_a_batch(world: World) -> None:
    world.send(times=3)
    with world.cycle() as cycle:
        cycle.open()
        receipts = cycle.deliver()
        world.send(times=2)
        cycle.close(receipts)
    world.forward()


def a_store_that_is_down(world: World) -> None:
    for _ in range(3):
        world.send("orders-0")
        world.send("audit-0", 2)
    world.forward(other=NOWHERE)
    world.forward(2)


def a_poison_message(world: World) -> None:
    world.send(times=2)
    world.send(poison=True)
    world.send(times=2)
    world.forward()


def a_crash_after_a_poison_message(world: World) -> None:
    world.send(times=2)
    world.send(poison=True)
    world.send(times=2)
    world.crash("mark_forwarded")
    world.forward()


def a_commit_at_the_source_without_answer(world: World) -> None:
    source_session = SourceSession.__call__

    def twice(self: SourceSession, write: Callable[[psycopg.Connection[Any]], Any]) -> Any:
        source_session(self, write)
        return source_session(self, write)

    world.patch.setattr(SourceSession, "__call__", twice)
    a_poison_message(world)


def at_most_once_and_a_crash(world: World) -> None:
    world.send("metrics-0", 3)
    world.crash("mom_commit")
    world.forward()


def at_most_once_and_a_pause_before_the_store(world: World) -> None:
    world.send("metrics-0")
    deliver = Storing.deliver
    paused: list[bool] = []

    def after_a_pause(self: Storing, *arguments: Any) -> None:
        if not paused:
            paused.append(True)
            world.take_over()
            world.send("metrics-0")
            world.forward()
        deliver(self, *arguments)

    world.patch.setattr(Storing, "deliver", after_a_pause)
    world.forward()


def a_pause_before_the_mark_and_a_late_committer(world: World) -> None:
    source_session = SourceSession.__call__
    marks: list[Callable[[], None]] = []

    def paused(self: SourceSession, write: Callable[[psycopg.Connection[Any]], Any]) -> Any:
        if not write.__qualname__.endswith("settle") or marks:
            return source_session(self, write)

        def mark() -> None:
            with suppress(Fenced):
                source_session(self, write)
            self.close()

        marks.append(mark)
        world.take_over()
        raise Crash

    world.patch.setattr(SourceSession, "__call__", paused)
    with world.late("orders-0"):
        world.send("orders-1", 3)
        with suppress(Crash):
            world.forward()
    with world.cycle() as new:
        new.open()
        marks[0]()
    world.forward()


def a_purge_of_what_is_pending(world: World) -> None:
    world.send(times=3)
    with connect(world.app) as connection:
        for _ in range(2):
            purge_broker(connection, retention_seconds=0, rotate_after_seconds=0.001)
    world.forward()


def a_rollback(world: World) -> None:
    with world.app.connect(role="test") as connection:
        count_up(connection, world.outbox, "orders-0")
        connection.rollback()
    world.forward()


def a_crash_after_the_store_of_a_talk(world: World) -> None:
    for _ in range(3):
        world.talk()
    world.crash("mom_commit")
    world.forward()
    world.hear()


PLANTED = [
    (bugs.repeats_in_a_dialog_taken, a_crash_after_the_store_of_a_talk, "duplicated"),
    (
        bugs.a_drop_counted_for_another_reason,
        a_crash_after_the_store_of_a_talk,
        "dropped_wrongly",
    ),
    (bugs.a_drop_counted_twice, a_crash_after_the_store_of_a_talk, "dropped_wrongly"),
    (bugs.watermark_not_moved, a_crash_after_the_store, "duplicated"),
    (bugs.watermark_moved_and_a_row_not_stored, a_crash_after_the_store, "lost"),
    (bugs.marked_before_sent, a_crash_before_the_store, "lost"),
    (bugs.no_fence_at_the_destination, at_most_once_and_a_pause_before_the_store, "out_of_order"),
    (bugs.no_fence_at_the_source, a_pause_before_the_mark_and_a_late_committer, "lost"),
    (bugs.id_used_as_cursor, a_late_committer, "lost"),
    (bugs.transactions_in_progress_forgotten, a_late_committer, "lost"),
    (bugs.done_is_the_snapshot_of_now, a_commit_during_a_batch, "lost"),
    (bugs.read_in_no_order, a_commit_during_a_batch, "out_of_order"),
    (bugs.moved_past_a_chunk_that_failed, a_store_that_is_down, "lost"),
    (bugs.parked_messages_forgotten, a_store_that_is_down, "lost"),
    (bugs.a_lane_released_in_no_order, a_store_that_is_down, "out_of_order"),
    (bugs.purged_without_the_check, a_purge_of_what_is_pending, "lost"),
    (bugs.neighbours_rejected_too, a_poison_message, "dead_wrongly"),
    (bugs.a_rejected_message_below_the_watermark, a_crash_after_a_poison_message, "lost"),
    (bugs.set_aside_twice, a_commit_at_the_source_without_answer, "dead_wrongly"),
    (bugs.attempts_forgotten, at_most_once_and_a_crash, "duplicated"),
    (bugs.sent_outside_of_the_transaction, a_rollback, "unexpected"),
]


@pytest.mark.full
@pytest.mark.parametrize("scenario", list(dict.fromkeys(scenario for _, scenario, _ in PLANTED)))
def test_a_scenario_without_a_bug_has_no_findings(
    world: Callable[[], World], scenario: Callable[[World], None]
) -> None:
    made = world()
    scenario(made)
    assert made.findings() == set()


@pytest.mark.full
@pytest.mark.parametrize(("bug", "scenario", "finding"), PLANTED)
def test_a_planted_bug_is_found(
    world: Callable[[], World],
    bug: Callable[[pytest.MonkeyPatch], None],
    scenario: Callable[[World], None],
    finding: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = world()
    bug(monkeypatch)
    scenario(made)
    assert finding in made.findings()


def test_what_a_topic_has_once_and_an_inbox_twice_or_not_is_found() -> None:
    verdict = Verdict()
    compare(Counter(["a", "b", "b", "c"]), Counter(["a", "a", "b", "c"]), verdict)
    assert (verdict.lost, verdict.duplicated) == (["b"], ["a"])
