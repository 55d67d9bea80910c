"""Settlement: the outcomes of messages in hand, written in the receiver's transaction.

`write` takes a table of outcomes (`saf.receiving.outcome`). A lane has a state of its own,
`saf.receiving.retries.Waiting`, because many messages of a key wait for one attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import psycopg

from saf.received import Received
from saf.receiving import retries
from saf.receiving.arrival import Arrival
from saf.receiving.hand import Hand
from saf.receiving.outcome import Dead, Dropped, Outcome, Parked, Untouched
from saf.receiving.retries import FailedAttempt, Waiting
from saf.receiving.summary import SetAside
from saf.setaside import backoff, dead, dropped, parking
from saf.setaside.lane import NO_BROKER, Kind, Lane


def write(
    raw: psycopg.Connection[Any],
    hand: Hand,
    outcomes: Mapping[Received, Outcome],
    *,
    arrival: Arrival,
    waiting: Mapping[str, Waiting] | None = None,
    counted: Collection[FailedAttempt] = (),
    succeeded: Collection[str] = (),
) -> None:
    """Write the outcomes of messages in hand. The caller moves the cursors.

    The order of the writes, with the reason where there is one:

    1.  Dead letters that the database copies, as long as the rows in saf.parked exist.
    2.  The conversations. First, the arrival of messages that are not received is undone; that
        would undo the error of a conversation, too. The ends were locked when messages arrived.
    3.  The lanes of keys, sorted, as operators' decisions lock them.
    4.  The messages in lanes: copied, moved, and those deleted that are complete or dead.
    5.  Dead letters from the rows that were read.
    6.  The due times of delayed messages, the attempts that count now, and the lanes whose attempts
        succeeded: they depend on the messages that are left in lanes.
    7.  Counts of dropped messages.

    The cursors were locked before any of this, so no other receiver writes for these shards. A
    receiver moves them last, in the statement that also checks that the transaction is still open;
    a dispatcher first, in the statement that also checks who owns them.

    Args:
        raw: connection of the receiver's transaction.
        hand: the shards.
        outcomes: the outcome of each message.
        arrival: the messages' arrival at the ends of their dialogs.
        waiting: states of the lanes of keys that wait from now on.
        counted: earlier attempts of lanes, which count from now on.
        succeeded: lanes of keys that were tried, and do not wait any longer.
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
    if counted:
        retries.count_failed(raw, reader, counted)
    if succeeded:
        lanes = [Lane(kind=Kind.KEY, subject=lane) for lane in succeeded]
        backoff.succeeded(raw, reader.subscription_id, lanes)
    to_count = [
        (message.shard, outcome.reason, message.message_id)
        for message, outcome in outcomes.items()
        if isinstance(outcome, Dropped)
    ]
    dropped.count(raw, reader.subscription_id, to_count)


def counted(outcomes: Mapping[Received, Outcome]) -> SetAside:
    """Count the messages that are set aside for the first time, and the dead letters."""
    return SetAside(
        parked=sum(
            isinstance(outcome, Parked)
            and outcome.lane.kind is Kind.KEY
            and message.parked_id is None
            for message, outcome in outcomes.items()
        ),
        buried=sum(isinstance(outcome, Dead) for outcome in outcomes.values()),
    )


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
