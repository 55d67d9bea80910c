"""Marks of a destination and of its source: which differences say that one of them was set back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from saf.destinations import Chunk
from saf.destinations.marks import AGAIN, MAIN, ONCE, InHand, Mark, Place, compare, reached
from saf.destinations.places import beyond, guarded, last_of, noting, refuse
from saf.errors import Ahead, Behind, Fenced
from saf.log.cursor import Batch
from saf.setaside.lane import NO_BROKER

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
HERE: Place = (MAIN, 7)


def after(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def mark(batch: int, position: int = 0, *, acknowledged: bool = True, **more: Any) -> Mark:
    return Mark(batch=batch, position=position, acknowledged=acknowledged, **more)


def chunk(*ids: int, shard: int = 7, **more: Any) -> Chunk:
    """Messages of one shard, in a batch of shards 7 and 8 with epochs 3 and 4."""
    batch = Batch(
        log="outbox",
        subscription_id=1,
        owner=UUID(int=1),
        number=5,
        done="1:1:",
        open="9:9:",
        position=0,
        route_version=None,
        opened_at=NOON,
        epochs=((7, 3), (8, 4)),
        set_aside_at=more.pop("set_aside_at", {}),
    )
    rows = pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "shard": pa.array([shard] * len(ids), pa.int16()),
            **more.pop("columns", {}),
        }
    )
    return Chunk(source=UUID(int=2), batch=batch, rows=rows, **more)


# What is ahead, and what is behind


@pytest.mark.parametrize("lane", [MAIN, AGAIN, ONCE])
@pytest.mark.parametrize(("batch", "ahead"), [(4, False), (5, True), (6, True)])
def test_an_old_mark_is_trusted_if_its_batch_is_before_the_one_in_hand(
    lane: str, batch: int, ahead: bool
) -> None:
    """Marks that nobody acknowledges: what they say of the batch in hand, another one has said."""
    in_hand = {7: InHand(batch=5, opened_at=NOON)}
    differ = compare({(lane, 7): mark(batch, acknowledged=False)}, {}, in_hand)
    assert bool(differ.ahead) is ahead


def test_an_old_mark_of_messages_that_were_parked_is_trusted_whatever_its_batch_is() -> None:
    """They are in a lane of their own, where other batches' messages are stored later."""
    in_hand = {7: InHand(batch=5, opened_at=NOON)}
    assert compare({("retry", 7): mark(6, acknowledged=False)}, {}, in_hand).ahead == []


def test_a_mark_of_the_batch_in_hand_is_its_own_and_of_one_opened_at_another_time_is_not() -> None:
    in_hand = {7: InHand(batch=5, opened_at=NOON)}
    for opened_at, ahead in ((NOON, False), (after(1), True), (after(-1), True)):
        theirs = {HERE: mark(5, 70, opened_at=opened_at)}
        assert bool(compare(theirs, {}, in_hand).ahead) is ahead


def test_a_mark_of_a_shard_that_the_source_does_not_know_is_ahead() -> None:
    theirs = {HERE: mark(1, 1, acknowledged=False)}
    assert compare(theirs, {}, {}).ahead == [HERE]
    assert compare({HERE: mark(0)}, {}, {}).ahead == []


def test_the_same_number_of_another_opening_is_ahead_and_not_behind() -> None:
    theirs = {HERE: mark(4, 70, opened_at=after(1))}
    differ = compare(
        theirs, {HERE: mark(4, 70, opened_at=NOON)}, {7: InHand(batch=5, opened_at=NOON)}
    )
    assert (differ.ahead, differ.behind) == ([HERE], [])


def test_of_all_places_behind_the_earliest_opening_and_the_first_mark_are_said() -> None:
    theirs = {(MAIN, 8): mark(2, opened_at=after(5)), (MAIN, 9): mark(2, opened_at=after(3))}
    ours = {place: mark(3) for place in (HERE, *theirs)}
    differ = compare(theirs, ours, {})
    assert differ.behind == [HERE, (MAIN, 8), (MAIN, 9)]
    assert differ.since == after(3)
    assert differ.lower is not None
    assert (differ.lower.shard, differ.lower.found.batch) == (7, 0)


def test_a_shard_is_reached_by_the_oldest_of_its_marks() -> None:
    marks = {HERE: mark(2, opened_at=after(5)), ("retry", 7): mark(2, opened_at=after(3))}
    assert reached(marks, [*marks]) == {7: after(3)}
    assert reached(marks, [("retry", 7), HERE]) == {7: after(3)}
    assert reached(marks, [HERE, ("replay", 7), ("retry", 7)]) == {7: None}


