"""Results of a worker: counts of messages handled, parked and buried."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from saf.errors import SafError, Unavailable

FOR_A_PERSON, FOR_LATER = SafError.exit_code, Unavailable.exit_code
"""Exit codes of a run that has left messages for an operator, or for a later run."""


MOST_TYPES = 200
"""Maximum number of unhandled types remembered by name: senders may make up any number."""


class SetAside(NamedTuple):
    """Counts of messages that were set aside.

    >>> SetAside(1, 0) + SetAside(2, 3)
    SetAside(parked=3, buried=3)
    """

    parked: int = 0
    buried: int = 0

    def __add__(self, other: object) -> SetAside:
        """Add counts."""
        if not isinstance(other, SetAside):
            return NotImplemented
        return SetAside(self.parked + other.parked, self.buried + other.buried)


@dataclass(kw_only=True)
class Summary:
    """Counts of messages. Safe for several threads.

    >>> print(Summary(handled=1))
    handled 1 message
    >>> print(Summary(handled=2, parked=11_000, buried=1, without_handler={"OrderPaid"}))
    handled 2 messages, parked 11,000, made 1 dead letter; no handler for 'OrderPaid'
    >>> print(Summary(held_up=True))
    handled 0 messages; the subscription is paused, or at its limit
    """

    handled: int = 0
    parked: int = 0
    """Messages set aside: they wait for a handler, a further attempt, or an earlier message."""
    buried: int = 0
    """Messages that have become dead letters."""
    without_handler: set[str | None] = field(default_factory=set)
    """Message types without a handler, at most `MOST_TYPES`."""
    others_without_handler: int = 0
    """Number of messages without a handler whose types are not in `without_handler`."""
    held_up: bool = False
    """True if a drain has ended because of a pause or a limit of the subscription."""
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, handled: int, aside: SetAside) -> None:
        """Count messages that were handled, and messages that were set aside."""
        with self._counting:
            self.handled += handled
            self.parked += aside.parked
            self.buried += aside.buried

    def lacks_handler(self, message_type: str | None) -> bool:
        """Note that a type has no handler; return whether it is new and should be logged."""
        with self._counting:
            if message_type in self.without_handler:
                return False
            if len(self.without_handler) == MOST_TYPES:
                self.others_without_handler += 1
                return False
            self.without_handler.add(message_type)
            return True

    @property
    def total(self) -> int:
        """Number of messages that were handled or set aside."""
        return self.handled + self.parked + self.buried

    @property
    def exit_code(self) -> int:
        """Exit code of a run that handles the messages that are due.

        1 if there are new dead letters, or messages without a handler; otherwise 75 if messages
        wait for another attempt, or a pause or a limit has ended the run; otherwise 0.
        """
        if self.buried or self.without_handler:
            return FOR_A_PERSON
        return FOR_LATER if self.parked or self.held_up else 0

    def __str__(self) -> str:
        parts = [f"handled {_counted(self.handled, 'message')}"]
        if self.parked:
            parts.append(f"parked {self.parked:,}")
        if self.buried:
            parts.append(f"made {_counted(self.buried, 'dead letter')}")
        text = ", ".join(parts)
        if self.without_handler:
            names = sorted("no type" if one is None else repr(one) for one in self.without_handler)
            text += f"; no handler for {', '.join(names)}"
        if self.others_without_handler:
            text += f" and {_counted(self.others_without_handler, 'message')} of other types"
        return text + "; the subscription is paused, or at its limit" * self.held_up


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
