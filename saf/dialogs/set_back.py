"""Set back: what happens to a dialog when one end came back with less than it had.

A backup is restored, or a standby that lacked the last transactions takes over: then one end no
longer knows all messages that it has sent or received. After the repair (`saf rebase`) it sends as
a new incarnation of its broker, which every message carries (`saf.dialogs.lineage`). When an end
learns of a new incarnation, from whichever message comes first, it checks how far the two ends
agree:

- *This end has received numbers that the other end no longer knows.* New messages of the other end
  under these numbers would be taken for repeats. So both ends get an Error, `Code.SET_BACK`, that
  lists the numbers.
- *No such numbers exist:* the dialog continues. Later messages of the earlier incarnation that
  arrive only now are not mixed up with the new messages: they are dead letters.

Messages that an end has *received* and lost come again if the sender still has them
(docs/operations.md). If not, nothing would report the loss, and the end would wait without a limit.
So ends compare (`saf.dialogs.comparing`). An end fails, together with the other end, if it learns
that more was sent than has arrived, or that more was received than it has sent, or if it has failed
before. An end that was set back asks the other end, at the repair and whenever a message has to
wait for a missing one.

An end is gone completely if the dialog had begun after the backup:

- a message for a missing initiator is answered with an Error, and is a dead letter;
- a message for a missing target may only be too early, so it waits. If the broker was set back, it
  asks the initiator. The answer creates a failed end, so that the application knows.

A dialog may also have two targets, if it had begun before and its first message went to another
destination the second time (`saf.dialogs.one_target`).

An end that begins where another may have existed has a lineage from its first number on, so that
the other end, which may have received such numbers before, can distinguish the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import psycopg

from saf.database import of_broker
from saf.dialogs.comparing import say_these
from saf.dialogs.endpoints import End, Endpoint, columns, end_of
from saf.dialogs.lineage import HEADER, Lineage, fork, incarnation, read, said_by
from saf.dialogs.monologs import JSON
from saf.dialogs.one_target import of_others
from saf.dialogs.statements import COMPARE, ERROR, Code
from saf.received import Received
from saf.transaction import enter

# Fragments of bodies that the earlier incarnation was still sending are useless
NOTE_LINEAGES = """
WITH heard AS (
    UPDATE saf.conversation c SET far_lineage = h.lineage
    FROM unnest(%(handle)s::uuid[], %(lineage)s::jsonb[]) AS h (handle, lineage)
    WHERE c.handle = h.handle
)
DELETE FROM saf.fragment f
USING unnest(%(conversation_id)s::uuid[], %(from_initiator)s::boolean[], %(after)s::bigint[])
    AS h (conversation_id, from_initiator, after)
WHERE (f.conversation_id, f.from_initiator) = (h.conversation_id, h.from_initiator)
  AND f.sequence > h.after
"""

WHO = "SELECT broker_id, incarnation FROM saf.broker"
# Goes to the message's source, because nothing else is known of that end. The end here remembers no
# number, so the answer uses a number that it has not assigned.
ANSWER = f"""
INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                        from_initiator, sequence, message_type, headers, body)
SELECT gen_random_uuid(), service, far_service, source, CAST(conversation_id AS text),
       conversation_id, is_initiator, sequence, message_type,
       {JSON} || jsonb_build_object('{HEADER}',
           jsonb_build_array(jsonb_build_array((SELECT incarnation FROM saf.broker), 0))),
       convert_to(body, 'UTF8')
FROM unnest(%(service)s::text[], %(far_service)s::text[], %(source)s::uuid[],
            %(conversation_id)s::uuid[], %(is_initiator)s::boolean[], %(sequence)s::bigint[],
            %(message_type)s::text[], %(body)s::text[])
    AS a (service, far_service, source, conversation_id, is_initiator, sequence, message_type, body)
