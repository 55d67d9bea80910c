"""A delivery: messages in hand, the transaction to work in, and the outcome of each message.

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

A delivery neither begins nor commits its transaction. `Delivery.settle` writes the outcomes
(`saf.receiving.outcome`) before the receiver commits; if the transaction is rolled back, none of
them remains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any, Generic, TypeVar, overload
from uuid import UUID

import psycopg

from saf.message import ALTERED, UNKNOWN_KEY, UNSIGNED
from saf.received import Received
from saf.receiving import claim, settlement
from saf.receiving.arrival import Arrival, hook
from saf.receiving.failures import about
from saf.receiving.hand import Hand
from saf.receiving.outcome import HANDLED, UNTOUCHED, Dead, Dropped, Outcome, Parked
from saf.receiving.retries import Policy, Suspect, Waiting
from saf.receiving.summary import SetAside
from saf.setaside import dropped
from saf.setaside.dropped import Reason
from saf.setaside.isolation import said
from saf.setaside.lane import Kind
from saf.signing.verifier import Refusal, Verifier
from saf.telemetry.logger import Log

log = Log("saf.receive")

WHY = "its receiver was told to stop"
"""Reason shown for a message that waits in a lane after it was put back."""

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
        self._unseen: dict[Received, Outcome] = dict(hand.outcomes) if hand else {}
        """Outcomes of messages that are not handed out."""
        if hand and verifier:
            self._withhold(refused(raw, hand, verifier))
        waiting = hand.waiting if hand else frozenset()
        behind: list[Received] = []
        if waiting and (tried is None or tried.lane is None):
            behind = [message for message in self._messages if message.lane in waiting]
            self._withhold({message: Parked.of(Kind.KEY, message.lane) for message in behind})
        self._arrival = Arrival(raw=raw)
        if hand and hand.spoken and hand.reader.converses:
            self._arrival = hook().arrive(raw, hand.reader, self._messages, behind)
            self._messages = self._arrival.messages
            self._unseen |= self._arrival.outcomes
        self._stopped: dict[str, int] = {}
        """Place in the delivery of each waiting lane's first waiting message."""
        self._failed: dict[UUID, int] = {}
        """Place of the dead letter of each failed dialog, by the dialog's handle."""
        self._waiting: dict[str, Waiting] = {}
        self._dead: dict[Received, Dead] = {}
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

    @property
    def raw(self) -> psycopg.Connection[Any]:
        """The psycopg connection below ``connection``, for statements of saf."""
        return self._raw

    def until(self, stopping: Event) -> None:
        """Yield no further message once the event is set; put back those that were not yielded."""
        self._stopping = stopping

    def take_own(self) -> str:
        """Return the statement that restores saf's own settings, for a caller that runs it.

        Otherwise `settle` runs it before it writes; see `saf.receiving.link`.
        """
        own, self._own = self._own, ""
        return own

    @property
    def handled(self) -> int:
        """Count of handled messages: not set aside, nor behind one of their key that is."""
        if not self._stopped and not self._dead:
            return len(self._messages) - len(self._back)
        return sum(
            message not in self._back and self._outcome(message, place) is HANDLED
            for place, message in enumerate(self._messages)
        )

    def is_behind(self, message: Received) -> bool:
        """Return whether this message or an earlier one of its key or dialog has been set aside."""
        if not self._ends_here(message):
            return False
        place = self._place(message)
        stopped = self._stopped.get(message.lane, place + 1)
        return place >= stopped or self._has_failed(message, place)

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
        self._dead[message] = Dead(reason=reason, error=said(error), fails=True)
        self.errors.append((message, error))
        if message.dialog is not None:
            dialog = message.dialog.handle
            self._failed[dialog] = min(place, self._failed.get(dialog, place))
        elif self._policy.block:
            self._stop(message, f"behind a dead letter: {said(error)}", attempts=0)

    def drop(self, message: Received, reason: Reason) -> None:
        """Count a message that was handed out without effect as dropped, by its reason.

        This is written immediately, so that it is undone together with the handler's work.
        """
        assert self._hand is not None  # noqa: S101 - there is a message
        counted = [(message.shard, reason, message.message_id)]
        dropped.count(self._raw, self._hand.reader.subscription_id, counted)

    def presume(self, message: Received, error: str) -> None:
        """Make a message wait in its lane, its attempts counted, as if this attempt had failed."""
        wait = self._policy.wait_seconds(message.attempt)
        self._stop(message, error, attempts=message.attempt, wait=wait)

    def epoch(self, message: Received) -> int:
        """Return the epoch of the shard that holds the message."""
        assert self._hand is not None  # noqa: S101 - there is a message
        return self._hand.shards[message.shard].epoch

    def settle(self) -> SetAside:
        """Write the messages' outcomes, count them, and return the counts.

        Call it before the commit.
        """
        hand = self._hand
        if hand is None:
            return SetAside()
        own = self.take_own()
        if self._is_plain(hand):
            claim.move(self._raw, hand, own)
            return SetAside()
        if own:
            self._raw.execute(own.encode())
        if self._back:
            self._put_back(hand)
        outcomes = self.outcomes()
        tried = self._tried.lane if self._tried else None
        settlement.write(
            self._raw,
            hand,
            outcomes,
            arrival=self._arrival,
            waiting=self._waiting,
            succeeded=[] if tried is None or tried in self._waiting else [tried],
        )
        claim.move(self._raw, hand)
        log_refused(hand, outcomes)
        aside = settlement.counted({m: o for m, o in outcomes.items() if m not in self._back})
        self.parked, self.buried = aside
        return aside

    def _is_plain(self, hand: Hand) -> bool:
        """Return whether all messages that were read are handled, and none needs more than that."""
        return not (
            self._unseen
            or self._stopped
            or self._dead
            or self._back
            or self._tried
            or hand.spoken
            or hand.late
        )

    def outcomes(self) -> dict[Received, Outcome]:
        """Return the outcome of each message in hand, by the decisions so far."""
        outcomes = self._unseen | {
            message: Parked.of(Kind.KEY, message.lane) if self._waits(message, place) else HANDLED
            for message, place in self._arrival.received.items()
        }
        for place, message in enumerate(self._messages):
            outcomes[message] = self._outcome(message, place)
        if self._back:
            outcomes |= {message: UNTOUCHED for message in outcomes if self._back.stays(message)}
        return outcomes

    def _outcome(self, message: Received, place: int) -> Outcome:
        """Return the outcome of a message that was handed out, unless it is put back."""
        if message in self._dead:
            return self._dead[message]
        if self._has_failed(message, place):
            return Dropped(reason=Reason.ENDED)
        if place >= self._stopped.get(message.lane, place + 1):
            return Parked.of(Kind.KEY, message.lane)
        return HANDLED

    def _withhold(self, outcomes: dict[Received, Outcome]) -> None:
        """Take messages out of the delivery, with their outcomes."""
        if outcomes:
            self._unseen |= outcomes
            self._messages = [message for message in self._messages if message not in outcomes]

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

    def _ends_before(self, message: Received) -> bool:
        """Return whether the receiver was told to stop before this message was given.

        The attempt at the first message of a lane is already counted, so that message is given.
        """
        counted = self._tried is not None and self._tried.lane is not None
        first = counted and message is self._messages[0]
        return self._stopping is not None and self._stopping.is_set() and not first

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


