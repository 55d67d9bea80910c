"""Arrival: the effects of a delivery's dialog messages on their endpoints.

Arrival happens when messages are received, in the receiver's transaction, for all messages of a
delivery together. Receiving knows no dialogs: it calls this module through a hook, `Dialogs`.

`arrive` locks the rows of the messages' groups, then those of their endpoints. The row of a group
stays locked until the transaction ends, so one receiver at a time processes related conversations,
and other receivers wait. If a message is the first of a dialog, or an Error of its initiator that
arrives without the first message, it creates the target's endpoint. `saf.dialogs.facts` decides
which messages are taken, and the endpoints' new facts are written. So the application finds the
state that its messages have led to, and its work commits together with the messages' receipt.

Some messages are not handed out:

- A dropped message is counted by its reason (`why_dropped`, `saf.setaside.dropped`).
- A message that is ahead is parked in a lane of its conversation. Once the missing message has
  arrived, the parked one moves to the delayed messages, and is due immediately.
- A fragment of a large body is kept until the last fragment arrives, which is the message
  (`saf.dialogs.assembly`).
- An answer to a dialog without an end here is left for an operator, because no correct sender sends
  one (`no_end`).

A message that receiving sets aside has not been received: `DialogArrival.take_back` undoes its
arrival. A message that is given up, that cannot be received, or that the contract does not allow,
fails its conversation: both ends get an Error.

Receivers that require signatures still take harmless messages of saf itself (`is_harmless`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import UUID

import psycopg

from saf.database import fetch
from saf.dialogs import set_back
from saf.dialogs.assembly import Assembled, hashes, is_fragment, set_aside, whole
from saf.dialogs.conversations import fail
from saf.dialogs.dialog import Dialog
from saf.dialogs.endpoints import (
    RECEIVE,
    TAKE_BACK,
    End,
    Endpoint,
    columns,
    end_of,
    ended_here,
    in_hand,
    write,
)
from saf.dialogs.facts import Facts, Verdict, judge
from saf.dialogs.set_back import compare, recognise
from saf.dialogs.statements import COMPARE, DIRECT, END, ERROR, TIMER, Code
from saf.errors import ContractViolation, DialogEnded, SchemaViolation
from saf.message import ALTERED, DEFAULT_MAX_BYTES
from saf.received import Received
from saf.receiving import retries
from saf.receiving.arrival import Arrival, Hook
from saf.receiving.hand import Reader
from saf.receiving.outcome import HANDLED, Dead, Dropped, Outcome, Parked
from saf.setaside.dropped import Reason
from saf.setaside.lane import Kind
from saf.transaction import enter

LARGEST = 64 * 1024
"""Largest message that may be taken without a signature, in bytes."""

# Messages that follow without a gap, and messages that need not wait: an Error, or one to drop
MAKE_DUE = f"""
UPDATE saf.parked p SET kind = '{Kind.LATER}', subject = p.shard::text, deliver_at = now()
FROM (
    SELECT parked_id, ended OR message_type = '{ERROR}' OR receive_sequence >= sequence
           - dense_rank() OVER (PARTITION BY subject, from_initiator ORDER BY sequence) AS due
    FROM unnest(%(subject)s::text[], %(from_initiator)s::boolean[], %(receive_sequence)s::bigint[],
                %(ended)s::boolean[]) AS e (subject, from_initiator, receive_sequence, ended)
    JOIN saf.parked USING (subject, from_initiator)
    WHERE subscription_id = %(subscription_id)s AND destination = '' AND kind = '{Kind.AHEAD}'
) AS ahead
WHERE p.parked_id = ahead.parked_id AND due
RETURNING p.shard
"""


@dataclass(kw_only=True)
class DialogArrival(Arrival):
    """The result of a delivery's arrival, including the endpoints of its messages."""

    not_copied: list[Received] = field(default_factory=list)
    """Fragments whose bodies are not copied yet."""
    assembled: list[Assembled] = field(default_factory=list)
    """Messages whose bodies arrived in fragments."""
    before: dict[Received, tuple[Endpoint, Facts]] = field(default_factory=dict)
    """For each message to hand out: its endpoint, and the endpoint's facts before the message."""

    def take_back(self, outcomes: Mapping[Received, Outcome]) -> None:
        """Undo the arrival of the messages that are not received, by the outcomes of all.

        A message that waits is not received. An Error dropped behind a dead letter is not received
        either: otherwise nothing would report the dead letter's own Error. The fragments of all
        other messages are deleted as useless.
        """
        known: dict[UUID, Endpoint] = {}
        for message, outcome in outcomes.items():
            is_error = isinstance(outcome, Dropped) and message.message_type == ERROR
            if message in self.before and (is_error or isinstance(outcome, Parked)):
                endpoint, facts = self.before[message]
                if endpoint.dialog.handle not in known:
                    if facts.timer == endpoint.facts.timer:
                        facts = replace(facts, timer=None)
                    endpoint.facts = facts
                    known[endpoint.dialog.handle] = endpoint
        write(self.raw, TAKE_BACK, known.values())
        for one in self.assembled:
            if not isinstance(outcomes.get(one), Parked):
                one.forget()

    def give_up(self, message: Received) -> None:
        """Note that a message will never be handled: its conversation fails at both ends."""
        if message.dialog is not None:
            # the other end must not see the error's details: the dead letter has them
            text = f"message {message.sequence or message.message_type} could not be handled"
            message.dialog.fail(enter(self.raw), Code.QUARANTINED, text)


