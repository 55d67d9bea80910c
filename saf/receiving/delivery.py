"""A delivery: messages in hand, the transaction to work in, and the result for each message.

Iterating over a `Delivery` yields its messages in order. To set aside a message that cannot be
handled, call `park` (try it again later), `wait` (for a handler) or `reject` (make a dead letter).
The iteration then skips the later messages of the same key, which wait behind it. After a dead
letter of a dialog, it skips that dialog's later messages, which are dropped, and continues with the
key's other messages. All messages that are not set aside count as handled once the transaction
commits.

Two kinds of messages that were read are not handed out. Once a worker is told to stop, the
iteration yields no further message (`Delivery.until`), and the rest is put back (`PutBack`).
Messages that a verifier refuses (`refused`) are not in the delivery: they become dead letters and
block no other messages.

A delivery neither begins nor commits its transaction. `Delivery.settle` writes the results before
the receiver commits; if the transaction is rolled back, no result remains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from threading import Event
from typing import Any, Generic, TypeVar, overload
from uuid import UUID

import psycopg

from saf.logger import Log
from saf.received import Received
from saf.receiving import claim, retries
from saf.receiving.arrival import Arrival, hook
from saf.receiving.failures import about
from saf.receiving.hand import EXPIRED, LATE, UNREAD, Hand
from saf.receiving.retries import Policy, Suspect, Waiting, bury_as_stored, fail_unseen
from saf.setaside import backoff, dead, dropped, parking
from saf.setaside.dropped import Reason
from saf.setaside.isolation import said
from saf.setaside.lane import NO_BROKER, Kind, Lane
from saf.signing.verifier import Refusal, Verifier

log = Log("saf.receive")

WHY = "its receiver was told to stop"
"""Reason shown for a message that waits in a lane after it was put back."""

Refused = dict[Received, Refusal]

C = TypeVar("C")


class Delivery(Sequence[Received], Generic[C]):
    """Messages in order, and the connection to handle them on. An empty delivery is false.

    ``connection`` is of the kind given to `saf.receive`. Its transaction is the delivery's: write
    in it, but neither commit it nor roll it back.
    """

    def __init__(
        self,
        connection: C,
        raw: psycopg.Connection[Any],
        hand: Hand | None,
        policy: Policy,
        tried: Suspect | None = None,
        *,
        verifier: Verifier | None = None,
        own: str = "",
    ) -> None:
        self._own = own
        self.connection = connection
        self._raw = raw
        self._hand = hand
        self._policy = policy
        self._tried = tried
        self._messages: list[Received] = hand.messages if hand else []
        self._refused: Refused = {}
        if hand and verifier:
            self._refused = refused(raw, hand, verifier)
            self._messages = [message for message in self._messages if message not in self._refused]
        self._behind: list[Received] = []
        waiting = hand.waiting if hand else frozenset()
        if waiting and (tried is None or tried.lane is None):
            self._behind = [message for message in self._messages if message.lane in waiting]
            self._messages = [message for message in self._messages if message.lane not in waiting]
        self._arrival = Arrival(raw=raw)
        if hand and hand.spoken and hand.reader.converses:
            self._arrival = hook().arrive(raw, hand.reader, self._messages, self._behind)
            self._messages = self._arrival.messages
        self._stopped: dict[str, int] = {}
        """Place in the delivery of each waiting lane's first waiting message."""
        self._failed: dict[UUID, int] = {}
        """Place of the dead letter of each failed dialog, by the dialog's handle."""
        self._waiting: dict[str, Waiting] = {}
        self._dead: dict[int, tuple[Received, str, str]] = {}
        """Dead letters by their place in the delivery: the message, the reason and the error."""
        self.errors: list[tuple[Received, BaseException | str]] = []
        """The messages set aside with `park`, `wait` or `reject`, in order, each with its error."""
        self.parked, self.buried = 0, 0
        """Counts of messages set aside and of dead letters made; see `settle`."""
        self._stopping: Event | None = None
        self._back = PutBack()

    @overload
    def __getitem__(self, at: int) -> Received: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Received]: ...
    def __getitem__(self, at: int | slice) -> Received | Sequence[Received]:
        return self._messages[at]

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Received]:
        """Yield the messages in order, except those whose keys have been set aside by then."""
        return self.still(self._messages)

    def still(self, messages: Iterable[Received]) -> Iterator[Received]:
        """Yield the messages whose keys and dialogs have not been set aside by then."""
        for message in messages:
            if not (self._stopped or self._failed) or not self._ends_here(message):
                if self._stopping is not None and self._ends_before(message):
                    self._back.add(message)
                else:
                    yield message

    def until(self, stopping: Event) -> None:
        """Yield no further message once the event is set; put back those that were not yielded."""
        self._stopping = stopping

    def take_own(self) -> str:
        """Return the statement that restores saf's own settings, for a caller that runs it.

        Otherwise `settle` runs it before it writes; see `saf.receiving.receive`.
        """
        own, self._own = self._own, ""
        return own

    @property
    def handled(self) -> int:
        """Count of handled messages: not set aside, nor behind one of their key that is."""
        if not self._stopped and not self._dead:
            return len(self._messages) - len(self._back)
        return sum(
            place not in self._dead and not self._is_past(message, place)
            for place, message in enumerate(self._messages)
            if message not in self._back
        )

    def is_behind(self, message: Received) -> bool:
        """Return whether this message or an earlier one of its key or dialog has been set aside."""
        return self._ends_here(message) and self._is_past(message, self._place(message))

    def park(self, message: Received, error: BaseException | str) -> None:
        """Try this message again later; its key waits. After the last attempt, reject it."""
        policy = self._policy
        if policy.gives_up(message.attempt, error):
            self.reject(message, error)
            return
        self.errors.append((message, error))
        self._stop(
            message, error, attempts=message.attempt, wait=policy.wait_seconds(message.attempt)
        )

    def wait(self, message: Received, error: str) -> None:
        """Make this message wait for a receiver that handles its type; its key waits behind it.

        The message has not been tried, so this does not count as an attempt.
        """
        self.errors.append((message, error))
        self._stop(message, error, attempts=message.attempt - 1, awaits_handler=True)

    def reject(
        self, message: Received, error: BaseException | str, *, reason: str = "failed"
    ) -> None:
        """Make a dead letter of this message. Its key continues, unless the policy blocks it.

        If the message belongs to a dialog, the dialog ends with an error at both ends.
        """
        place = self._place(message)
        self._dead[place] = (message, reason, said(error))
        self.errors.append((message, error))
        if message.dialog is not None:
            dialog = message.dialog.handle
            self._failed[dialog] = min(place, self._failed.get(dialog, place))
        elif self._policy.block:
            self._stop(message, f"behind a dead letter: {said(error)}", attempts=0)

    def drop(self, message: Received, reason: Reason) -> None:
        """Count a message that was handed out without effect as dropped, by its reason."""
        self._count([(message, reason)])

    def presume(self, message: Received, error: str) -> None:
        """Make a message wait in its lane, its attempts counted, as if this attempt had failed."""
        wait = self._policy.wait_seconds(message.attempt)
        self._stop(message, error, attempts=message.attempt, wait=wait)

    def epoch(self, message: Received) -> int:
        """Return the epoch of the shard that holds the message."""
        assert self._hand is not None  # noqa: S101 - there is a message
        return self._hand.shards[message.shard].epoch

    def settle(self) -> None:
        """Write the messages' results and count them. Call it before the commit."""
        hand = self._hand
        if hand is None:
            return
        own = self.take_own()
        if self._is_plain(hand):
            claim.move(self._raw, hand, own)
            return
        if own:
            self._raw.execute(own.encode())
        reader = hand.reader
        if self._back:
            self._put_back(hand)
        late, expired, unread = (self._read(hand.aside[fate]) for fate in (LATE, EXPIRED, UNREAD))
        kept = [(one, _lane(Kind.KEY, one.lane)) for one in self._read(self._behind)]
        kept += [(one, _lane(Kind.LATER, one.shard)) for one in late]
        kept += [(one, _lane(Kind.AHEAD, one.conversation_id)) for one in self._arrival.ahead]
        bury = [(one, "expired", "expires_at has passed") for one in expired]
        bury += [(one, "no_dialog", error) for one, error in self._arrival.stray]
        bury += self._dead.values()
        gone = [one.parked_id for one, _ in self._arrival.dropped]
        gone += [one.parked_id for one in self._arrival.done]
        gone += bury_as_stored(self._raw, reader, self._arrival.refused)
        gone += bury_as_stored(self._raw, reader, [(one, None) for one in unread])
        fail_unseen(self._raw, reader, unread)
        not_taken = self._read([*self._refused])
        gone += bury_refused(self._raw, hand, {one: self._refused[one] for one in not_taken})
        gone += [one.parked_id for one, *_ in bury]
        not_received = self._part(kept, gone)
        behind = [one for place, one in self._arrival.fragments if self._waits(one, place)]
        kept += [(one, _lane(Kind.KEY, one.lane)) for one in behind]
        gone += [one.parked_id for _, one in self._arrival.fragments if one not in behind]
        self._arrival.take_back(not_received)
        for one, *_ in self._dead.values():
            self._arrival.give_up(one)
        if kept or bury or self._waiting or any(gone):
            self._set_aside(hand, kept, bury, [number for number in gone if number])
        touched = {one.shard for one in late}
        touched.update(hand.late)
        retries.time_late(self._raw, reader, sorted(touched))
        if self._tried and self._tried.lane and self._tried.lane not in self._waiting:
            lane = _lane(Kind.KEY, self._tried.lane)
            backoff.succeeded(self._raw, reader.subscription_id, [lane])
        self._count(self._arrival.dropped)
        claim.move(self._raw, hand)
        self.parked = sum(
            lane.kind == Kind.KEY and one.parked_id is None and one not in self._back
            for one, lane in kept
        )
        self.buried = len(bury) + len(self._arrival.refused) + len(unread) + len(not_taken)

    def _is_plain(self, hand: Hand) -> bool:
        """Return whether all messages that were read are handled, and none needs more than that."""
        return not (
            self._stopped
            or self._dead
            or self._back
            or self._behind
            or self._refused
            or self._tried
            or hand.spoken
            or hand.late
            or any(hand.aside.values())
        )

    def _part(self, kept: list[tuple[Received, Lane]], gone: list[int | None]) -> list[Received]:
        """Add each message of the delivery to ``keep`` or ``gone``.

        Return those that count as not received.
        """
        not_received: list[Received] = []
        assert self._hand is not None  # noqa: S101 - there are messages
        if not (self._stopped or self._failed or self._hand.late or self._tried):
            return not_received
        for place, message in enumerate(self._messages):
            if self._back.stays(message):
                if message.parked_id is not None:
                    not_received.append(message)
            elif place in self._dead or not self._is_past(message, place):
                gone.append(message.parked_id)
            elif self._has_failed(message, place):
                gone.append(message.parked_id)
                self._arrival.dropped.append((message, Reason.ENDED))
            else:
                kept.append((message, _lane(Kind.KEY, message.lane)))
                not_received.append(message)
        return not_received

    def _put_back(self, hand: Hand) -> None:
        """Put back the messages that were not given; use lanes where shards cannot go back."""
        complete = [
            message
            for place, message in enumerate(self._messages)
            if message not in self._back and not self._waits(message, place)
        ]
        for message in self._back.reopen(hand, self._messages, complete):
            if message.lane not in self._stopped:
                self._stop(message, WHY, attempts=message.attempt - 1, wait=0)

    def _read(self, messages: list[Received]) -> list[Received]:
        """Return the messages that will not be read again."""
        return [one for one in messages if not self._back.stays(one)] if self._back else messages

    def _ends_before(self, message: Received) -> bool:
        """Return whether the receiver was told to stop before this message was given.

        The attempt at the first message of a lane is already counted, so that message is given.
        """
        counted = self._tried is not None and self._tried.lane is not None
        first = counted and message is self._messages[0]
        return self._stopping is not None and self._stopping.is_set() and not first

    def _count(self, messages: Sequence[tuple[Received, Reason]]) -> None:
        assert self._hand is not None  # noqa: S101 - there are messages, or settle found it
        counted = [(message.shard, reason, message.message_id) for message, reason in messages]
        dropped.count(self._raw, self._hand.reader.subscription_id, counted)

    def _set_aside(
        self,
        hand: Hand,
        kept: list[tuple[Received, Lane]],
        bury: list[tuple[Received, str, str]],
        gone: list[int],
    ) -> None:
        subscription_id = hand.reader.subscription_id
        retries.wait(self._raw, hand.reader, self._waiting)
        fresh = [
            {
                **one.stored(),
                "subscription_id": subscription_id,
                "destination": "",
                "kind": lane.kind,
                "subject": lane.subject,
                "broker": NO_BROKER,
                "quality": None,
                "batch": hand.shards[one.shard].batch,
                "position": one.id,
                "opened_at": None,
            }
            for one, lane in kept
            if one.parked_id is None
        ]
        if fresh:
            parking.copy_in(self._raw, fresh)
        parked = [(one.parked_id, lane) for one, lane in kept if one.parked_id is not None]
        if parked:
            retries.move(self._raw, parked)
        if gone:
            parking.unpark(self._raw, gone)
        if bury:
            common = {"subscription_id": subscription_id, "destination": ""}
            dead.bury(
                self._raw,
                [
                    {**one.stored(), **common, "reason": reason, "error": error}
                    for one, reason, error in bury
                ],
            )

    def _stop(
        self,
        message: Received,
        error: BaseException | str,
        *,
        attempts: int,
        wait: float | None = None,
        awaits_handler: bool = False,
    ) -> None:
        place = self._place(message)
        if place > self._stopped.get(message.lane, place):
            return  # its key waits for an earlier message
        self._stopped[message.lane] = place
        self._waiting[message.lane] = Waiting(
            lane=message.lane,
            shard=message.shard,
            attempts=attempts,
            error=said(error),
            wait=wait,
            awaits_handler=awaits_handler,
            message_type=message.message_type if awaits_handler else None,
        )

    def _ends_here(self, message: Received) -> bool:
        """Return whether a message's key waits, or its dialog has failed."""
        return message.lane in self._stopped or (
            message.dialog is not None and message.dialog.handle in self._failed
        )

    def _is_past(self, message: Received, place: int) -> bool:
        """Return whether a message stopped its key or dialog, or comes after the one that did."""
        waits = place >= self._stopped.get(message.lane, place + 1)
        return waits or self._has_failed(message, place)

    def _has_failed(self, message: Received, place: int) -> bool:
        """Return whether a message's dialog has failed with this message or earlier."""
        dialog = message.dialog
        return dialog is not None and place >= self._failed.get(dialog.handle, place + 1)

    def _waits(self, message: Received, place: int) -> bool:
        """Return whether a message comes after a waiting one of the same key."""
        return place > self._stopped.get(message.lane, place)

    def _place(self, message: Received) -> int:
        for place, candidate in enumerate(self._messages):
            if candidate is message:
                return place
        raise ValueError(f"{message} is not a message of this delivery")


