"""Facts of a dialog's end about the messages it has received, and which ones it takes. Pure.

An end takes only the next number from the other end: a repeat is dropped, and a message that is
ahead waits for the missing ones. So a dialog is exactly once and in order, whatever carried its
messages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
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