class Dialogs(Hook):
    """The dialogs' hook in receiving."""

    def arrive(
        self,
        raw: psycopg.Connection[Any],
        reader: Reader,
        messages: list[Received],
        behind: list[Received],
    ) -> Arrival:
        """Process messages that arrive at their endpoints."""
        return arrive(raw, reader, messages, behind)

    def fail_unseen(self, raw: psycopg.Connection[Any], message: Received) -> None:
        """End the conversation of a message that cannot be received."""
        fail_unseen(raw, message)

    def body_hashes(
        self, raw: psycopg.Connection[Any], reader: Reader, messages: Sequence[Received]
    ) -> dict[Received, str]:
        """Return the hashes of fragments' bodies, which were not read."""
        return hashes(raw, reader, messages)

    def is_of_saf(self, message: Received) -> bool:
        """Return whether saf itself sends such a message unsigned, and it can do no harm."""
        return is_harmless(message)

    def closing(
        self, raw: psycopg.Connection[Any], messages: Collection[Received]
    ) -> Collection[Received]:
        """Return which of these messages are Ends for ends that have ended themselves.

        A routing service sends them without a signature of the other end. They tell nothing.
        """
        ends = {
            one: end_of(one)
            for one in messages
            if one.message_type == END and one.from_initiator is not None and one.conversation_id
        }
        ended = ended_here(raw, ends.values()) if ends else set()
        return [one for one, place in ends.items() if place in ended]

    def by_itself(self, message: Received) -> Callable[[Any], object] | None:
        """Return a call that ends a dialog whose other end has ended or failed; ignore timers."""
        dialog = message.dialog
        if dialog is None or message.message_type not in (END, ERROR, TIMER):
            return None
        return (lambda _: None) if message.message_type == TIMER else partial(end_too, dialog)


def arrive(
    raw: psycopg.Connection[Any],
    reader: Reader,
    messages: list[Received],
    behind: list[Received],
) -> DialogArrival:
    """Process messages that arrive at their endpoints. Messages of no dialog pass unchanged.

    Messages in ``behind`` wait behind others of their keys.
    """
    arrival = DialogArrival(raw=raw)
    arrival.outcomes = {one: violating(why) for one in messages if (why := _malformed(one))}
    messages = [message for message in messages if message not in arrival.outcomes]
    endpoints = in_hand(raw, messages)
    if reader.signer is not None:
        for known in endpoints.values():
            known.dialog = replace(known.dialog, signer=reader.signer)
    recognised = recognise(raw, endpoints, messages)
    arrival.outcomes |= {
        one: violating(reason) if end_of(one) in endpoints else astray(reason)
        for one, reason in recognised.forgotten
    }
    arrival.outcomes |= dict.fromkeys(recognised.done, HANDLED)
    last: dict[End, int] = {}
    for message in recognised.messages:
        if message.message_type == ERROR and message.sequence is not None:
            last[end_of(message)] = message.sequence
    for message in _in_sequence(recognised.messages):
        if message.from_initiator is None:
            arrival.messages.append(message)
        elif endpoint := endpoints.get(end_of(message)):
            _come_to(arrival, reader, endpoint, message, last.get(end_of(message), 0))
        else:
            _meet_nobody(arrival, message)
    ahead = [one for one, outcome in arrival.outcomes.items() if isinstance(outcome, Parked)]
    waiting = [one for one in (*ahead, *behind) if is_fragment(one)]
    set_aside(raw, reader, [*arrival.not_copied, *waiting])
    changed = [one for one in endpoints.values() if one.facts != one.stored]
    write(raw, RECEIVE, changed)
    for endpoint in endpoints.values():
        if endpoint.failure and endpoint.failure[0] is Code.SET_BACK:
            set_back.fail(raw, endpoint, endpoint.failure[1])
        elif endpoint.failure:
            endpoint.dialog.fail(enter(raw), *endpoint.failure)
    set_back.answer(raw, endpoints.values())
    _make_due(raw, reader, endpoints)
    return arrival


