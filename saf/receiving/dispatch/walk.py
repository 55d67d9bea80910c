"""The walk of a message through a dispatcher: its states, and the steps between them.

    step       from        to           what happens
    ---------  ----------  -----------  --------------------------------------------------------
               (read)      QUEUED       in memory, behind the earlier messages of its key
    send       QUEUED      IN_FLIGHT    its key has its turn
    put_back   IN_FLIGHT   QUEUED       not sent, or to be sent again: a batch was refused, or
                                        the endpoint is down
    accept     IN_FLIGHT   ACCEPTED     the endpoint has accepted it, and may have replied
    receive    IN_FLIGHT   RECEIVED     a dialog's message: its end receives it, with the outcome
    park       IN_FLIGHT   PARKED       waits in its key's lane, for another attempt
    park       QUEUED      PARKED       waits in its key's lane, behind the one that waits
    postpone   QUEUED      POSTPONED    waits for its deliver_at
    bury       QUEUED      BURIED       a dead letter: expired, too large, or out of attempts
    bury       IN_FLIGHT   BURIED       a dead letter: rejected, expired, or out of attempts
    bury       ACCEPTED    BURIED       a dead letter: the database refuses its reply

A message that waits in saf.parked already is MOVED instead of PARKED. An ended walk is part of the
next marks, which `saf.receiving.dispatch.marking` writes: only then is it complete for other
members too. `saf.receiving.dispatch.window` holds the walks in memory, by key;
`saf.receiving.dispatch.judging` chooses the step that follows from an answer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from saf.message import Message
from saf.received import Received
from saf.receiving.dispatch.talking import Outcome


class State(StrEnum):
    """The place of a message on its walk; see the module's docstring."""

    QUEUED = "queued"
    IN_FLIGHT = "in flight"
    ACCEPTED = "accepted"
    RECEIVED = "received"
    PARKED = "parked"
    MOVED = "moved"
    POSTPONED = "postponed"
    BURIED = "buried"


@dataclass(slots=True, eq=False)
class Walk:
    """A message, and its state with the data of that state."""

    message: Received
    late: bool = False
    """True if the message waited in saf.parked for its deliver_at."""
    alone: bool = False
    """True if the message is sent in a request of its own next, because a batch was refused."""
    state: State = State.QUEUED
    reply: Message | None = None
    """Reply of the endpoint that has accepted the message."""
    outcome: Outcome | None = None
    """Outcome with which a dialog's message is received."""
    reason: str = ""
    """Reason of a dead letter."""
    error: str | None = None
    """Error of a dead letter; None if the message is unreadable."""

    def __str__(self) -> str:
        details = ": ".join(part for part in (self.state, self.reason, self.error) if part)
        return f"message {self.message.message_id} of {self.message.lane!r}, {details}"


def send(walk: Walk) -> Walk:
    """Put a message in flight."""
    return _step(walk, State.IN_FLIGHT, after=(State.QUEUED,))


def put_back(walk: Walk) -> Walk:
    """Queue a message again, as if it had not been sent."""
    return _step(walk, State.QUEUED, after=(State.IN_FLIGHT,))


def accept(walk: Walk, reply: Message | None) -> Walk:
    """Note that the endpoint has accepted a message, and may have replied."""
    walk.reply = reply
    return _step(walk, State.ACCEPTED, after=(State.IN_FLIGHT,))


def receive(walk: Walk, outcome: Outcome) -> Walk:
    """Leave a dialog's message to its end."""
    walk.outcome = outcome
    return _step(walk, State.RECEIVED, after=(State.IN_FLIGHT,))


def park(walk: Walk) -> Walk:
    """Make a message wait in the lane of its key."""
    state = State.PARKED if walk.message.parked_id is None else State.MOVED
    return _step(walk, state, after=(State.QUEUED, State.IN_FLIGHT))


def postpone(walk: Walk) -> Walk:
    """Make a message that was read wait for its deliver_at."""
    return _step(walk, State.POSTPONED, after=(State.QUEUED,))


def bury(walk: Walk, reason: str, error: str | None) -> Walk:
    """Make a dead letter of a message; of an accepted one, if its reply is refused."""
    walk.reason, walk.error = reason, error
    return _step(walk, State.BURIED, after=(State.QUEUED, State.IN_FLIGHT, State.ACCEPTED))


def _step(walk: Walk, state: State, *, after: Collection[State]) -> Walk:
    if walk.state not in after:
        raise AssertionError(f"{walk}: it cannot be {state}")
    walk.state = state
    return walk
