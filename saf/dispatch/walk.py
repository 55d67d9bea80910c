"""The walk of a message through a dispatcher: its states, and the steps between them.

    read from the log, or from saf.parked
      │
      ├── park ──────> PARKED      waits in the lane of its key, which waits already
      ├── postpone ──> POSTPONED   waits for its deliver_at
      ├── bury ──────> BURIED      a dead letter: expired, too large, or out of attempts
      v
    QUEUED             in memory, behind the earlier messages of its key
      │    ^
      send │           its key has its turn
      v  put_back      not sent, or to be sent again: the endpoint is down, or a batch was refused
    IN_FLIGHT
      │
      ├── accept ────> ACCEPTED    the endpoint has accepted it, and may have replied
      ├── receive ───> RECEIVED    a message of a dialog, whose end receives it with the outcome
      ├── park ──────> PARKED      waits for another attempt, and its key's messages behind it
      └── bury ──────> BURIED      a dead letter: rejected, expired, or out of attempts

A message that waits in saf.parked already is MOVED instead of PARKED. An ended walk is part of the
next marks, which `saf.dispatch.marking` writes: only then is it complete for other members too.
`saf.dispatch.window` holds the walks in memory, by key; `saf.dispatch.judging` chooses the step
that follows from an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from saf.dispatch.talking import Outcome
from saf.message import Message
from saf.received import Received


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


NEXT = {
    State.QUEUED: {
        State.IN_FLIGHT,
        State.PARKED,
        State.MOVED,
        State.POSTPONED,
        State.BURIED,
    },
    State.IN_FLIGHT: {
        State.QUEUED,
        State.ACCEPTED,
        State.RECEIVED,
        State.PARKED,
        State.MOVED,
        State.BURIED,
    },
    State.ACCEPTED: {State.BURIED},
}
"""States that may follow each state; the others are ends."""


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
    return _step(walk, State.IN_FLIGHT)


def put_back(walk: Walk) -> Walk:
    """Queue a message again, as if it had not been sent."""
    return _step(walk, State.QUEUED)


def accept(walk: Walk, reply: Message | None) -> Walk:
    """Note that the endpoint has accepted a message, and may have replied."""
    walk.reply = reply
    return _step(walk, State.ACCEPTED)


def receive(walk: Walk, outcome: Outcome) -> Walk:
    """Leave a dialog's message to its end."""
    walk.outcome = outcome
    return _step(walk, State.RECEIVED)


def park(walk: Walk) -> Walk:
    """Make a message wait in the lane of its key."""
    return _step(walk, State.PARKED if walk.message.parked_id is None else State.MOVED)


def postpone(walk: Walk) -> Walk:
    """Make a message wait for its deliver_at."""
    return _step(walk, State.POSTPONED)


def bury(walk: Walk, reason: str, error: str | None) -> Walk:
    """Make a dead letter of a message; of an accepted one, if its reply is refused."""
    walk.reason, walk.error = reason, error
    return _step(walk, State.BURIED)


def _step(walk: Walk, state: State) -> Walk:
    if state not in NEXT.get(walk.state, ()):
        raise AssertionError(f"{walk}: it cannot be {state}")
    walk.state = state
    return walk
