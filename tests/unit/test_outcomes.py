"""Outcomes: what becomes of each message in hand, by what was decided about some of them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saf.received import READ, Received
from saf.receiving.delivery import Delivery
from saf.receiving.hand import EXPIRED, LATE, NOW, UNREAD, Hand, Reader
from saf.receiving.outcome import HANDLED, OVERDUE, UNREADABLE, Dead, Outcome, Parked
from saf.receiving.retries import Policy
from saf.setaside.lane import Kind

READER = Reader(subscription_id=1, name="billing", service="billing")
NOWHERE: Any = psycopg.Connection[Any]


def message(id_: int, key: str = "a") -> Received:
    columns: dict[str, Any] = {
        "id": id_,
        "shard": 7,
        "message_id": UUID(int=id_).bytes,
        "key": key,
        "body": b"12345",
    }
    return Received(tuple(columns.get(name) for name in READ))


def delivery(
    *messages: Received, policy: Policy | None = None, waiting: str = "", **fates: int
) -> Delivery[Any]:
    """A delivery of messages in memory; ``fates`` are by key."""
    hand = Hand(reader=READER, transaction="1", shards={}, waiting=frozenset(waiting))
    for one in messages:
        hand.take(one, fates.get(str(one.key), NOW))
    return Delivery(NOWHERE, NOWHERE, hand, policy or Policy())


def parked(key: str) -> Parked:
    return Parked.of(Kind.KEY, key)


def test_a_message_that_waits_has_the_later_ones_of_its_key_wait_behind_it() -> None:
    first, failed, other, later = (message(id_, key) for id_, key in enumerate("aaba", start=1))
    received = delivery(first, failed, other, later)
    received.park(failed, "no")
    assert received.outcomes() == {
        first: HANDLED,
        failed: parked("a"),
        other: HANDLED,
        later: parked("a"),
    }
    assert received.handled == 2


def test_after_a_dead_letter_its_key_goes_on_unless_the_policy_blocks_it() -> None:
    dead, later = message(1), message(2)
    letter = Dead(reason="failed", error="no", fails=True)
    for policy, after in (Policy(), HANDLED), (Policy(block=True), parked("a")):
        received = delivery(dead, later, policy=policy)
        received.reject(dead, "no")
        assert received.outcomes() == {dead: letter, later: after}


def test_a_message_whose_key_waits_is_not_handed_out() -> None:
    waiting, other = message(1, "a"), message(2, "b")
    received = delivery(waiting, other, waiting="a")
    assert [*received] == [other]
    assert received.outcomes() == {waiting: parked("a"), other: HANDLED}


@pytest.mark.parametrize(
    ("fate", "outcome"),
    [(LATE, Parked.of(Kind.LATER, 7)), (EXPIRED, OVERDUE), (UNREAD, UNREADABLE)],
)
def test_what_is_not_handed_out_has_its_outcome_from_the_start(fate: int, outcome: Outcome) -> None:
    kept, given_out = message(1, "a"), message(2, "b")
    received = delivery(kept, given_out, a=fate)
    assert [*received] == [given_out]
    assert received.outcomes() == {kept: outcome, given_out: HANDLED}


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["handle", "park", "reject"])),
        max_size=12,
    )
)
def test_each_message_has_one_outcome_and_no_key_overtakes_itself(
    decisions: list[tuple[str, str]],
) -> None:
    messages = [message(id_, key) for id_, (key, _) in enumerate(decisions, start=1)]
    chosen = dict(zip(messages, (decision for _, decision in decisions), strict=True))
    received = delivery(*messages)
    for one in received:
        if chosen[one] == "park":
            received.park(one, "no")
        elif chosen[one] == "reject":
            received.reject(one, "no")
    outcomes = received.outcomes()
    assert [*outcomes] == messages
    stopped: set[str | None] = set()
    for one, outcome in outcomes.items():
        if one.key in stopped or chosen[one] == "park":
            stopped.add(one.key)
            assert outcome == parked(str(one.key))
        elif chosen[one] == "reject":
            assert isinstance(outcome, Dead)
        else:
            assert outcome is HANDLED
    assert received.handled == sum(outcome is HANDLED for outcome in outcomes.values())
