"""Outcomes: what becomes of each message in hand.

A message in hand has one outcome, which takes effect when its delivery commits:

    HANDLED     nothing remains to be done: the application has handled the message, or it took
                effect without being handed out
    UNTOUCHED   the message stays where it was read, and is read again
    `Parked`    it is set aside in a lane: of its key, to be tried again, for want of a handler or
                behind another message; of its shard, until its deliver_at; or of its
                conversation, until an earlier message comes
    `Dropped`   it is taken without effect, and counted by the reason
    `Dead`      it is a dead letter

`saf.receiving.settlement` writes a table of outcomes. Where nothing but handled messages is in
hand, there is no table: the receiver only moves its cursors.
"""

from __future__ import annotations

from dataclasses import dataclass

from saf.setaside import dropped
from saf.setaside.dropped import Reason
from saf.setaside.lane import Kind, Lane


@dataclass(frozen=True, slots=True)
class Handled:
    """Complete; a copy in a lane is deleted."""


@dataclass(frozen=True, slots=True)
class Untouched:
    """Nothing is written; the message is read again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parked:
    """Set aside in a lane: copied there, or moved there from another lane."""

    lane: Lane

    @classmethod
    def of(cls, kind: Kind, subject: object) -> Parked:
        """Return the outcome of a message that waits in a receiver's lane."""
        return cls(lane=Lane(kind=kind, subject=str(subject)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """Taken without effect: nobody misses the message."""

    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Dead:
    """A dead letter."""

    reason: str
    """One of `saf.setaside.dead.REASONS`."""
    error: str | None
    """None: too large to be read."""
    as_stored: bool = False
    """True if the database copies the stored row: the row that was read might not be storable."""
    fails: bool = False
    """True if the message's conversation ends with an error at both ends."""


Outcome = Handled | Untouched | Parked | Dropped | Dead

HANDLED, UNTOUCHED = Handled(), Untouched()
UNREADABLE = Dead(reason="over_size", error=None, as_stored=True, fails=True)
OVERDUE = Dead(reason="expired", error=dropped.EXPIRED)
