"""Facts of a dialog's end: the messages that it takes, and its lineage. Pure.

*Messages.* An end takes only the next number from the other end: a repeat is dropped, and a message
that is ahead waits for the missing ones. So a dialog is exactly once and in order, whatever carried
its messages.

*Lineage.* A broker that was set back and repaired is a new *incarnation* of itself: from then on,
it may assign numbers that it has assigned before, to other messages. So an end that existed when
its broker was repaired has a lineage, ``((incarnation, after), …)``: numbers above ``after`` were
sent by that incarnation, up to the next pair's ``after``. Numbers before the first pair were sent
by a broker that had never been set back. Two ends agree about a number if their lineages assign it
to the same incarnation. A lineage has no other use. It travels with each message, in the header
`saf.message.LINEAGE`, so agreement can be checked whenever the message arrives, and in any order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any
from uuid import UUID

from saf.dialogs.statements import END, ERROR, TIMER, Code
from saf.received import Received
from saf.setaside.isolation import MAX_ERROR, kept


class Verdict(Enum):
    """The decision about a message that has arrived."""

    TAKE = 1
    """Hand it to the application."""
    DROP = 2
    """Drop it: it was received before, or is no longer wanted."""
    WAIT = 3
    """Let it wait: an earlier message is missing."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of an endpoint that received messages change."""

    receive_sequence: int = 0
    ended_there: bool = False
    error_code: int | None = None
    error_text: str | None = None
    timer: UUID | None = None
    answered_by: UUID | None = None
    """For an initiator: the broker of the target that has answered first."""

    def with_error(self, body: bytes) -> Facts:
        """Return the facts after an Error has been received."""
        try:
            document = json.loads(body)
            code, text = _code(document["code"]), kept(str(document["text"]))[:MAX_ERROR]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            code, text = Code.VIOLATION, "an Error that cannot be read"
        return replace(self, error_code=code, error_text=text)


def _code(value: Any) -> int:
    """Return an Error's code for the column error_code; raise a ValueError if it does not fit."""
    code = int(value)
    if not -(2**31) <= code < 2**31:
        raise ValueError(value)
    return code


def judge(
    facts: Facts, message: Received, *, ended_here: bool, over: bool
) -> tuple[Verdict, Facts]:
    """Return the decision and the facts after it. ``over``: the lifetime is over."""
    if message.sequence is None:
        return _from_oneself(facts, message, ended_here=ended_here)
    wanted = Verdict.DROP if ended_here else Verdict.TAKE
    received = replace(facts, receive_sequence=message.sequence)
    if facts.error_code is not None or message.sequence <= facts.receive_sequence:
        return Verdict.DROP, facts
    if message.message_type == ERROR:
        # what the Error has overtaken was not received, and counts as dropped on arrival
        next_ = message.sequence == facts.receive_sequence + 1
        return wanted, (received if next_ else facts).with_error(message.body)
    if facts.ended_there or message.sequence > facts.receive_sequence + 1:
        return Verdict.DROP if facts.ended_there else Verdict.WAIT, facts
    if over:
        return Verdict.DROP, received
    return wanted, replace(received, ended_there=message.message_type == END)


def _from_oneself(facts: Facts, message: Received, *, ended_here: bool) -> tuple[Verdict, Facts]:
    """Judge a message to oneself: the timer, or an Error, which may come too late."""
    wanted = Verdict.DROP if ended_here else Verdict.TAKE
    if message.message_type == TIMER:
        if facts.timer != message.message_id or facts.error_code is not None:
            return Verdict.DROP, facts
        return wanted, replace(facts, timer=None)
    failed = facts.with_error(message.body)
    is_repeat = facts.error_code == Code.UNRESOLVED  # sent for each message that cannot be resolved
    if is_repeat or facts.error_code not in (None, failed.error_code):
        return Verdict.DROP, facts
    return wanted, failed


Lineage = tuple[tuple[int, int], ...]

LARGEST = 2**63 - 1
"""PostgreSQL's largest bigint."""


def read_lineage(said: object) -> Lineage:
    """Read a lineage from JSON; return an empty one if it cannot be read.

    >>> read_lineage([[17, 3], [21, 8]]), read_lineage([[21, 8], [17, 3]]), read_lineage(None)
    (((17, 3), (21, 8)), (), ())
    """
    if not isinstance(said, (list, tuple)):
        return ()
    lineage: list[tuple[int, int]] = []
    for pair in said:
        match pair:
            case [int(number), int(after)] if (
                incarnation(tuple(lineage)) < number <= LARGEST and 0 <= after <= LARGEST
            ):
                lineage.append((number, after))
            case _:
                return ()
    is_ascending = all(one < other for (_, one), (_, other) in pairwise(lineage))
    return tuple(lineage) if is_ascending else ()


def incarnation(lineage: Lineage) -> int:
    """Return the incarnation that sends now; 0 if none is known.

    >>> incarnation(((17, 3), (21, 8))), incarnation(())
    (21, 0)
    """
    return lineage[-1][0] if lineage else 0


def said_by(lineage: Lineage, number: int) -> int:
    """Return the incarnation that has sent a number; 0 for the broker before any set-back.

    >>> [said_by(((17, 3), (21, 8)), number) for number in (3, 4, 8, 9)]
    [0, 17, 17, 21]
    """
    return next((broker for broker, after in reversed(lineage) if after < number), 0)


def fork(one: Lineage, other: Lineage) -> int | None:
    """Return the last number that two lineages agree about; None if they agree about all numbers.

    >>> fork(((17, 3), (21, 8)), ((17, 3),)), fork(((17, 3),), ((21, 2),)), fork((), ())
    (8, 2, None)
    """
    return min((after for _, after in {*one} ^ {*other}), default=None)
