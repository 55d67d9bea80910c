"""Instances of processors: whose they are, and which go."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from saf import Processor
from saf.received import READ, Received
from saf.receiving.processors import Instance, Instances, Processors


class Counting(Processor):
    """Counts nothing."""


def message(key: str | None, shard: int = 7, number: int = 1) -> Received:
    columns: dict[str, Any] = {"key": key, "shard": shard, "message_id": UUID(int=number).bytes}
    return Received(tuple(columns.get(name) for name in READ))


def used(instances: Instances, *keys: str) -> list[Instance]:
    return [instances.use(message(key), 1, Counting) for key in keys]


def test_an_instance_is_that_of_its_key_as_long_as_the_epoch_is_the_same() -> None:
    """Another member may have had the shard in between, and changed what the instance remembers."""
    instances = Instances()
    first = instances.use(message("a"), 1, Counting)
    assert instances.use(message("a"), 1, Counting) is first
    assert instances.use(message("b"), 1, Counting) is not first
    again = instances.use(message("a"), 2, Counting)
    assert again is not first
    assert (again.epoch, again.processor.key, len(instances)) == (2, "a", 2)
    alone = instances.use(message(None), 1, Counting)
    assert alone.processor.key == str(UUID(int=1))


def test_an_instance_that_was_replaced_is_not_thrown_away_with_the_old_one() -> None:
    instances = Instances()
    old = instances.use(message("a"), 1, Counting)
    new = instances.use(message("a"), 2, Counting)
    instances.throw_away([old])
    assert list(instances) == [new]
    instances.throw_away([new])
    assert list(instances) == []


def test_a_turn_is_of_instances_that_are_live_still_and_of_as_many_as_are_asked_for() -> None:
    instances = Instances()
    one, two, three = used(instances, "a", "b", "c")
    instances.let_all_be_due()
    instances.forget("a")
    replaced = instances.use(message("b"), 2, Counting)
    assert instances.due
    assert instances.next_due(1) == [three]
    assert not instances.due
    assert one not in instances
    assert two not in instances
    assert replaced in instances


def test_where_no_instance_is_left_none_has_a_turn() -> None:
    instances = Instances()
    used(instances, "a", "b")
    instances.let_all_be_due()
    instances.clear()
    assert not instances.due


def test_the_least_recently_used_go_first_and_no_more_than_there_are_too_many() -> None:
    instances = Instances()
    one, two, three = used(instances, "a", "b", "c")
    instances.use(message("a"), 1, Counting)
    assert instances.oldest() is two
    assert instances.superfluous(most=1, idle_seconds=1000, limit=9) == [two, three]
    assert instances.superfluous(most=3, idle_seconds=1000, limit=9) == []
    assert instances.superfluous(most=0, idle_seconds=1000, limit=1) == [two]
    two.used_at -= 2000
    assert instances.superfluous(most=3, idle_seconds=1000, limit=9) == [two]
    assert one in instances


def test_the_next_duty_is_that_of_the_output_or_of_an_instance_that_will_be_idle() -> None:
    for output, idle, duty in ((40, 60, 40), (60, 40, 40)):
        runner = Processors("", "billing", Counting, output_seconds=output, idle_seconds=idle)
        runner._look_at = time.monotonic() + 50
        assert 40 < runner._until_next_duty() <= 50
        runner._live.use(message("a"), 1, Counting)
        assert duty - 10 < runner._until_next_duty() <= duty


def test_an_instance_that_was_used_at_a_moment_was_used_since_it() -> None:
    instances = Instances()
    (one,) = used(instances, "a")
    assert instances.used_since(one.used_at) == [one]
    assert instances.used_since(one.used_at + 1e-6) == []
    assert instances.used_since(time.monotonic() - 1000) == [one]


def test_the_page_about_receiving_states_the_defaults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "receiving.md").read_text(encoding="utf-8")
    defaults = inspect.signature(Processors).parameters
    for name in ("idle_seconds", "max_instances"):
        assert f"`{name}` ({defaults[name].default:,.0f})" in page


def test_a_process_waits_until_its_next_duty_and_not_less() -> None:
    """Else it would ask again and again while its instances are idle."""
    runner = Processors("host=/nowhere", "billing", Counting)
    runner._look_at = time.monotonic() + 20
    runner._live.use(message("a"), 1, Counting)
    assert 5 < runner._until_next_duty() <= 10, "the next output"
