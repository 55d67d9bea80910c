"""Outcomes: what becomes of each message in hand, and the one function that writes it.

A message in hand has one outcome, which takes effect when its delivery commits:

    HANDLED     nothing more is to be done: the application has handled the message, or it took
                effect without being handed out
    UNTOUCHED   the message stays where it was read, and is read again
    `Parked`    it is set aside in a lane: of its key, to be tried again, for want of a handler or
                behind another message; of its shard, until its deliver_at; or of its
                conversation, until an earlier message comes
    `Dropped`   it is taken without effect, and counted by the reason
    `Dead`      it is a dead letter

`write` writes a table of outcomes in the receiver's transaction. Where nothing but handled messages
is in hand, there is no table: the receiver only moves its cursors.

A lane has a state of its own, `saf.receiving.retries.Waiting`, because many messages of a key wait
for one attempt. Its first message decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from saf.received import Received
from saf.receiving import retries
from saf.receiving.retries import Waiting
from saf.setaside import backoff, dead, dropped, parking
from saf.setaside.dropped import Reason
from saf.setaside.lane import NO_BROKER, Kind, Lane

if TYPE_CHECKING:
    from saf.receiving.arrival import Arrival
    from saf.receiving.hand import Hand


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
    """True if the database copies the stored row, because the row that was read may be unfit."""
    fails: bool = False
    """True if the message's conversation ends with an error at both ends."""


Outcome = Handled | Untouched | Parked | Dropped | Dead

HANDLED, UNTOUCHED = Handled(), Untouched()
UNREADABLE = Dead(reason="over_size", error=None, as_stored=True, fails=True)
OVERDUE = Dead(reason="expired", error=dropped.EXPIRED)


def write(
    raw: psycopg.Connection[Any],
    hand: Hand,
    outcomes: Mapping[Received, Outcome],
    *,
    arrival: Arrival,
    waiting: Mapping[str, Waiting] | None = None,
    succeeded: str | None = None,
) -> None:
    """Write the outcomes of messages in hand. Call `saf.receiving.claim.move` afterwards.

    The order of the writes, with the reason where there is one:

    1.  Dead letters that the database copies, as long as the rows in saf.parked exist.
    2.  The conversations. First, the arrival of messages that are not received is undone; that
        would undo the error of a conversation, too. The ends were locked when messages arrived.
    3.  The lanes of keys, sorted, as operators' decisions lock them.
    4.  The messages in lanes: copied, moved, and those deleted that are complete or dead.
    5.  Dead letters from the rows that were read.
    6.  The due times of delayed messages, and the lane whose attempt succeeded: both depend on the
        messages that are left in lanes.
    7.  Counts of dropped messages.

    The cursors were locked before any of this, so no other receiver writes for these shards; they
    are moved last, in the statement that also checks that the transaction is still open.

    Args:
        raw: connection of the receiver's transaction.
        hand: the shards.
        outcomes: the outcome of each message.
        arrival: the messages' arrival at the ends of their dialogs.
        waiting: states of the lanes of keys that wait from now on.
        succeeded: lane of a key that was tried, and does not wait any longer.
    """
    reader = hand.reader
    parked = [(m, o.lane) for m, o in outcomes.items() if isinstance(o, Parked)]
    buried = [(m, o) for m, o in outcomes.items() if isinstance(o, Dead)]
    stored = [(m, o) for m, o in buried if o.as_stored]
    for reason in sorted({letter.reason for _, letter in stored}):
        of_reason = [(m, letter.error) for m, letter in stored if letter.reason == reason]
        retries.bury_as_stored(raw, reader, of_reason, reason=reason)
    arrival.take_back(outcomes)
    failing = [message for message, letter in buried if letter.fails]
    retries.fail_unseen(raw, reader, [m for m in failing if m.dialog is None])
    for message in failing:
        arrival.give_up(message)
    retries.wait(raw, reader, waiting or {})
    _park(raw, hand, parked)
    gone = [
        message.parked_id
        for message, outcome in outcomes.items()
        if message.parked_id is not None and not isinstance(outcome, (Parked, Untouched))
    ]
    if gone:
        parking.unpark(raw, gone)
    read = [(m, letter) for m, letter in buried if not letter.as_stored]
    if read:
        common = {"subscription_id": reader.subscription_id, "destination": ""}
        rows = [
            {**m.stored(), **common, "reason": letter.reason, "error": letter.error}
            for m, letter in read
        ]
        dead.bury(raw, rows)
    delayed = {message.shard for message, lane in parked if lane.kind is Kind.LATER}
    retries.time_late(raw, reader, sorted(delayed.union(hand.late)))
    if succeeded is not None:
        backoff.succeeded(raw, reader.subscription_id, [Lane(kind=Kind.KEY, subject=succeeded)])
    counted = [
        (message.shard, outcome.reason, message.message_id)
        for message, outcome in outcomes.items()
        if isinstance(outcome, Dropped)
    ]
    dropped.count(raw, reader.subscription_id, counted)


def _park(raw: psycopg.Connection[Any], hand: Hand, parked: list[tuple[Received, Lane]]) -> None:
    fresh = [
        {
            **message.stored(),
            "subscription_id": hand.reader.subscription_id,
            "destination": "",
            "kind": lane.kind,
            "subject": lane.subject,
            "broker": NO_BROKER,
            "quality": None,
            "batch": hand.shards[message.shard].batch,
            "position": message.id,
            "opened_at": None,
        }
        for message, lane in parked
        if message.parked_id is None
    ]
    if fresh:
        parking.copy_in(raw, fresh)
    moved = [(m.parked_id, lane) for m, lane in parked if m.parked_id is not None]
    if moved:
        retries.move(raw, moved)
