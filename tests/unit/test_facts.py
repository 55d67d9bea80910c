"""What an end of a dialog takes, drops and waits for, by what it knows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from saf.dialogs.facts import Facts, Verdict, judge
from saf.dialogs.statements import END, ERROR, TIMER, Code
from saf.received import READ, Received

TAKE, DROP, WAIT = Verdict.TAKE, Verdict.DROP, Verdict.WAIT
AT_FIVE = Facts(receive_sequence=5)
FAILED = replace(AT_FIVE, error_code=7, error_text="no")
WAKE = UUID(int=3)


def message(
    sequence: int | None, type_: str = "Said", body: bytes = b"", number: int = 1
) -> Received:
    columns: dict[str, Any] = {
        "sequence": sequence,
        "message_type": type_,
        "body": body,
        "message_id": UUID(int=number).bytes,
    }
    return Received(tuple(columns.get(name) for name in READ))


def error(code: object, sequence: int | None = 6, text: str = "no") -> Received:
    return message(sequence, ERROR, json.dumps({"code": code, "text": text}).encode())


def verdict(
    facts: Facts, one: Received, *, ended_here: bool = False, over: bool = False
) -> Verdict:
    return judge(facts, one, ended_here=ended_here, over=over)[0]


def test_only_the_next_number_is_taken() -> None:
    verdicts = [verdict(AT_FIVE, message(number)) for number in (4, 5, 6, 7, 8)]
    assert verdicts == [DROP, DROP, TAKE, WAIT, WAIT]
    assert judge(AT_FIVE, message(6), ended_here=False, over=False)[1].receive_sequence == 6
    for number in (5, 7):
        assert judge(AT_FIVE, message(number), ended_here=False, over=False)[1] == AT_FIVE


def test_after_an_end_nothing_is_taken_and_nothing_waits() -> None:
    _, ended = judge(AT_FIVE, message(6, END), ended_here=False, over=False)
    assert (ended.ended_there, ended.receive_sequence) == (True, 6)
    assert [verdict(ended, message(number)) for number in (7, 8)] == [DROP, DROP]
    assert not judge(AT_FIVE, message(6), ended_here=False, over=False)[1].ended_there


def test_an_end_that_has_ended_here_or_is_over_counts_what_it_drops() -> None:
    for how in ({"ended_here": True, "over": False}, {"ended_here": False, "over": True}):
        judged, facts = judge(AT_FIVE, message(6), **how)
        assert (judged, facts.receive_sequence) == (DROP, 6)
        assert judge(AT_FIVE, message(7), **how) == (WAIT, AT_FIVE)


def test_an_error_is_taken_at_once_and_counts_as_received_only_if_it_is_next() -> None:
    for number, received in ((6, 6), (7, 5), (100, 5)):
        judged, facts = judge(AT_FIVE, error(7, number), ended_here=False, over=False)
        assert (judged, facts.receive_sequence) == (TAKE, received)
        assert (facts.error_code, facts.error_text) == (7, "no")
    assert verdict(AT_FIVE, error(7, 5)) is DROP
    assert verdict(AT_FIVE, error(7), ended_here=True) is DROP


def test_after_an_error_everything_is_dropped_and_the_first_error_stays() -> None:
    for one in (message(6), message(7), error(8)):
        assert judge(FAILED, one, ended_here=False, over=False) == (DROP, FAILED)


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        (2**31 - 1, 2**31 - 1),
        (-(2**31), -(2**31)),
        (2**31, Code.VIOLATION),
        (-(2**31) - 1, Code.VIOLATION),
        ("x", Code.VIOLATION),
        (None, Code.VIOLATION),
    ],
)
def test_a_code_that_no_column_takes_is_a_violation(code: object, kept: int) -> None:
    assert judge(AT_FIVE, error(code), ended_here=False, over=False)[1].error_code == kept


def test_a_timer_rings_once_and_only_the_last_one_that_was_set() -> None:
    facts = replace(AT_FIVE, timer=WAKE)
    rings = message(None, TIMER, number=3)
    assert judge(facts, rings, ended_here=False, over=False) == (TAKE, AT_FIVE)
    assert judge(facts, message(None, TIMER, number=4), ended_here=False, over=False) == (
        DROP,
        facts,
    )
    assert verdict(AT_FIVE, rings) is DROP
    assert verdict(replace(FAILED, timer=WAKE), rings) is DROP
    assert verdict(facts, rings, ended_here=True) is DROP


def test_an_error_to_oneself_is_taken_if_nothing_else_has_failed_before() -> None:
    assert verdict(AT_FIVE, error(7, None)) is TAKE
    assert verdict(FAILED, error(7, None)) is TAKE, "it says what is known already"
    assert verdict(FAILED, error(8, None)) is DROP
    unresolved = replace(AT_FIVE, error_code=Code.UNRESOLVED)
    assert verdict(unresolved, error(int(Code.UNRESOLVED), None)) is DROP, "one is sent for each"