def _malformed(message: Received) -> str | None:
    """Return why a message cannot belong to the dialog that it claims; None if it can."""
    if message.from_initiator is None:
        return None
    if message.conversation_id is None:
        return "it is of a dialog, and has no conversation_id"
    counted = message.message_type != COMPARE  # an end that has sent nothing compares with 0
    if message.sequence is not None and message.sequence < counted:
        return f"its number in the dialog is {message.sequence}"
    if message.sequence == 1 and message.from_initiator and not message.from_service:
        return "it begins a dialog, and has no from_service to answer to"
    return None


def _in_sequence(messages: list[Received]) -> list[Received]:
    """Sort messages so that those of one end are in the order of their numbers."""
    places: dict[End, list[int]] = defaultdict(list)
    for place, message in enumerate(messages):
        if message.from_initiator is not None and message.sequence is not None:
            places[end_of(message)].append(place)
    ordered = list(messages)
    for indices in places.values():
        in_order = sorted((messages[place] for place in indices), key=lambda one: one.sequence or 0)
        for place, message in zip(indices, in_order, strict=True):
            ordered[place] = message
    return ordered


def _come_to(
    arrival: DialogArrival, reader: Reader, endpoint: Endpoint, message: Received, last: int
) -> None:
    """Process a message at its end. An Error has overtaken all numbers before ``last``."""
    failed_before = endpoint.stored.error_code is not None
    if failed_before and message.message_type == ERROR and message.sequence is None:
        # only this message tells the end that it has failed, whatever the other end sends
        _meet(arrival, reader, endpoint, message)
    elif endpoint.failure and message.sequence == 1 and message.from_initiator:
        arrival.outcomes[message] = violating(endpoint.failure[1])
    elif endpoint.failure:
        arrival.outcomes[message] = Dropped(reason=Reason.ENDED)
    elif (message.sequence or 0) < last:
        arrival.outcomes[message] = Dropped(reason=Reason.OVERTAKEN)
    elif message.message_type == COMPARE:
        compare(endpoint, message)
        arrival.outcomes[message] = HANDLED
    else:
        _meet(arrival, reader, endpoint, message)


def _meet(arrival: DialogArrival, reader: Reader, endpoint: Endpoint, message: Received) -> None:
    """Take, park, drop or refuse a message at its endpoint."""
    before, dialog, fresh = endpoint.facts, endpoint.dialog, message.parked_id is None
    verdict, after = judge(before, message, ended_here=endpoint.ended_here, over=endpoint.over)
    application = after.ended_there == before.ended_there and after.error_code is None
    fragment = False
    if verdict is Verdict.TAKE and message.sequence and application:
        fragment = is_fragment(message)
        try:
            message = _checked(arrival, reader, dialog, message)
        except ContractViolation as violation:
            endpoint.failure = Code.VIOLATION, str(violation)
            arrival.outcomes[message] = violating(str(violation))
            return
        except _OtherBody as other:
            arrival.outcomes[message] = Dead(reason=ALTERED, error=str(other), as_stored=True)
            return
    endpoint.facts = after
    if verdict is Verdict.WAIT:
        endpoint.asks |= bool(endpoint.lineage) and fresh
        arrival.outcomes[message] = Parked.of(Kind.AHEAD, message.conversation_id)
    elif verdict is Verdict.DROP:
        reason = why_dropped(before, message, ended_here=endpoint.ended_here, over=endpoint.over)
        arrival.outcomes[message] = Dropped(reason=reason)
    elif fragment:
        arrival.received[message] = len(arrival.messages)
        arrival.not_copied.append(message)
    else:
        message.belongs_to(dialog)
        arrival.before[message] = endpoint, before
        arrival.messages.append(message)


class _OtherBody(Exception):
    """A routing service has altered fragments; they stay, like the dead letter."""


def _checked(arrival: DialogArrival, reader: Reader, dialog: Dialog, message: Received) -> Received:
    """Return a message in the form to hand out; raise a `ContractViolation` if it must not be."""
    known = None
    if dialog.contract:
        known = dialog.contract.allowed(
            message.message_type, from_initiator=not dialog.is_initiator
        )
    if is_fragment(message):
        return message
    if facts := whole(message):
        set_aside(arrival.raw, reader, arrival.not_copied)
        arrival.not_copied.clear()
        message = Assembled(message, arrival.raw, *facts)
        if not message.is_there():
            raise ContractViolation(f"message {message.sequence}: fragments are missing")
        if message.signed_body is not None and message.sha256 != message.signed_body:
            raise _OtherBody("its large body differs from the body that its first sender signed")
        arrival.assembled.append(message)
    if known is not None and known.reads:
        if message.size > DEFAULT_MAX_BYTES:
            problem = f"{message.size:,} bytes are more than {DEFAULT_MAX_BYTES:,}"
            raise SchemaViolation(known.name, "$", problem)
        known.check(message.body)
    return message


