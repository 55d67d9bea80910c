"""Turns: the order in which a fair receiver hands messages out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from saf.receiving.ahead import progress
from saf.receiving.fair import Plan, Seat, Seen, in_turn
from saf.receiving.hand import Shard

MESSAGES = st.lists(
    st.tuples(
        st.integers(0, 3),  # key, or none
        st.integers(0, 2),  # group
        st.sampled_from([None, 1, 2]),  # class
    ),
    max_size=60,
)
WEIGHTS = [10.0, 0.5]


def seen(messages: Sequence[tuple[int, int, int | None]]) -> list[Seen]:
    return [
        Seen(1, number, 7, key or None, group, class_)
        for number, (key, group, class_) in enumerate(messages, start=1)
    ]


@given(MESSAGES)
def test_messages_of_a_key_stay_in_order_whatever_their_groups_and_classes(
    messages: list[tuple[int, int, int | None]],
) -> None:
    order = in_turn(seen(messages), WEIGHTS)
    assert sorted(one.id for one in order) == list(range(1, len(messages) + 1))
    of_keys: dict[int | None, list[int]] = defaultdict(list)
    for one in order:
        of_keys[one.key].append(one.id)
    assert all(ids == sorted(ids) for key, ids in of_keys.items() if key is not None)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(1, 100))
def test_each_group_has_its_share_of_the_first_messages(sizes: list[int], first: int) -> None:
    """Without keys that tie groups together; a group with less than its share has all of it."""
    messages = [(0, group, None) for group, size in enumerate(sizes) for _ in range(size)]
    got = Counter(one.group for one in in_turn(seen(messages), [])[:first])
    for group, size in enumerate(sizes):
        assert got[group] >= min(size, first // len(sizes))


def test_a_class_gets_a_share_by_its_weight_and_the_lightest_stays_alive() -> None:
    messages = [(0, 0, class_) for class_ in (1, None, 2) for _ in range(1000)]
    got = Counter(one.class_ for one in in_turn(seen(messages), WEIGHTS)[:230])
    assert got == {1: 200, None: 20, 2: 10}


def test_a_plan_knows_what_is_left_of_each_shard_and_leaves_out_dropped_ones() -> None:
    order = [Seen(shard, id_, 7, None, None, None) for shard, id_ in ((1, 4), (2, 3), (1, 2))]
    plan = Plan(order, {1: Seat(batch=1, left=[2, 4]), 2: Seat(batch=1, left=[3])})
    assert [one.id for one in plan.next(1)] == [4]
    assert (plan.shards[1].left, plan.shards[2].left) == ([2], [3])
    del plan.shards[2]
    assert [one.id for one in plan.next(5)] == [2]
    assert plan.shards[1].left == []
    assert plan.is_used_up


IDS = st.sets(st.integers(1, 40))


@given(st.integers(0, 20), IDS, IDS, IDS)
def test_progress_covers_what_was_taken_and_nothing_that_is_left(
    position: int, taken: set[int], complete: set[int], left: set[int]
) -> None:
    """``complete`` were known to be incomplete, and another receiver has taken them since."""
    taken = {id_ for id_ in taken if id_ > position}
    left = {id_ for id_ in left - taken if id_ > position}
    shard = Shard(shard=1, batch=1, position=position, ahead=True, taken=sorted(taken))
    for known in (None, sorted(left | {id_ for id_ in complete if id_ not in taken})):
        shard.left = known
        found = progress(shard)
        covered = {id_ for first, last in found.ranges for id_ in range(first, last + 1)}
        covered |= set(range(found.position + 1))
        assert taken <= covered
        assert not left & covered
        assert found.position >= position