def _lane(kind: Kind, subject: object) -> Lane:
    return Lane(kind=kind, subject=str(subject))


class PutBack:
    """Messages of one delivery that were not given to handlers, because of a stop.

    They are put back as if they had not been read: each shard goes back to the first of these
    messages, and a message that was read from a lane stays in the lane. No attempt is counted.

    A shard cannot go back behind a completed message: batch handlers may have handled later
    messages of other keys. And messages of dialogs have arrived at their ends, which reading them
    again does not undo. Such messages are set aside in the lanes of their keys instead, and are due
    immediately.
    """

    def __init__(self) -> None:
        self._messages: dict[Received, None] = {}
        self._in_lanes: set[Received] = set()
        """Messages that are set aside in lanes instead."""
        self._again: dict[int, int] = {}
        """First message id to read again, by shard that goes back."""

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, message: Received) -> bool:
        return message in self._messages

    def add(self, message: Received) -> None:
        """Put back a message."""
        self._messages[message] = None

    def reopen(
        self, hand: Hand, messages: Sequence[Received], complete: Iterable[Received]
    ) -> list[Received]:
        """Move shards back; return the messages, in order, that must be set aside instead.

        Args:
            hand: the shards.
            messages: the messages of the delivery, in order.
            complete: the messages of the delivery that are handled or set aside.
        """
        back = [entry for entry in messages if entry in self._messages]
        if hand.spoken:
            self._in_lanes.update(back)
            return back
        first: dict[int, int] = {}
        for entry in back:
            if entry.parked_id is None:
                first.setdefault(entry.shard, entry.id)
        passed = {
            entry.shard
            for entry in complete
            if entry.parked_id is None and entry.id > first.get(entry.shard, entry.id)
        }
        for shard, id_ in first.items():
            if shard not in passed:
                self._again[shard] = id_
                hand.shards[shard].reopen(id_ - 1)
        aside = [entry for entry in back if entry.parked_id is None and entry.shard in passed]
        self._in_lanes.update(aside)
        return aside

    def stays(self, one: Received) -> bool:
        """Return whether a message stays where it was read from, and will be read again."""
        if one.parked_id is not None:
            return one in self._messages and one not in self._in_lanes
        first_id = self._again.get(one.shard)
        return first_id is not None and one.id >= first_id