def why_dropped(facts: Facts, message: Received, *, ended_here: bool, over: bool) -> Reason:
    """Return why `saf.dialogs.facts.judge` drops a message. Pure.

    Args:
        facts: the end's facts before the message.
        message: the message that is dropped.
        ended_here: the end has ended.
        over: the dialog's lifetime is over.
    """
    if message.sequence is None:
        return Reason.OUTDATED
    if message.sequence <= facts.receive_sequence:
        return Reason.REPEAT
    if over and not (ended_here or facts.ended_there or facts.error_code is not None):
        return Reason.EXPIRED
    return Reason.ENDED


def _meet_nobody(arrival: DialogArrival, message: Received) -> None:
    """Process a message without an end here: not begun yet, forgotten, or elsewhere."""
    if message.sequence is None:
        arrival.outcomes[message] = Dropped(reason=Reason.OUTDATED)
    elif message.from_initiator:
        arrival.outcomes[message] = Parked.of(Kind.AHEAD, message.conversation_id)
    else:
        arrival.outcomes[message] = astray(no_end(message))


def violating(error: str) -> Dead:
    """Return the outcome of a message that its conversation does not allow."""
    return Dead(reason="rejected", error=error, as_stored=True)


def astray(error: str) -> Dead:
    """Return the outcome of a message that answers a dialog not begun here."""
    return Dead(reason="no_dialog", error=error)


def no_end(message: Received) -> str:
    """Return the error for a message that answers a dialog not begun here."""
    broker = message.to_broker
    address = "" if broker is None else f" It is addressed to broker {broker}."
    return (
        f"this broker has no end of conversation {message.conversation_id}: the dialog was "
        f"begun elsewhere, or ended long ago and is forgotten."
        f"{address}"
    )


def _make_due(raw: psycopg.Connection[Any], reader: Reader, endpoints: dict[End, Endpoint]) -> None:
    """Make messages due that waited for messages that have arrived."""
    ends = [
        {
            "subject": str(conversation_id),
            "from_initiator": not is_initiator,
            "receive_sequence": one.facts.receive_sequence,
            "ended": bool(one.facts.ended_there or one.facts.error_code is not None or one.failure),
        }
        for (conversation_id, is_initiator), one in endpoints.items()
    ]
    names = ("subject", "from_initiator", "receive_sequence", "ended")
    params = {**columns(names, ends), "subscription_id": reader.subscription_id}
    if ends:
        retries.time_late(raw, reader, sorted({shard for (shard,) in fetch(raw, MAKE_DUE, params)}))


def fail_unseen(raw: psycopg.Connection[Any], message: Received) -> None:
    """Fail the conversation of a message that cannot be received, if the conversation is known."""
    if message.from_initiator is None or message.conversation_id is None:
        return
    text = f"message {message.sequence or message.message_type} could not be received"
    fail(raw, message.conversation_id, message.from_initiator, Code.QUARANTINED, text)


def is_harmless(message: Received) -> bool:
    """Return whether a message may be taken without a signature.

    saf sends these messages of dialogs unsigned, because a broker or an operator sends them:

        Error     the lifetime is over, a message could not be handled or was given up, an end was
                  set back; with one of saf's own codes, which are below zero; also as a routing
                  service passes it on
        timer     from an end to itself
        compare   how much an end has sent and received
        direct    an initiator speaks to its target without the router from now on

    A receiver that requires signatures takes them if they contain nothing else: a forger can end a
    dialog with such a message, but do nothing more. An End is not harmless, because a forged End
    would make a dialog that was cut off look complete. An application's own Error is not harmless
    either.
    """
    if message.conversation_id is None or message.size > LARGEST:
        return False
    of_dialog = message.from_initiator is not None
    if message.message_type in (TIMER, DIRECT):
        return of_dialog and message.sequence is None and message.body == b"{}"
    match message.message_type, _said(message.body):
        case str(kind), {"code": int(code), "text": str(), **more} if code < 0:
            return kind == ERROR and (not more or _is_original(more, code))
        case str(kind), {"received": int(), "answer": bool(), **more}:
            return kind == COMPARE and not more and of_dialog and message.sequence is not None
        case _:
            return False


def _is_original(more: Any, code: int) -> bool:
    """Return whether an Error has nothing more than its form before a router has passed it on."""
    match more:
        case {"original": {"code": int(first), "text": str(), **others}, **rest}:
            return first == code and not others and not rest
        case _:
            return False


def _said(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def end_too(dialog: Dialog, connection: Any) -> None:
    """End a dialog that the other end has ended or failed, unless this end has ended as well."""
    with suppress(DialogEnded):
        dialog.end(connection)