def refused(
    raw: psycopg.Connection[Any], hand: Hand, verifier: Verifier
) -> dict[Received, Outcome]:
    """Verify the messages in hand and note their signers; return the refused messages."""
    found: dict[Received, Outcome] = {}
    hashes = hook().body_hashes(raw, hand.reader, hand.messages) if hand.spoken else {}
    for message in hand.messages:
        verdict = verifier(message, hashes.get(message), assembles=hand.reader.converses)
        if not isinstance(verdict, Refusal):
            message.is_signed_by(verdict)
        elif not hook().is_of_saf(message):
            found[message] = Dead(reason=verdict.reason, error=verdict.error, as_stored=True)
    if found and hand.spoken and hand.reader.converses:
        for message in hook().closing(raw, found):
            del found[message]
    return found


def log_refused(hand: Hand, outcomes: Mapping[Received, Outcome]) -> None:
    """Log the messages that a verifier has refused."""
    for message, result in outcomes.items():
        if isinstance(result, Dead) and result.reason in (UNSIGNED, UNKNOWN_KEY, ALTERED):
            log.warning(
                "message_refused",
                subscription=hand.reader.name,
                **about(message),
                from_service=message.from_service,
                reason=result.reason,
                detail=f"{result.error}: it is a dead letter",
            )
