"""Monologs that have lost a message for good: an Error takes its place, so no gap is silent.

Subscribers do not answer a monolog, so its ends cannot compare (`saf.dialogs.comparing`). But a
repair is connected to both sides, and queries a destination's inbox for the progress of each
monolog.

- *The publisher was set back.* A monolog that the publisher remembers ends, because subscribers may
  have received more than it knows. A forgotten monolog also ends, if a destination has received
  some of its messages.
- *A destination was set back.* See `saf.dialogs.monolog_gaps`.

If an operator gives up a message on its way (a dead letter), an Error takes its place as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from saf.database import fetch
from saf.dialogs.statements import END, ERROR, Code, lost_as

JSON = "jsonb_build_object('content-type', 'application/json')"

PUBLISHER = "the publisher was set back"
"""Text of the Error that ends a monolog because of its publisher; no other Error contains it."""

# The numbers that have arrived. An Error of a set-back also stands for missing earlier numbers.
RECEIVED_MONOLOGS = f"""
SELECT conversation_id, max(from_service), max(to_service), max(sequence),
       CAST(range_agg(int8range(
           CASE WHEN message_type = '{ERROR}' AND position(%(set_back)s::bytea IN body) > 0
                THEN 1 ELSE sequence END, sequence, '[]')) AS text),
       bool_or(message_type = '{END}') IS TRUE,
       bool_or(message_type = '{ERROR}' AND position(%(publisher)s::bytea IN body) > 0) IS TRUE
FROM saf.inbox
WHERE source = %(source)s AND from_initiator IS NULL AND sequence > 0
  AND conversation_id IS NOT NULL
GROUP BY conversation_id
"""

IN_PLACE = f"""
INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                        sequence, message_type, headers, body)
SELECT gen_random_uuid(), from_service, to_service, to_broker, CAST(conversation_id AS text),
       conversation_id, sequence, '{ERROR}', {JSON},
       convert_to(CAST(jsonb_build_object('code', {{code}}, 'text', text) AS text), 'UTF8')
FROM {{failed}}
"""
THESE = """
unnest(%(conversation_id)s::uuid[], %(from_service)s::text[], %(to_service)s::text[],
       %(sequence)s::bigint[]) AS heard (conversation_id, from_service, to_service, sequence)
"""

FAIL = f"""
WITH failed AS (
    UPDATE saf.conversation c SET send_sequence = send_sequence + 1, changed_at = now(),
        error_code = {Code.SET_BACK:d},
        error_text = '{PUBLISHER}: it has no memory of what it had sent after '
            || 'message ' || send_sequence || ', and subscribers may have received more'
    WHERE monolog AND NOT ended_here AND error_code IS NULL AND (%(every)s::boolean OR EXISTS (
        SELECT FROM {THESE}
        WHERE heard.conversation_id = c.conversation_id AND heard.sequence > c.send_sequence))
    RETURNING service AS from_service, far_service AS to_service, far_broker AS to_broker,
              conversation_id, send_sequence AS sequence, error_text AS text
)
{IN_PLACE.format(code=int(Code.SET_BACK), failed="failed")}
"""

FAIL_FORGOTTEN = IN_PLACE.format(
    code=int(Code.SET_BACK),
    failed=f"""(
    SELECT conversation_id, max(from_service) AS from_service, max(to_service) AS to_service,
           CAST(NULL AS uuid) AS to_broker, max(sequence) + 1 AS sequence,
           '{PUBLISHER}: it does not remember this monolog, and had sent '
           || max(sequence) || ' messages or more' AS text
    FROM {THESE} WHERE NOT EXISTS (SELECT FROM saf.conversation c
                                   WHERE c.conversation_id = heard.conversation_id)
    GROUP BY conversation_id) AS forgotten""",
)

# Goes to the subscribers at the copy's destination; to all subscribers if it had none yet
GIVE_UP = IN_PLACE.format(
    code=int(Code.GIVEN_UP),
    failed=f"""(
    SELECT conversation_id, from_service, to_service, sequence,
           CAST(brokers ->> destination AS uuid) AS to_broker,
           'message ' || sequence || ' was given up by ' || session_user || ': '
           || {lost_as("reason")}
           || '; what is sent after it goes on' AS text
    FROM saf.dead_letter JOIN saf.subscription USING (subscription_id)
    LEFT JOIN (SELECT brokers FROM saf.route_version ORDER BY version DESC LIMIT 1) AS known ON true
    WHERE dead_letter_id = ANY (%(dead_letter_ids)s) AND log = 'outbox'
      AND from_initiator IS NULL AND conversation_id IS NOT NULL AND sequence > 0) AS given_up""",
)


@dataclass(frozen=True, kw_only=True)
class ReceivedMonolog:
    """A monolog as received in a destination's inbox."""

    conversation_id: UUID
    from_service: str
    to_service: str
    sequence: int
    """Highest number that has arrived."""
    numbers: str
    """Numbers that have arrived, as an int8multirange; an Error of a set-back stands for all
    numbers before it."""
    ended: bool
    failed: bool
    """True if an Error about the publisher's set-back has arrived."""

    @property
    def goes_on(self) -> bool:
        """True if the subscribers expect more messages."""
        return not (self.ended or self.failed)


def received_monologs(connection: psycopg.Connection[Any], source: UUID) -> list[ReceivedMonolog]:
    """Return a destination's progress in a source's monologs. Reads the whole inbox.

    Call it on a destination's database; ``source`` is the publishers' broker.
    """
    params = {
        "source": source,
        "set_back": f'"code": {Code.SET_BACK:d},'.encode(),
        "publisher": PUBLISHER.encode(),
    }
    return [
        ReceivedMonolog(
            conversation_id=conversation_id,
            from_service=publisher,
            to_service=topic,
            sequence=sequence,
            numbers=numbers,
            ended=ended,
            failed=failed,
        )
        for conversation_id, publisher, topic, sequence, numbers, ended, failed in fetch(
            connection, RECEIVED_MONOLOGS, params
        )
    ]


def publisher_set_back(
    connection: psycopg.Connection[Any], since: datetime | None, known: Iterable[ReceivedMonolog]
) -> None:
    """End monologs whose subscribers may know more. Call it in the repair's transaction.

    Args:
        connection: to the publishers' broker.
        since: as for `saf.dialogs.comparing.announce`; None: end only monologs with more messages
            received than sent.
        known: the progress of the destinations in them.
    """
    params = _columns(monolog for monolog in known if monolog.goes_on)
    connection.execute(FAIL, params | {"every": since is not None})
    connection.execute(FAIL_FORGOTTEN, params)


def _columns(known: Iterable[ReceivedMonolog]) -> dict[str, list[Any]]:
    monologs = [*known]
    names = ("conversation_id", "from_service", "to_service", "sequence")
    return {name: [getattr(monolog, name) for monolog in monologs] for name in names}
