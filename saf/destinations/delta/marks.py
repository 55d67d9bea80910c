"""Marks as application transactions of Delta: names, each with a number that a commit may change.

    saf:SOURCE:7:epoch:           the epoch of shard 7 of a source: in each commit for the shard
    saf:SOURCE:7:batch:LANE       how far shard 7 is stored in a lane,
    saf:SOURCE:7:position:LANE    as in `saf.destinations.marks.Mark`
    saf:SOURCE:7:opened_at:LANE   microseconds since 1970, and so is
    saf:SOURCE:7:set_aside_at:LANE

A commit fails if another commit has set one of its numbers since the version that it was made for.
So each commit writes the epoch, whether it changes or not: if two commits concern the same shard,
the second one fails, reads again, and finds itself fenced or its messages stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from uuid import UUID

from saf.destinations.lake.state import State, mark_of, numbers_of
from saf.destinations.marks import Mark, Place

OURS = "saf:"
"""Prefix of the names of saf's application transactions."""


def state_of(source: UUID, numbers: Mapping[str, int]) -> State:
    """Return a source's state from the numbers of transactions.

    >>> from datetime import UTC, datetime
    >>> source, at = UUID(int=7), datetime(2026, 1, 31, tzinfo=UTC)
    >>> mark = Mark(batch=2, position=70, opened_at=at, acknowledged=True)
    >>> numbers = dict(transactions(source, {("", 7): mark}, {7: 3}))
    >>> state_of(source, numbers) == State(marks={("", 7): mark}, epochs={7: 3})
    True
    """
    prefix = f"{OURS}{source}:"
    epochs: dict[int, int] = {}
    places: dict[Place, dict[str, int]] = {}
    for name, number in numbers.items():
        if name.startswith(prefix):
            shard, column, lane = name.removeprefix(prefix).split(":", 2)
            if column == "epoch":
                epochs[int(shard)] = number
            else:
                places.setdefault((lane, int(shard)), {})[column] = number
    marks = {place: mark_of(place[0], **values) for place, values in places.items()}
    return State(marks=marks, epochs=epochs)


def transactions(
    source: UUID, moved: Mapping[Place, Mark], epochs: Mapping[int, int]
) -> Iterator[tuple[str, int]]:
    """Yield the transactions that store marks and epochs."""
    for shard, epoch in epochs.items():
        yield f"{OURS}{source}:{shard}:epoch:", epoch
    for (lane, shard), mark in moved.items():
        for column, number in numbers_of(mark).items():
            yield f"{OURS}{source}:{shard}:{column}:{lane}", number
