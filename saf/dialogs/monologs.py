"""Monologs that have lost a message for good: an Error takes its place, so no gap is silent.

Nobody answers a monolog, so its ends cannot compare (`saf.dialogs.comparing`). But a repair is
connected to both sides, and asks a destination's inbox how much of each monolog has come.

- *The publisher was set back.* A monolog that it remembers ends, because subscribers may have
  received more than it knows of. A monolog that it has forgotten also ends, if a destination has
  heard it.
- *A destination was set back.* What the publisher still has is sent again. If it does not have all
  that the destination lacks, the subscribers there get the Error instead, and the monolog goes on:
  it is whole at the other destinations.

If a person gives up a message on its way (a dead letter), an Error takes its place as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from saf.database import fetch
from saf.dialogs.statements import END, ERROR, Code

JSON = "jsonb_build_object('content-type', 'application/json')"

# How far each monolog was received without a gap; a late subscriber may have begun in the middle
RECEIVED_MONOLOGS = f"""
SELECT conversation_id, max(from_service), max(to_service),
       max(sequence) FILTER (WHERE sequence = first + place - 1),
       bool_or(message_type = '{ERROR}') IS TRUE
FROM (
    SELECT conversation_id, from_service, to_service, sequence, message_type,
           min(sequence) OVER of_one AS first, dense_rank() OVER of_one AS place
    FROM saf.inbox
    WHERE source = %(source)s AND from_initiator IS NULL AND sequence > 0
      AND conversation_id IS NOT NULL
    WINDOW of_one AS (PARTITION BY conversation_id ORDER BY sequence)
) AS one
GROUP BY conversation_id HAVING bool_or(message_type = '{END}') IS NOT TRUE
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
        error_text = 'the publisher was set back: it has no memory of what it had sent after '
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
           'the publisher was set back: it has no memory of this monolog, of which it had sent '
           || max(sequence) || ' messages or more' AS text
    FROM {THESE} WHERE NOT EXISTS (SELECT FROM saf.conversation c
                                   WHERE c.conversation_id = heard.conversation_id)
    GROUP BY conversation_id) AS forgotten""",
)

# Takes the place of messages that nobody has any more; its number is that of the last one
LOST = IN_PLACE.format(
    code=int(Code.SET_BACK),
    failed=f"""(
    SELECT conversation_id, from_service, to_service, CAST(%(broker)s AS uuid) AS to_broker,
           last AS sequence,
           'the broker of the subscribers was set back: of messages ' || sequence + 1 || ' to '
           || last || ', some are lost there; what is sent after them goes on' AS text
    FROM (SELECT heard.*, coalesce((
              SELECT max(number) FROM generate_series(heard.sequence + 1, c.send_sequence) AS number
              WHERE number NOT IN (
                  SELECT o.sequence FROM there o WHERE o.conversation_id = c.conversation_id
              )), 0) AS last
          FROM {THESE} JOIN saf.conversation c ON c.conversation_id = heard.conversation_id
          WHERE c.monolog AND c.error_code IS NULL) AS compared
    WHERE last > sequence) AS lost""",
)
TELL_OF_LOSS = f"""
WITH there AS MATERIALIZED (
    SELECT conversation_id, sequence
    FROM (SELECT conversation_id, sequence, from_initiator FROM saf.outbox
          UNION ALL SELECT conversation_id, sequence, from_initiator FROM saf.parked
          UNION ALL SELECT conversation_id, sequence, from_initiator FROM saf.dead_letter) AS m
    WHERE from_initiator IS NULL AND sequence > 0
      AND conversation_id = ANY (%(conversation_id)s::uuid[])
)
{LOST}
"""


# Goes to the subscribers at the destination that the copy was for; to all, if it had none yet
GIVE_UP = IN_PLACE.format(
    code=int(Code.GIVEN_UP),
    failed="""(
    SELECT conversation_id, from_service, to_service, sequence,
           CAST(brokers ->> destination AS uuid) AS to_broker,
           'message ' || sequence || ' was given up by ' || session_user
           || ': it was a dead letter on its way, ' || reason
           || '; what is sent after it goes on' AS text
    FROM saf.dead_letter JOIN saf.subscription USING (subscription_id)
    LEFT JOIN (SELECT brokers FROM saf.route_version ORDER BY version DESC LIMIT 1) AS known ON true
    WHERE dead_letter_id = ANY (%(dead_letter_ids)s) AND log = 'outbox'
      AND from_initiator IS NULL AND conversation_id IS NOT NULL AND sequence > 0) AS given_up""",
)


@dataclass(frozen=True, kw_only=True)
class ReceivedMonolog:
    """A monolog that is not over, as far as a destination has received it."""

    conversation_id: UUID
    from_service: str
    to_service: str
    sequence: int
    """The last number before which no message is missing."""
    failed: bool
    """Whether an Error has come."""


def received_monologs(connection: psycopg.Connection[Any], source: UUID) -> list[ReceivedMonolog]:
    """Return how far a destination has received a source's monologs. Reads the whole inbox.

    It is for a destination's database; ``source`` is the publishers' broker.
    """
    return [
        ReceivedMonolog(
            conversation_id=one,
            from_service=publisher,
            to_service=topic,
            sequence=sequence,
            failed=failed,
        )
        for one, publisher, topic, sequence, failed in fetch(
            connection, RECEIVED_MONOLOGS, {"source": source}
        )
    ]


def publisher_set_back(
    connection: psycopg.Connection[Any], since: datetime | None, known: Iterable[ReceivedMonolog]
) -> None:
    """End monologs of which subscribers may know more. Call it in the repair's transaction.

    Args:
        connection: to the publishers' broker.
        since: as for `saf.dialogs.comparing.announce`; None: end only monologs of which more is
            known.
        known: how far the destinations have received them.
    """
    params = _columns(one for one in known if not one.failed)
    connection.execute(FAIL, params | {"every": since is not None})
    connection.execute(FAIL_FORGOTTEN, params)


def subscribers_set_back(
    connection: psycopg.Connection[Any], broker: UUID, known: Iterable[ReceivedMonolog]
) -> None:
    """Tell a destination's subscribers what nobody can send again. Call it in a transaction.

    Args:
        connection: to the publishers' broker.
        broker: the destination's broker_id.
        known: how far the destination has received them, since it was set back.
    """
    connection.execute(TELL_OF_LOSS, _columns(known) | {"broker": broker})


def _columns(known: Iterable[ReceivedMonolog]) -> dict[str, list[Any]]:
    ones = [*known]
    names = ("conversation_id", "from_service", "to_service", "sequence")
    return {name: [getattr(one, name) for one in ones] for name in names}
