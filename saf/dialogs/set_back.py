"""Set back: what happens to a dialog when one end came back with less than it had.

A backup is restored, or a standby that lacked the last transactions takes over: then one end no
longer knows all messages that it has sent or received. After the repair (`saf rebase`) it sends as
a new incarnation of its broker, which every message carries (`saf.dialogs.facts`). When an end
learns of a new incarnation, from whichever message comes first, it checks how far the two ends
agree:

- *This end has received numbers that the other end no longer knows.* New messages of the other end
  under these numbers would be taken for repeats. So both ends get an Error, `Code.SET_BACK`, that
  lists the numbers.
- *No such numbers exist:* the dialog continues. Later messages of the earlier incarnation that
  arrive only now are not mixed up with the new messages: they are dead letters.

Messages that an end has *received* and lost come again if the sender still has them
(docs/operations.md). If not, nothing would report the loss, and the end would wait without a limit.
So ends compare. An end fails, together with the other end, if it learns
that more was sent than has arrived, or that more was received than it has sent, or if it has failed
before. An end that was set back asks the other end, at the repair and whenever a message has to
wait for a missing one.

An end is gone completely if the dialog had begun after the backup:

- a message for a missing initiator is answered with an Error, and is a dead letter;
- a message for a missing target may only be too early, so it waits. If the broker was set back, it
  asks the initiator. The answer creates a failed end, so that the application knows.

A dialog may also have two targets, if it had begun before and its first message went to another
destination the second time.

An end that begins where another may have existed has a lineage from its first number on, so that
the other end, which may have received such numbers before, can distinguish the two.

*Comparing.* A message of type `COMPARE` contains how much its sender has sent, as its own number,
and how much its sender has received. It does not count as a message of the dialog. It travels the
same way as all earlier messages, so when it arrives, those messages have arrived too, or are
missing. `announce` is for the repair of a broker that was set back. It gives the open ends a
lineage, so that other ends attribute all later messages to the new incarnation, and makes each end
compare. Messages sent between the set-back and the repair belong to the new incarnation too: they
were created after the newest batch that a destination knows and this broker never opened. The
subscribers of a monolog do not answer: `saf.dialogs.monologs` handles monologs.

*One target.* If routes share, a dialog takes the route that its key has chosen. A source that was
set back may have forgotten the choice, though not the first message, and so send that message
again, to another destination. Then the dialog has two targets, which do not know each other:

- An initiator takes answers only from the broker that has answered first (``answered_by``). Answers
  of another target are dead letters, and that target gets an Error.
- The repair asks the destinations which dialogs they have targets of. One target stays, if possible
  one that has answered, and the dialog's messages go there again. The others get an Error.

The Error has the code `Code.SET_BACK`. A target that gets it fails, and so does any dialog joined
to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from saf.database import fetch, of_broker
from saf.dialogs.endpoints import End, Endpoint, columns, end_of
from saf.dialogs.facts import Lineage, fork, incarnation, read_lineage, said_by
from saf.dialogs.monologs import ReceivedMonolog, publisher_set_back
from saf.dialogs.redirecting import sent_from
from saf.dialogs.statements import COMPARE, ERROR, HEARD_OF, INTRODUCTION, JSON, Code
from saf.message import LINEAGE
from saf.received import Received
from saf.transaction import enter

SAY = f"""
WITH said AS (
    INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                            from_initiator, sequence, message_type, headers, body)
    SELECT gen_random_uuid(), service, far_service, far_broker, CAST(conversation_id AS text),
           conversation_id, is_initiator, send_sequence, '{COMPARE}',
           {JSON} || CASE WHEN is_initiator THEN {INTRODUCTION} ELSE jsonb_build_object() END
           || CASE WHEN lineage IS NULL THEN jsonb_build_object()
                   ELSE jsonb_build_object('{LINEAGE}', lineage) END,
           convert_to(CAST(jsonb_build_object(
               'received', receive_sequence, 'answer', %(answer)s::boolean) AS text), 'UTF8')
    FROM saf.conversation WHERE {{which}}
    RETURNING 1
)
SELECT count(*) FROM said
"""
SAY_THESE = SAY.format(which="handle = ANY (%(handles)s::uuid[])")
SAY_ALL = SAY.format(
    which=f"state <> 'closed' AND error_code IS NULL AND NOT monolog AND {HEARD_OF}"
)

# The target of a message in the inbox is still to be begun here. A routing service that redirects
# begins none
BEGINS_HERE = """
NOT EXISTS (SELECT FROM saf.conversation c
            WHERE c.conversation_id = i.conversation_id AND NOT c.is_initiator)
AND NOT EXISTS (SELECT FROM saf.resolved_conversation r
                WHERE r.key = CAST(i.conversation_id AS text) AND r.router = i.to_service)
