"""Shards: the fair share, and the hash behind the shard of a key."""

from __future__ import annotations

import random
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from saf.log.shards import MAX_SHARDS, fair_share, hash64, shard_of

MEMBERS = st.integers(1, 64)
SHARDS = st.integers(1, MAX_SHARDS)


def moves(held: Mapping[str, int], share: Mapping[str, int]) -> int:
    """How many shards change their owner, the free ones not counted."""
    return sum(max(0, held[member] - share[member]) for member in held)


@st.composite
def holdings(draw: st.DrawFn) -> tuple[dict[str, int], int]:
    """Any split of some of the shards among members, the rest being free."""
    shards, members = draw(SHARDS), draw(MEMBERS)
    names = [f"m{number:02}" for number in draw(st.permutations(range(members)))]
    held, left = {}, shards
    for name in names:
        held[name] = draw(st.integers(0, left))
        left -= held[name]
    return held, shards


def balance(held: Mapping[str, int], shards: int, order: list[str]) -> tuple[dict[str, int], int]:
    """Let members act one after the other until nothing moves, as `Member.balance` does."""
    now, moved = dict(held), 0
    free = shards - sum(now.values())
    for _ in range(3):
        for member in order:
            change = fair_share(now, shards)[member] - now[member]
            change = min(change, free)
            moved += max(0, -change)
            now[member] += change
            free -= change
    return now, moved


def test_five_members_own_twenty_of_a_hundred_shards_each() -> None:
    assert fair_share(dict.fromkeys("abcde", 0), 100) == dict.fromkeys("abcde", 20)


def test_a_sixth_member_gets_sixteen_shards_and_exactly_sixteen_move() -> None:
    held = {**dict.fromkeys("abcde", 20), "f": 0}
    share = fair_share(held, 100)
    assert share["f"] == 16
    assert sorted(share.values()) == [16, 16, 17, 17, 17, 17]
    assert sorted(held[member] - share[member] for member in "abcde") == [3, 3, 3, 3, 4]
    assert moves(held, share) == 16


def test_when_the_sixth_leaves_only_its_sixteen_shards_move() -> None:
    held = {"a": 17, "b": 17, "c": 17, "d": 17, "e": 16}
    share = fair_share(held, 100)
    assert share == dict.fromkeys("abcde", 20)
    assert moves(held, share) == 0
    assert sum(share.values()) - sum(held.values()) == 16


def test_nobody_owns_nothing() -> None:
    assert fair_share({}, 64) == {}


def test_more_members_than_shards_leave_some_without() -> None:
    assert fair_share({"a": 2, "b": 0, "c": 0}, 2) == {"a": 1, "b": 1, "c": 0}


def test_shares_differ_by_at_most_one_for_every_number_of_shards_and_members() -> None:
    for members in range(1, 65):
        held = {f"m{number:02}": 0 for number in range(members)}
        for shards in range(1, MAX_SHARDS + 1):
            shares = fair_share(held, shards).values()
            assert max(shares) - min(shares) <= 1
            assert sum(shares) == shards


@given(holdings())
def test_shares_are_fair_and_the_moves_minimal_from_any_holdings(
    given_holdings: tuple[dict[str, int], int],
) -> None:
    held, shards = given_holdings
    share = fair_share(held, shards)
    least, remainder = divmod(shards, len(held))
    assert sorted(share.values()) == [least] * (len(held) - remainder) + [least + 1] * remainder

    # Whoever is above the larger share must give what is above it, and at most `remainder`
    # members may keep that one shard more.
    surplus = sum(max(0, have - least) for have in held.values())
    may_keep = min(remainder, sum(have > least for have in held.values()))
    assert moves(held, share) == surplus - may_keep


@given(holdings(), st.randoms(use_true_random=False))
def test_members_that_balance_in_any_order_end_fair_with_minimal_moves(
    given_holdings: tuple[dict[str, int], int], chance: random.Random
) -> None:
    held, shards = given_holdings
    order = list(held)
    chance.shuffle(order)
    now, moved = balance(held, shards, order)
    assert sum(now.values()) == shards
    assert max(now.values()) - min(now.values()) <= 1
    assert moved == moves(held, fair_share(held, shards))


@given(MEMBERS, SHARDS, st.randoms(use_true_random=False))
def test_one_more_member_takes_only_its_own_share_whoever_acts_first(
    members: int, shards: int, chance: random.Random
) -> None:
    before = fair_share({f"m{number:02}": 0 for number in range(members)}, shards)
    held = {**before, "new": 0}
    order = list(held)
    chance.shuffle(order)
    now, moved = balance(held, shards, order)
    assert moved == now["new"] == shards // (members + 1)


@given(st.dictionaries(st.text("abcdef", min_size=1), st.integers(0, 20), min_size=1), SHARDS)
def test_every_member_works_out_the_same_shares(held: dict[str, int], shards: int) -> None:
    other_order = dict(sorted(held.items(), reverse=True))
    assert fair_share(held, shards) == fair_share(other_order, shards)


@given(st.text(), SHARDS)
def test_a_shard_is_one_of_the_shards(key: str, shards: int) -> None:
    assert 0 <= shard_of(key, shards) < shards


@given(st.binary())
def test_the_hash_is_a_signed_64_bit_integer(data: bytes) -> None:
    assert -(1 << 63) <= hash64(data) < 1 << 63


def test_keys_spread_over_all_shards_about_evenly() -> None:
    counts = [0] * 64
    for number in range(64_000):
        counts[shard_of(f"order-{number}", 64)] += 1
    assert min(counts) > 850
    assert max(counts) < 1150
