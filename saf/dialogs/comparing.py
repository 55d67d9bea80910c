"""Comparing: an end sends its counts of messages sent and received; after a repair, all ends do.

A message of type `COMPARE` contains how much its sender has sent, as its own number, and how much
its sender has received. It does not count as a message of the dialog. It travels the same way as
all earlier messages, so when it arrives, those messages have arrived too, or are missing.
`saf.dialogs.set_back` defines the other end's reaction.

`announce` is for the repair of a broker that was set back. It gives the open ends a lineage, so
that other ends attribute all later messages to the new incarnation, and makes each end compare.
Messages sent between the set-back and the repair belong to the new incarnation too: they were
created after the newest batch that a destination knows and this broker never opened.

The subscribers of a monolog do not answer: `saf.dialogs.monologs` handles monologs.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from saf.database import fetch
from saf.dialogs.lineage import HEADER as LINEAGE
from saf.dialogs.monologs import JSON, ReceivedMonolog, publisher_set_back
from saf.dialogs.statements import COMPARE, HEARD_OF, INTRODUCTION

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
  AND message_type IS DISTINCT FROM '{COMPARE}' AND NOT EXISTS (
      SELECT FROM saf.conversation c
      WHERE c.conversation_id = i.conversation_id AND NOT c.is_initiator)
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


def compare(connection: psycopg.Connection[Any]) -> int:
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
    return compare(connection)