"""
ANSWERS = (
    *("service", "far_service", "source", "conversation_id", "is_initiator", "sequence"),
    *("message_type", "body"),
)


@dataclass(kw_only=True)
class Recognised:
    """Results of `recognise` for a delivery's messages before they are judged."""

    messages: list[Received] = field(default_factory=list)
    """Messages to judge."""
    forgotten: list[tuple[Received, str]] = field(default_factory=list)
    """Messages of ends that are as good as gone, each with the reason: no end will take them."""
    done: list[Received] = field(default_factory=list)
    """saf's own messages that need no further processing."""


def recognise(
    raw: psycopg.Connection[Any], endpoints: dict[End, Endpoint], messages: list[Received]
) -> Recognised:
    """Find the sending incarnations, and the messages for ends that do not exist here."""
    recognised = Recognised()
    rivals = of_others(raw, endpoints, messages)
    for message in rivals:
        if message.message_type in (COMPARE, ERROR):
            recognised.done.append(message)
        else:
            text = f"conversation {message.conversation_id} continues with another target"
            recognised.forgotten.append((message, text))
    messages = [item for item in messages if item not in rivals]
    lineages = {
        item: _lineage(item)
        for item in messages
        if item.from_initiator is not None and item.sequence is not None
    }
    known = all(end_of(item) in endpoints for item in lineages)
    if known and not any((*lineages.values(), *(item.far_lineage for item in endpoints.values()))):
        recognised.messages = messages
        return recognised
    _note_lineages(raw, endpoints, lineages)
    strangers = _strangers(raw, [item for item in lineages if end_of(item) not in endpoints])
    for message in messages:
        endpoint = endpoints.get(end_of(message)) if message in lineages else None
        if message in strangers and message.message_type != COMPARE:
            text = f"conversation {message.conversation_id} is not known here, or not any more"
            recognised.forgotten.append((message, text))
        elif message.message_type == COMPARE and (
            endpoint is None or incarnation(lineages[message]) < incarnation(endpoint.far_lineage)
        ):
            recognised.done.append(message)
        elif endpoint is not None and _is_forgotten(message, lineages[message], endpoint):
            text = (
                f"message {message.sequence} was sent before the other end was set back, and is "
                "no longer known there"
            )
            recognised.forgotten.append((message, text))
        else:
            recognised.messages.append(message)
    return recognised


def compare(endpoint: Endpoint, message: Received) -> None:
    """Compare an end's facts with the counts that the other end has sent."""
    facts, text = endpoint.facts, None
    sent, (received, asks) = message.sequence or 0, _standing(message)
    if facts.error_code is not None:
        if asks:
            text = f"the other end has failed, and this one did not know: {facts.error_text}"
    elif received > endpoint.sent:
        text = (
            f"messages {_known_there(endpoint) + 1} to {received} were received by the other end, "
            f"and are not known to service {endpoint.dialog.service!r} any more"
        )
    elif sent > facts.receive_sequence and not facts.ended_there:
        text = (
            f"messages {facts.receive_sequence + 1} to {sent} were sent by the other end, and are "
            f"missing at service {endpoint.dialog.service!r}"
        )
    elif asks:
        endpoint.answers = True
    if text is not None:
        endpoint.failure = Code.SET_BACK, f"one end was set back: {text}; they may be lost"


def answer(raw: psycopg.Connection[Any], endpoints: Iterable[Endpoint]) -> None:
    """Make ends compare that were asked to; make ends ask that miss messages."""
    ends = [endpoint for endpoint in endpoints if not endpoint.failure]
    askers = {endpoint.dialog.handle for endpoint in ends if endpoint.asks}
    say_these(raw, askers, answer=True)
    answering = {endpoint.dialog.handle for endpoint in ends if endpoint.answers}
    say_these(raw, answering - askers, answer=False)


def fail(raw: psycopg.Connection[Any], endpoint: Endpoint, text: str) -> None:
    """Send the Error to both ends; to this end only if it has neither ended nor failed before."""
    here = not endpoint.ended_here and endpoint.stored.error_code is None
    endpoint.dialog.fail(enter(raw), Code.SET_BACK, text, again=True, here=here)


