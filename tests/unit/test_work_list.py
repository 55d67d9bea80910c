"""What follows from a destination's refusal, and in which order the pieces of a part are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saf.destinations import Refusal
from saf.engine.storing import Step, next_step, work_off
from saf.errors import (
    Ahead,
    AnotherBroker,
    Behind,
    Braked,
    Faulty,
    Fenced,
    Refused,
    Rejected,
    SafError,
    Unavailable,
    UnknownService,
)

MOM = "destination 'mom'"
ROW = pa.table({"id": pa.array([1], pa.int64())})

REJECTED = Rejected(MOM, "it is bad")
UNKNOWN = UnknownService(MOM, ["billing"])
ELSEWHERE = AnotherBroker(MOM, "this", ["that"])


@pytest.mark.parametrize(
    ("error", "step", "once"),
    [
        (REJECTED, Step.SPLIT, Step.SPLIT),
        (UNKNOWN, Step.DIVERT, Step.GIVE_UP),
        (ELSEWHERE, Step.DIVERT, Step.DIVERT),
        (Unavailable(MOM, "it is down"), Step.PARK, Step.GIVE_UP),
        (Faulty(MOM, "its client raised"), Step.PARK, Step.GIVE_UP),
        (Refused(MOM, "the login", "fix it"), Step.PARK, Step.GIVE_UP),
        (Behind(MOM, [7]), Step.PARK, Step.GIVE_UP),
        (Braked("mom", 10, "it is bad"), Step.PARK, Step.GIVE_UP),
        (Ahead(MOM, [7]), Step.END, Step.END),
        (Fenced(MOM, [7]), Step.END, Step.END),
        (SafError("unexpected"), Step.END, Step.END),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, SafError) else one.name,
)
def test_what_follows_depends_on_the_error_and_on_whether_the_messages_may_go_again(
    error: SafError, step: Step, once: Step
) -> None:
    refusal = Refusal(error=error, rows=ROW)
    assert next_step(refusal, 2, once=False) is step
    assert next_step(refusal, 2, once=True) is once


@pytest.mark.parametrize("rows", [None, ROW.slice(0, 0)], ids=["whole chunk", "no message"])
@pytest.mark.parametrize("error", [UNKNOWN, ELSEWHERE], ids=["service", "broker"])
def test_a_refusal_that_names_no_message_is_not_tried_for_ever(
    error: SafError, rows: pa.Table | None
) -> None:
    assert next_step(Refusal(error=error, rows=rows), 2, once=False) is Step.END


@pytest.mark.parametrize("messages", [0, 1])
def test_what_is_rejected_alone_is_not_split(messages: int) -> None:
    assert next_step(Refusal(error=REJECTED), messages, once=False) is Step.REJECT


# The list of pieces


def halving(
    bad: set[int], stored: list[int], rejected: list[int]
) -> Callable[[list[int]], Sequence[list[int]]]:
    """Return an attempt at a destination that rejects some messages."""

    def attempt(piece: list[int]) -> Sequence[list[int]]:
        if bad.isdisjoint(piece):
            stored.extend(piece)
            return ()
        if next_step(Refusal(error=REJECTED), len(piece), once=False) is Step.REJECT:
            rejected.extend(piece)
            return ()
        half = len(piece) // 2
        return [piece[:half], piece[half:]]

    return attempt


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_all_but_the_rejected_messages_are_stored_in_their_order(
    messages: int, bad: set[int]
) -> None:
    stored, rejected = list[int](), list[int]()
    left = work_off([*range(messages)], halving(bad, stored, rejected), lambda: False)
    assert not left
    assert stored == [number for number in range(messages) if number not in bad]
    assert rejected == [number for number in range(messages) if number in bad]


@given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.integers(0, 10))
def test_what_is_left_after_a_stop_is_all_that_was_not_tried_in_its_order(
    messages: int, bad: set[int], patience: int
) -> None:
    stored, rejected, asked = list[int](), list[int](), list[None]()

    def stops() -> bool:
        asked.append(None)
        return len(asked) > patience

    left = work_off([*range(messages)], halving(bad, stored, rejected), stops)
    waiting = [number for piece in left for number in piece]
    assert [*sorted(stored + rejected), *waiting] == list(range(messages))


def test_nobody_is_asked_about_a_stop_between_a_refusal_and_what_takes_its_place() -> None:
    """The messages of a refused piece keep their turn; a part of one piece needs no question."""
    answers = {"all": ["rest"], "rest": ()}
    assert work_off("all", lambda piece: answers[piece], lambda: pytest.fail("asked")) == []