# A dead letter of a refused message has a reason of `saf.signing.verifier`, and the log shows a
# warning. A refused message has no other effect: it blocks no messages of its key, even if the
# policy sets ``block``, and it does nothing to the dialog that it claims to belong to. A forger
# must not be able to stop anything with it. A dialog waits for the number that was refused, and
# continues once `saf dead retry` delivers that message again and its signing key is known.
#
# Messages that wait behind others of their key are verified like all others, because parts of large
# bodies are set aside in that time. Expired and unreadable messages are not handed out in any case.


def refused(raw: psycopg.Connection[Any], hand: Hand, verifier: Verifier) -> Refused:
    """Verify the messages in hand and note their signers; return the refused messages."""
    found: Refused = {}
    hashes = hook().body_hashes(raw, hand.reader, hand.messages) if hand.spoken else {}
    for message in hand.messages:
        verdict = verifier(message, hashes.get(message))
        if not isinstance(verdict, Refusal):
            message.is_signed_by(verdict)
        elif not hook().is_of_saf(message):
            found[message] = verdict
    return found


def bury_refused(raw: psycopg.Connection[Any], hand: Hand, some: Refused) -> list[int | None]:
    """Make dead letters of refused messages; return their ids in saf.parked."""
    buried: list[int | None] = []
    for message, refusal in some.items():
        log.warning(
            "message_refused",
            subscription=hand.reader.name,
            **about(message),
            from_service=message.from_service,
            reason=refusal.reason,
            detail=f"{refusal.error}: it is a dead letter",
        )
    for reason in sorted({refusal.reason for refusal in some.values()}):
        errors = [(entry, cause.error) for entry, cause in some.items() if cause.reason == reason]
        buried += bury_as_stored(raw, hand.reader, errors, reason=reason)
    return buried