AND NOT EXISTS (SELECT FROM saf.router r WHERE r.service = i.to_service AND r.mode = 'redirect')
"""

# Dialogs to be begun by messages that are not received yet, though their initiators may have
# forgotten them. The inbox keeps no message for longer than its conversation is remembered.
SAY_UNREAD = f"""
INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                        from_initiator, sequence, message_type, headers, body)
SELECT DISTINCT ON (i.conversation_id) gen_random_uuid(), to_service, from_service, source,
       CAST(conversation_id AS text), conversation_id, false, 0, '{COMPARE}', {JSON},
       convert_to(CAST(jsonb_build_object('received', 0, 'answer', true) AS text), 'UTF8')
FROM saf.inbox i
WHERE from_initiator AND sequence = 1 AND from_service <> ''
  AND message_type IS DISTINCT FROM '{COMPARE}' AND {BEGINS_HERE}
"""

# Numbers above ``after`` are the new incarnation's. An earlier repair's pairs are kept for the
# numbers that still exist. An end that is over sends nothing more, so it gets no lineage unless it
# has sent something since.
NEW_LINEAGE = f"""
WITH since AS (
    SELECT conversation_id, from_initiator AS is_initiator, min(sequence) - 1 AS after
    FROM saf.outbox
    WHERE created_at > %(since)s::timestamptz AND from_initiator IS NOT NULL AND sequence > 0
      AND message_type IS DISTINCT FROM '{COMPARE}'
    GROUP BY 1, 2
), fork AS (
    SELECT handle, lineage, coalesce(since.after, send_sequence) AS after
    FROM saf.conversation LEFT JOIN since USING (conversation_id, is_initiator)
    WHERE NOT monolog AND (state <> 'closed' OR since.after IS NOT NULL)
)
UPDATE saf.conversation c SET lineage = coalesce((
    SELECT jsonb_agg(one ORDER BY place)
    FROM jsonb_array_elements(fork.lineage) WITH ORDINALITY AS earlier (one, place)
    WHERE CAST(one ->> 1 AS bigint) < fork.after), '[]'
) || jsonb_build_array(jsonb_build_array(b.incarnation, fork.after))
FROM fork, saf.broker b
WHERE c.handle = fork.handle
"""

# Waiting copies need the lineage too, because they were made without it
STAMP = f"""
UPDATE {{table}} m SET headers = m.headers || jsonb_build_object('{LINEAGE}', c.lineage)
FROM saf.conversation c
WHERE (m.conversation_id, m.from_initiator) = (c.conversation_id, c.is_initiator)
  AND m.created_at > %(since)s::timestamptz AND c.lineage IS NOT NULL AND {{which}}
"""
OF_OUTBOX = "subscription_id IN (SELECT subscription_id FROM saf.subscription WHERE log = 'outbox')"
STAMPS = (
    STAMP.format(table="saf.outbox", which="true"),
    STAMP.format(table="saf.parked", which=OF_OUTBOX),
    STAMP.format(table="saf.dead_letter", which=OF_OUTBOX),
)


def compare_all(connection: psycopg.Connection[Any]) -> int:
    """Make all open ends of this broker compare; return their number. Call it in a transaction.

    Ends to be begun by messages waiting in the inbox compare as well.
    """
    ((count,),) = fetch(connection, SAY_ALL, {"answer": True})
    connection.execute(SAY_UNREAD)
    return int(count)


def say_these(raw: psycopg.Connection[Any], handles: Iterable[UUID], *, answer: bool) -> None:
    """Make these ends compare. ``answer``: the other ends must compare as well."""
    if named := list(handles):
        raw.execute(SAY_THESE, {"handles": named, "answer": answer})


def announce(
    connection: psycopg.Connection[Any],
    since: datetime | None,
    known: Iterable[ReceivedMonolog] = (),
) -> int:
    """Tell all ends that their broker is a new incarnation; return how many dialogs compare.

    This is part of `saf.operating.repair.set_back.raise_incarnation`; no other session may send in
    a dialog during it. ``since`` is the opening time of the newest batch that a destination knows
    and this broker does not, if any. ``known`` is the progress of destinations in this broker's
    monologs.
    """
    connection.execute(NEW_LINEAGE, {"since": since})
    if since is not None:
        for statement in STAMPS:
            connection.execute(statement, {"since": since})
    publisher_set_back(connection, since, known)
    return compare_all(connection)


# Has the next number, so that a target takes it whatever it has received. The end uses that number
# again for its next message, because only a superfluous target gets this Error
TELL = f"""
INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                        from_initiator, sequence, message_type, headers, body)
SELECT gen_random_uuid(), service, far_service, other.broker, CAST(conversation_id AS text),
       conversation_id, is_initiator, send_sequence + 1, '{ERROR}',
       {JSON} || jsonb_build_object('{LINEAGE}', coalesce(lineage, jsonb_build_array(
           jsonb_build_array((SELECT incarnation FROM saf.broker), 0)))),
       convert_to(CAST(jsonb_build_object('code', {Code.SET_BACK:d}, 'text',
           'one end was set back: its dialog continues at another broker, which also got its '
           || 'first message') AS text), 'UTF8')