# Who may store


@pytest.mark.parametrize(("epoch", "is_fenced"), [(2, False), (3, False), (4, True)])
def test_an_epoch_is_fenced_by_a_newer_one_of_its_shard_alone(epoch: int, is_fenced: bool) -> None:
    """Shard 8 has a higher one, which is not this shard's."""
    epochs = {HERE: epoch, (MAIN, 8): 4}
    if not is_fenced:
        refuse("destination 'mom'", chunk(1), epochs, {})
        return
    with pytest.raises(Fenced) as fenced:
        refuse("destination 'mom'", chunk(1), epochs, {})
    assert fenced.value.shards == [7]


def test_a_mark_of_another_lane_than_the_chunks_says_nothing_of_it() -> None:
    theirs = {HERE: mark(4, 9), ("retry", 7): mark(1)}
    known = {HERE: mark(4, 9), ("retry", 7): mark(2)}
    refuse("destination 'mom'", chunk(1, known=known), {}, theirs)
    with pytest.raises(Behind):
        refuse("destination 'mom'", chunk(1, known={HERE: mark(4, 10)}), {}, theirs)
    with pytest.raises(Ahead):
        refuse("destination 'mom'", chunk(1), {}, {HERE: mark(4, 9)})


def test_what_a_mark_says_was_set_aside_has_to_be_known_of_its_own_shard() -> None:
    theirs = {HERE: mark(0, set_aside_at=NOON)}
    refuse("destination 'mom'", chunk(1, set_aside_at={7: [NOON], 8: []}), {}, theirs)
    for known in ({}, {7: [after(-1)]}, {8: [NOON]}):
        with pytest.raises(Ahead):
            refuse("destination 'mom'", chunk(1, set_aside_at=known), {}, theirs)


def test_a_chunk_of_a_lane_is_guarded_by_the_own_place_of_each_of_its_shards_too() -> None:
    lane = {"kind": ["retry"] * 2, "subject": [""] * 2, "broker": [NO_BROKER.bytes] * 2}
    columns = {name: pa.array(values) for name, values in lane.items()}
    columns["broker"] = columns["broker"].cast(pa.binary())
    assert guarded(chunk(1, 2, columns=columns)) == [(MAIN, 7), ("retry", 7)]
    assert guarded(chunk(1, 2)) == [(MAIN, 7), (MAIN, 8)]


# What is stored already, and how far marks move


@pytest.mark.parametrize(
    ("stored", "left"),
    [
        ((4, 99), [1, 2, 3]),
        ((5, 0), [1, 2, 3]),
        ((5, 2), [3]),
        ((5, 3), []),
        ((6, 0), []),
    ],
)
def test_rows_at_or_below_a_mark_are_stored(stored: tuple[int, int], left: list[int]) -> None:
    rows = chunk(1, 2, 3).rows
    assert beyond(rows, 5, {HERE: stored})["id"].to_pylist() == left
    assert beyond(rows, 5, {(MAIN, 8): (9, 9)})["id"].to_pylist() == [1, 2, 3]
    assert beyond(rows, 5, {("again:", 7): (9, 9)})["id"].to_pylist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("before", "after_"), [((5, 2), (5, 3)), ((5, 4), (5, 4)), ((6, 1), (6, 1))]
)
def test_a_mark_moves_to_the_last_row_and_never_back(
    before: tuple[int, int], after_: tuple[int, int]
) -> None:
    moved = last_of(chunk(1, 3), {HERE: mark(*before)})
    assert {place: one.number for place, one in moved.items()} == {HERE: after_}


def test_a_mark_of_at_most_once_is_not_acknowledged() -> None:
    (moved,) = last_of(chunk(1, prefix=ONCE), {}).values()
    assert not moved.acknowledged
    (moved,) = last_of(chunk(1, prefix=AGAIN), {}).values()
    assert moved.acknowledged


def test_the_last_time_of_setting_aside_is_noted_for_the_chunks_shards_if_it_is_newer() -> None:
    times = {7: [after(1), after(2)], 8: [after(3)]}
    one = chunk(1, set_aside_at=times)
    assert noting(one, {}) == {HERE: Mark(set_aside_at=after(2))}
    assert noting(one, {HERE: mark(4, set_aside_at=after(1))}) == {
        HERE: mark(4, set_aside_at=after(2))
    }
    for newest in (2, 3):
        assert noting(one, {HERE: mark(4, set_aside_at=after(newest))}) == {}
