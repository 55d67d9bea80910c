"""Planning: turn a cycle's work into tasks, and order them. Pure.

Spark starts tasks in order, as many at a time as it has slots. Little work goes first, because it
ends soon; the rest may then take its time. Deep backlogs share the slots equally among brokers, and
are split among them by shards.

Connections: a task has up to `PER_TASK` to its source (one that reads the batch, one that reads
parked messages, one that marks), besides the driver's own, and one to each destination that it
delivers to. So the number of tasks keeps within a broker's limit, and no more tasks are planned
than a destination's limit allows. Work beyond a cap stays open, and brokers that have waited
longest go first in the next cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest

from saf.engine.work import Work

PER_TASK = 3
PER_DRIVER = 1


def tasks_within(max_connections: int) -> int:
    """Return how many tasks a source's limit on connections allows; at least one.

    >>> tasks_within(4), tasks_within(6), tasks_within(10), tasks_within(31)
    (1, 1, 3, 10)
    """
    return max(1, (max_connections - PER_DRIVER) // PER_TASK)


def plan(
    work: Sequence[Work],
    slots: int,
    *,
    limits: Mapping[str, int],
    cap: int | None = None,
    last_turn: Mapping[str, int],
) -> list[Work]:
    """Return the tasks of a cycle, in the order in which they start.

    Args:
        work: the open work, each broker's oldest first.
        slots: tasks that run at a time.
        limits: for brokers that have a limit, the maximum number of tasks.
        cap: the maximum number of tasks.
        last_turn: for each broker, the cycle in which it last had a task.
    """
    by_broker: dict[str, list[Work]] = {}
    for item in work:
        by_broker.setdefault(item.broker, []).append(item)
    deep = {name for name, items in by_broker.items() if any(item.much for item in items)}
    share = max(1, slots // max(1, len(deep)))

    def turn(name: str) -> tuple[int, int]:
        since, size = last_turn.get(name, -1), int(name in deep)
        return (size, since) if cap is None else (since, size)

    tasks = [
        _split(by_broker[name], share if name in deep else 1, limits.get(name))
        for name in sorted(by_broker, key=turn)
    ]
    # each broker's first task before any broker's second
    in_turns = [task for task in chain.from_iterable(zip_longest(*tasks)) if task is not None]
    if cap is None:
        in_turns.sort(key=lambda task: task.much)
    return in_turns[:cap]


def _split(items: Sequence[Work], share: int, limit: int | None) -> list[Work]:
    """Split one broker's work into about ``share`` tasks, but no more than its limit."""
    share = share if limit is None else min(share, limit)
    parts = max(1, share // len(items))
    tasks = [part for item in items for part in (item.split(parts) if item.much else [item])]
    return tasks[:limit]