def _lineage(message: Received) -> Lineage:
    """Return the lineage of the sender."""
    if not message.may_say(HEADER):
        return ()
    headers = message.headers
    return read(headers.get(HEADER)) if isinstance(headers, dict) else ()


def _note_lineages(
    raw: psycopg.Connection[Any],
    endpoints: dict[End, Endpoint],
    lineages: dict[Received, Lineage],
) -> None:
    """Note the newest incarnation that sends to each end."""
    entries: list[dict[str, Any]] = []
    for message, lineage in sorted(lineages.items(), key=lambda entry: incarnation(entry[1])):
        endpoint = endpoints.get(end_of(message))
        if endpoint is None or incarnation(lineage) <= incarnation(endpoint.far_lineage):
            continue
        after = fork(endpoint.far_lineage, lineage) or 0
        received = endpoint.facts.receive_sequence
        endpoint.far_lineage = lineage
        if after < received:
            text = (
                f"one end was set back: messages {after + 1} to {received} were received by "
                f"service {endpoint.dialog.service!r}, and are no longer known to the other end;"
                " messages that it has sent since under these numbers are not received"
            )
            endpoint.failure = Code.SET_BACK, text
        entries.append(
            {
                "handle": endpoint.dialog.handle,
                "lineage": json.dumps(lineage),
                "conversation_id": message.conversation_id,
                "from_initiator": message.from_initiator,
                # fragments that this end has received go too, as for any end that has failed
                "after": max(after, received),
            }
        )
    if entries:
        names = ("handle", "lineage", "conversation_id", "from_initiator", "after")
        raw.execute(NOTE_LINEAGES, columns(names, entries))


def _is_forgotten(message: Received, lineage: Lineage, endpoint: Endpoint) -> bool:
    if message.message_type == COMPARE:
        return False
    number = message.sequence or 0
    return said_by(endpoint.far_lineage, number) != said_by(lineage, number)


def _strangers(raw: psycopg.Connection[Any], unknown: list[Received]) -> set[Received]:
    """Answer messages for ends that do not exist here; return those that no end will ever take."""
    unknown = [one for one in unknown if one.from_service]
    if not unknown:
        return set()
    broker_id, number = of_broker(raw, WHO)
    local = [one for one in unknown if one.to_broker in (None, broker_id)]
    lost = [one for one in local if not one.from_initiator and one.message_type != ERROR]
    error = {"code": Code.SET_BACK, "text": "one end was set back: the other end is gone"}
    answers = {one.conversation_id: _answer(one, 1, ERROR, error) for one in lost}
    if number > 1:
        early = [one for one in local if one.from_initiator and one.parked_id is None]
        question = {"received": 0, "answer": True}
        answers |= {
            one.conversation_id: _answer(one, 0, COMPARE, question)
            for one in early
            if one.message_type not in (COMPARE, ERROR)
        }
    if answers:
        raw.execute(ANSWER, columns(ANSWERS, [*answers.values()]))
    return set(lost)


def _answer(message: Received, sequence: int, message_type: str, body: object) -> dict[str, Any]:
    return {
        "service": message.service,
        "far_service": message.from_service,
        "source": message.source,
        "conversation_id": message.conversation_id,
        "is_initiator": not message.from_initiator,
        "sequence": sequence,
        "message_type": message_type,
        "body": json.dumps(body),
    }


def _known_there(endpoint: Endpoint) -> int:
    """Return the last number under which both ends know the same message of this end.

    The other end has received more than was sent, so it does not know the newest incarnation. Under
    that incarnation's numbers, it knows messages that were sent before the set-back.
    """
    return min([endpoint.sent, *(after for _, after in endpoint.lineage[-1:])])


def _standing(message: Received) -> tuple[int, bool]:
    """Return how much the sender has received, and whether it asks this end to compare too."""
    try:
        document = json.loads(message.body)
        return int(document["received"]), bool(document["answer"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return 0, False
