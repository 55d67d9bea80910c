"""Places: the lanes and shards of a chunk's messages, each with a mark of its own.

The functions are pure: they take and return rows and marks. They serve all destinations that keep
marks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations import Chunk, Refusal
from saf.destinations.marks import (
    MAIN,
    NOTHING,
    ONCE,
    InHand,
    Mark,
    Place,
    compare,
    place_name,
    shards_of,
)
from saf.errors import Ahead, AnotherBroker, Behind, Fenced, UnknownService
from saf.setaside.lane_columns import has_lanes, lanes_of


def touched(chunk: Chunk) -> list[Place]:
    """Return the places whose marks a chunk needs.

    In the destination's own lane, these are all shards in hand: the previous owner must be fenced
    even where nothing is stored.
    """
    if not has_lanes(chunk.rows):
        return [(chunk.prefix + MAIN, shard) for shard in sorted(chunk.batch.shards)]
    return places_of(chunk.rows, chunk.prefix)[0]


def guarded(chunk: Chunk) -> list[Place]:
    """Return the places whose epochs a chunk needs, in the order in which they are locked.

    These are the `touched` places, plus the own place of each of their shards. All deliveries from
    a shard meet there: a new owner may bury messages that the previous owner has in hand in one
    lane, or store them from another lane.
    """
    places = touched(chunk)
    return sorted({*places, *((MAIN, shard) for _, shard in places)})


def refuse(
    where: str, chunk: Chunk, epochs: Mapping[Place, int], marks: Mapping[Place, Mark]
) -> None:
    """Raise if a destination must not store a chunk, judging by its epochs and marks.

    ``epochs`` and ``marks`` are those of the `guarded` places. The marks' numbers count only for
    `touched` places.

    Raises:
        Fenced: the destination has met a newer owner.
        Behind: the destination has lost acknowledged messages.
        Ahead: the destination has stored what the source does not know; without marks, if it knows
            of messages that were set aside and the source does not.
    """
    own = dict(chunk.batch.epochs)
    newer = [(lane, shard) for (lane, shard), epoch in epochs.items() if epoch > own[shard]]
    if newer:
        raise Fenced(where, shards_of(newer))
    batch = chunk.batch
    in_hand = {
        shard: InHand(
            batch=batch.number,
            opened_at=batch.opened_at,
            set_aside_at=batch.set_aside_at.get(shard, ()),
        )
        for shard in own
    }
    places = set(touched(chunk))
    known = {place: mark for place, mark in chunk.known.items() if place in places}
    stored = {place: mark for place, mark in marks.items() if place in places}
    difference = compare(stored, known, in_hand)
    if difference.behind:
        raise Behind(where, shards_of(difference.behind), difference.since, difference.lower)
    forgotten = [place for place, mark in marks.items() if in_hand[place[1]].has_forgotten(mark)]
    if forgotten:
        raise Ahead(where, shards_of(forgotten))
    if difference.ahead:
        ahead = {place: marks[place] for place in difference.ahead}
        raise Ahead(where, shards_of(ahead), ahead)


def for_others(rows: pa.Table, identity: UUID) -> list[str]:
    """Return the brokers other than ``identity`` that rows are addressed to."""
    addressed = rows["to_broker"]
    if addressed.null_count == len(addressed):
        return []
    brokers = {UUID(bytes=data) for data in pc.unique(addressed.drop_null()).to_pylist()}
    return sorted(map(str, brokers - {identity}))


def not_for(where: str, identity: UUID, rows: pa.Table, behind: Collection[str]) -> Refusal | None:
    """Return why a destination that knows no services must not store rows; None if it may.

    ``behind`` is the chunk's: messages for these services wait, to keep their order.
    """
    if brokers := for_others(rows, identity):
        return of_brokers(where, str(identity), brokers, rows)
    waiting = sorted({*behind} & {*pc.unique(rows["to_service"]).to_pylist()}) if behind else []
    return of_services(where, waiting, rows) if waiting else None


def of_services(
    where: str,
    services: Sequence[str],
    rows: pa.Table,
    *,
    known: Collection[str] = (),
    broker: str | None = None,
) -> Refusal:
    """Return the refusal of those rows that are for services unknown to a destination.

    ``known`` and ``broker`` are those of `UnknownService`.
    """
    refused = pc.is_in(rows["to_service"], pa.array(services, pa.string()))
    error = UnknownService(where, services, known=known, broker=broker)
    return Refusal(error=error, rows=rows.filter(refused))


def of_brokers(where: str, identity: str, others: Sequence[str], rows: pa.Table) -> Refusal:
    """Return the refusal of those rows that are for brokers other than ``identity``."""
    brokers = pa.array([UUID(other).bytes for other in others], pa.binary())
    refused = pc.is_in(rows["to_broker"], value_set=brokers, skip_nulls=True)
    return Refusal(error=AnotherBroker(where, identity, others), rows=rows.filter(refused))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of judging a chunk at a destination that knows no services."""

    rows: pa.Table
    """Messages that are not stored yet."""
    wrong: Refusal | None
    """Reason why they must not be stored. The epochs rise nevertheless."""
    moved: Mapping[Place, Mark]
    """Marks that move: those of the places of the chunk's messages, and those of `noting`. Empty if
    ``wrong`` is set."""


