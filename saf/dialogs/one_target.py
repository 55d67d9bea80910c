"""One target: an initiator's dialog has one other end, wherever its first message has gone.

If routes share, a dialog takes the route that its key has chosen. A source that was set back may
have forgotten the choice, though not the first message, and so send that message again, to another
destination. Then the dialog has two targets, which do not know each other:

- An initiator takes answers only from the broker that has answered first (``answered_by``). Answers
  of another target are dead letters, and that target gets an Error.
- The repair asks the destinations which dialogs they have targets of. One target stays, if possible
  one that has answered, and the dialog's messages go there again. The others get an Error.

The Error has the code `Code.SET_BACK`. A target that gets it fails, and so does any dialog joined
to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any
from uuid import UUID

import psycopg

from saf.database import fetch
from saf.dialogs.endpoints import End, Endpoint, end_of
from saf.dialogs.lineage import HEADER
from saf.dialogs.monologs import JSON
from saf.dialogs.statements import ERROR, Code
from saf.received import Received

# Has the next number, so that a target takes it whatever it has received. The end uses that number
# again for its next message, because only a superfluous target gets this Error
TELL = f"""
INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                        from_initiator, sequence, message_type, headers, body)
SELECT gen_random_uuid(), service, far_service, other.broker, CAST(conversation_id AS text),
       conversation_id, is_initiator, send_sequence + 1, '{ERROR}',
       {JSON} || jsonb_build_object('{HEADER}', coalesce(lineage, jsonb_build_array(
           jsonb_build_array((SELECT incarnation FROM saf.broker), 0)))),
       convert_to(CAST(jsonb_build_object('code', {Code.SET_BACK:d}, 'text',
           'one end was set back: its dialog continues at another broker, which also got its '
           || 'first message') AS text), 'UTF8')
FROM unnest(%(handles)s::uuid[], %(brokers)s::uuid[]) AS other (handle, broker)
JOIN saf.conversation c USING (handle)
"""

# Open targets, and those to be begun by messages that are not received yet
TARGETS = """
SELECT conversation_id, service, (SELECT broker_id FROM saf.broker)
FROM saf.conversation
WHERE NOT is_initiator AND far_broker = %(source)s AND state <> 'closed' AND error_code IS NULL
UNION
SELECT conversation_id, to_service, (SELECT broker_id FROM saf.broker)
FROM saf.inbox i
WHERE source = %(source)s AND from_initiator AND sequence = 1 AND NOT EXISTS (
    SELECT FROM saf.conversation c
    WHERE c.conversation_id = i.conversation_id AND NOT c.is_initiator)
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
