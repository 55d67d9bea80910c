"""Marks as application transactions of Delta: names, each with a number that a commit may change.

    saf:SOURCE:7:epoch:           the epoch of shard 7 of a source: in each commit that is about it
    saf:SOURCE:7:batch:LANE       how far shard 7 is stored in a lane,
    saf:SOURCE:7:position:LANE    as `saf.destinations.marks.Mark` says it
    saf:SOURCE:7:opened_at:LANE   microseconds since 1970

A commit fails if another one has given a number to one of its names since the version that it
was made for. So the epoch is written by each commit, whether it changes or not: of two that are
about the same shard, the second one fails, reads again, and finds itself fenced or its messages
stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

from saf.destinations.delta.names import OURS
from saf.destinations.marks import NOTHING, ONCE, Known, Mark, Place

NEVER = -1
"""The number of a time that is not known."""
START = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, kw_only=True)
class State:
    """What a table knows of one source."""

    marks: Mapping[Place, Mark] = field(default_factory=dict)
    epochs: Mapping[int, int] = field(default_factory=dict)


def state_of(source: UUID, numbers: Mapping[str, int]) -> State:
    """Return what transactions say of a source.

    >>> source, at = UUID(int=7), datetime(2026, 1, 31, tzinfo=UTC)
    >>> mark = Mark(batch=2, position=70, opened_at=at, acknowledged=True)
    >>> numbers = dict(transactions(source, {("", 7): mark}, {7: 3}))
    >>> state_of(source, numbers) == State(marks={("", 7): mark}, epochs={7: 3})
    True
    """
    of = f"{OURS}{source}:"
    epochs: dict[int, int] = {}
    said: dict[Place, dict[str, int]] = {}
    for name, number in numbers.items():
        if name.startswith(of):
            shard, what, lane = name.removeprefix(of).split(":", 2)
            if what == "epoch":
                epochs[int(shard)] = number
            else:
                said.setdefault((lane, int(shard)), {})[what] = number
    return State(marks={place: _mark(place[0], one) for place, one in said.items()}, epochs=epochs)


def transactions(
    source: UUID, moved: Mapping[Place, Mark], epochs: Mapping[int, int]
) -> Iterator[tuple[str, int]]:
    """Give the transactions that say marks and epochs."""
    for shard, epoch in epochs.items():
        yield f"{OURS}{source}:{shard}:epoch:", epoch
    for (lane, shard), mark in moved.items():
        moment = (mark.opened_at - START) // MICROSECOND if mark.opened_at else NEVER
        for what, number in (
            ("batch", mark.batch),
            ("position", mark.position),
            ("opened_at", moment),
        ):
            yield f"{OURS}{source}:{shard}:{what}:{lane}", number


def known_of(identity: UUID, state: State) -> Known:
    """Return what a table knows of a source, for repairs."""
    return Known(destination=identity, marks=state.marks, epochs=state.epochs)


def _mark(lane: str, said: Mapping[str, int]) -> Mark:
    if not said.get("batch"):
        return NOTHING
    moment = said["opened_at"]
    opened_at = None if moment == NEVER else START + moment * MICROSECOND
    # nobody waits for the answer to at_most_once; see `saf.destinations.places.last_of`
    answered = not lane.startswith(ONCE)
    return Mark.of(said["batch"], said["position"], opened_at, answered)