def judged(
    where: str,
    identity: UUID,
    chunk: Chunk,
    epochs: Mapping[Place, int],
    marks: Mapping[Place, Mark],
    *,
    exactly_once: bool,
) -> Verdict:
    """Judge a chunk by the epochs and marks of its `guarded` places.

    Raises the same errors as `refuse`.
    """
    refuse(where, chunk, epochs, marks)
    rows = chunk.rows
    if exactly_once:
        stored = {place: mark.number for place, mark in marks.items()}
        rows = beyond(rows, chunk.batch.number, stored, chunk.prefix)
    error = not_for(where, identity, rows, chunk.behind)
    return Verdict(rows=rows, wrong=error, moved={} if error else last_of(chunk, marks))


def last_of(chunk: Chunk, marks: Mapping[Place, Mark]) -> dict[Place, Mark]:
    """Return the marks that move when a chunk is stored: those of its messages, and `noting`."""
    rows, answered = chunk.rows, chunk.prefix != ONCE  # no task waits for at_most_once's answer
    if not rows.num_rows:
        return {}
    places, indices = places_of(rows, chunk.prefix)
    last = np.zeros(len(places), np.int64)
    last[indices] = np.arange(rows.num_rows)  # of several rows of a place, the last one stays
    parked = [name for name in ("batch", "opened_at") if name in rows.column_names]
    moved = {}
    for place, row in zip(places, rows.select(["id", *parked]).take(last).to_pylist(), strict=True):
        mark = Mark(
            batch=row.get("batch", chunk.batch.number),
            position=row["id"],
            opened_at=row.get("opened_at", chunk.batch.opened_at),
            acknowledged=answered,
        )
        old = marks.get(place, NOTHING)
        if mark.number <= old.number:
            mark = replace(old, acknowledged=answered)
        moved[place] = replace(mark, set_aside_at=old.set_aside_at)
    return moved | noting(chunk, {**marks, **moved})


def noting(chunk: Chunk, marks: Mapping[Place, Mark]) -> dict[Place, Mark]:
    """Return the marks that do not record yet when messages were last set aside.

    They belong to the destination's own lane, in the shards of the chunk's messages.
    """
    times = chunk.batch.set_aside_at
    if not times:
        return {}
    new = {}
    for shard in times.keys() & {*pc.unique(chunk.rows["shard"]).to_pylist()}:
        mark, newest = marks.get((MAIN, shard), NOTHING), times[shard][-1]
        if mark.set_aside_at is None or mark.set_aside_at < newest:
            new[MAIN, shard] = replace(mark, set_aside_at=newest)
    return new


def beyond(
    rows: pa.Table, number: int, stored: Mapping[Place, tuple[int, int]], prefix: str = ""
) -> pa.Table:
    """Return the rows that are not stored yet.

    ``stored`` is how far each place is stored, as (batch, position); missing places have stored
    nothing. ``number`` is the batch of all rows, unless they have a column ``batch``.
    """
    if not stored or not rows.num_rows:
        return rows
    places, indices = places_of(rows, prefix)
    ids = rows["id"].to_numpy()
    batches = rows["batch"].to_numpy() if "batch" in rows.column_names else np.int64(number)
    marks = np.array([stored.get(place, (0, 0)) for place in places], dtype=np.int64)
    batch, position = marks[indices].T
    fresh = (batches > batch) | ((batches == batch) & (ids > position))
    return rows if fresh.all() else rows.filter(pa.array(fresh))


def places_of(rows: pa.Table, prefix: str) -> tuple[list[Place], npt.NDArray[np.int64]]:
    """Return the places of rows, and for each row the index of its place."""
    shards = rows["shard"].to_numpy().astype(np.int64)
    names = [prefix + MAIN]
    if has_lanes(rows):
        lanes, of_each = lanes_of(rows)
        names = [prefix + place_name(lane) for lane in lanes]
        shards = shards * len(names) + of_each
    codes, indices = np.unique(shards, return_inverse=True)
    return [(names[code % len(names)], int(code) // len(names)) for code in codes], indices
