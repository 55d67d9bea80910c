"""The planner: which work becomes which tasks."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from saf.database import Dsn
from saf.engine.work import Work
from saf.forwarding.surveys import plan
from saf.log.cursor import Batch
from saf.routing.matching import Routes

NOBODY = UUID(int=0)


def work(broker: str, number: int, shards: list[int], *, much: bool) -> Work:
    batch = Batch(
        log="outbox",
        subscription_id=1,
        owner=NOBODY,
        number=number,
        done="1:1:",
        open="9:9:",
        position=0,
        route_version=1,
        opened_at=datetime(2026, 1, 1, tzinfo=UTC),
        epochs=tuple((shard, 1) for shard in shards),
    )
    return Work(
        broker=broker, source=NOBODY, dsn=Dsn("dbname=x"), batch=batch, routes=Routes(), much=much
    )


@st.composite
def fleets(draw: st.DrawFn) -> list[Work]:
    """Open batches of a few brokers, each of some shards of its own."""
    items = []
    for broker in range(draw(st.integers(1, 12))):
        left = list(range(draw(st.integers(1, 64))))
        number = 0
        while left and number < 4:
            number += 1
            count = draw(st.integers(1, len(left)))
            shards, left = left[:count], left[count:]
            items.append(work(f"b{broker}", number, shards, much=draw(st.booleans())))
    return items


def pieces(items: list[Work]) -> Counter[tuple[str, int]]:
    return Counter((item.broker, shard) for item in items for shard in item.batch.shards)


LIMITS = st.dictionaries(st.sampled_from([f"b{n}" for n in range(12)]), st.integers(1, 8))


@given(fleets(), st.integers(1, 64))
def test_without_limits_every_shard_is_in_exactly_one_task(items: list[Work], slots: int) -> None:
    tasks = plan(items, slots, limits={}, last_turn={})
    assert pieces(tasks) == pieces(items)


@given(fleets(), st.integers(1, 64), LIMITS, st.integers(1, 64))
def test_no_limit_is_passed_no_shard_is_in_two_tasks_and_somebody_works(
    items: list[Work], slots: int, limits: dict[str, int], cap: int
) -> None:
    tasks = plan(items, slots, limits=limits, cap=cap, last_turn={})
    assert 1 <= len(tasks) <= cap
    by_broker = Counter(task.broker for task in tasks)
    assert all(by_broker[name] <= limit for name, limit in limits.items())
    assert not pieces(tasks) - pieces(items)


@given(fleets(), st.integers(1, 64))
def test_little_work_starts_before_deep_backlogs(items: list[Work], slots: int) -> None:
    tasks = plan(items, slots, limits={}, last_turn={})
    assert [task.much for task in tasks] == sorted(task.much for task in tasks)


@given(st.integers(1, 10), st.integers(1, 64))
def test_deep_backlogs_get_as_many_tasks_each_and_fill_the_slots(deep: int, slots: int) -> None:
    items = [work(f"b{n}", 1, list(range(64)), much=True) for n in range(deep)]
    tasks = plan(items, slots, limits={}, last_turn={})
    assert set(Counter(task.broker for task in tasks).values()) == {max(1, slots // deep)}
    # the first of each before the second of any
    assert len({task.broker for task in tasks[:deep]}) == deep


@given(fleets(), LIMITS, st.integers(1, 4))
def test_who_was_left_out_has_a_turn_before_anybody_has_another(
    items: list[Work], limits: dict[str, int], cap: int
) -> None:
    last_turn: dict[str, int] = {}
    brokers = {item.broker for item in items}
    for cycle in range(1, len(brokers) + 1):
        tasks = plan(items, 8, limits=limits, cap=cap, last_turn=last_turn)
        last_turn |= dict.fromkeys({task.broker for task in tasks}, cycle)
    assert set(last_turn) == brokers