FROM unnest(%(handles)s::uuid[], %(brokers)s::uuid[]) AS other (handle, broker)
JOIN saf.conversation c USING (handle)
"""

# Open targets, and those to be begun by messages that are not received yet
TARGETS = f"""
SELECT conversation_id, service, (SELECT broker_id FROM saf.broker)
FROM saf.conversation
WHERE NOT is_initiator AND far_broker = %(source)s AND state <> 'closed' AND error_code IS NULL
UNION
SELECT conversation_id, to_service, (SELECT broker_id FROM saf.broker)
FROM saf.inbox i
WHERE source = %(source)s AND from_initiator AND sequence = 1 AND {BEGINS_HERE}
"""

SETTLE = """
WITH target AS (
    SELECT c.handle, t.*, row_number() OVER (
        PARTITION BY c.handle ORDER BY (t.broker = c.answered_by) IS TRUE DESC,
                                       (t.destination = k.destination) IS TRUE DESC, t.destination
    ) AS place
    FROM unnest(%(conversation_id)s::uuid[], %(service)s::text[], %(broker)s::uuid[],
                %(destination)s::text[]) AS t (conversation_id, service, broker, destination)
    JOIN saf.conversation c USING (conversation_id)
    LEFT JOIN saf.route_choice k ON k.key = CAST(conversation_id AS text)
                                AND k.service = t.service AND k.broker IS NULL
    WHERE c.is_initiator AND c.far_broker IS NULL AND c.state <> 'closed' AND c.error_code IS NULL
), chosen AS (
    INSERT INTO saf.route_choice (service, key, destination)
    SELECT service, CAST(conversation_id AS text), destination FROM target WHERE place = 1
    ON CONFLICT ON CONSTRAINT route_choice_once DO UPDATE SET destination = excluded.destination
), known AS (
    UPDATE saf.conversation c SET answered_by = target.broker
    FROM target WHERE c.handle = target.handle AND place = 1
)
SELECT handle, broker FROM target WHERE place > 1
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target of a dialog, at one of the initiator's destinations."""

    conversation_id: UUID
    service: str
    broker: UUID
    destination: str


def received_dialogs(
    connection: psycopg.Connection[Any], source: UUID, destination: str
) -> list[Target]:
    """Return a source's open dialogs that have targets at a destination. Reads the whole inbox.

    Call it on the destination's database; ``destination`` is its name at the source.
    """
    return [
        Target(conversation_id=one, service=service, broker=broker, destination=destination)
        for one, service, broker in fetch(connection, TARGETS, {"source": source})
    ]


def settle(connection: psycopg.Connection[Any], targets: Iterable[Target]) -> int:
    """Continue each dialog with one of its targets; return the number of other targets told.

    Call it in the transaction of the initiators' repair, after their incarnation was raised.
    ``targets`` must belong to services whose routes share.
    """
    rows = [*map(astuple, targets)]
    if not rows:
        return 0
    names = ("conversation_id", "service", "broker", "destination")
    columns = map(list, zip(*rows, strict=True))
    rivals = fetch(connection, SETTLE, dict(zip(names, columns, strict=True)))
    _tell(connection, rivals)
    return len(rivals)


def of_others(
    raw: psycopg.Connection[Any], endpoints: dict[End, Endpoint], messages: list[Received]
) -> set[Received]:
    """Note which brokers answer initiators; return answers of other targets, which get an Error."""
    rivals = {}
    for message in messages:
        if message.source is None or message.sequence is None or message.from_initiator:
            continue
        endpoint = endpoints.get(end_of(message))
        if endpoint is None:
            continue
        if endpoint.facts.answered_by is None:
            endpoint.facts = replace(endpoint.facts, answered_by=message.source)
        elif endpoint.facts.answered_by != message.source:
            rivals[message] = endpoint.dialog.handle, message.source
    _tell(raw, {rival for one, rival in rivals.items() if one.message_type != ERROR})
    return {*rivals}


def _tell(raw: psycopg.Connection[Any], rivals: Iterable[tuple[Any, ...]]) -> None:
    if rows := [*rivals]:
        handles, brokers = map(list, zip(*rows, strict=True))
        raw.execute(TELL, {"handles": handles, "brokers": brokers})


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
       {JSON} || jsonb_build_object('{LINEAGE}',
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
    if not message.may_say(LINEAGE):
        return ()
    headers = message.headers
    return read_lineage(headers.get(LINEAGE)) if isinstance(headers, dict) else ()


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
        "source": sent_from(message),
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
