"""The proof: what the application sent against what the MOM store has, message by message.

It trusts no counter of the forwarder's. The outbox is copied beside the inbox, and SQL compares
the two as sets and, per key, as sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import psycopg
from psycopg.rows import class_row

from saf.database import Dsn

# Everything of a message that its receiver sees.
DIGEST = (
    "sha256(convert_to("
    "ROW(message_id, from_service, to_service, key, message_type, headers, body)::text, 'UTF8'))"
)

# A sequence never takes back the numbers of a transaction that rolls back.
SENDER = """
SELECT (SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('saf.outbox', 'id')), 0)
               - count(*) FROM saf.outbox) AS rolled_back,
       (SELECT count(*) FROM flight f FULL JOIN saf.outbox o USING (message_id)
        WHERE f.message_id IS NULL OR o.message_id IS NULL) AS not_atomic
"""

OUTBOX = f"COPY (SELECT message_id, id, key, {DIGEST} FROM saf.outbox) TO STDOUT (FORMAT binary)"

SENT = """
SET LOCAL work_mem = '256MB';
CREATE TEMP TABLE sent (message_id uuid, id bigint, key text COLLATE "C", digest bytea)
ON COMMIT DROP
"""

# A message is out of order if one of its key that was sent after it is stored before it.
COMPARISON = f"""
WITH stored AS (
    SELECT message_id, id, {DIGEST} AS digest FROM saf.inbox
),
pairs AS (
    SELECT message_id, sent.id AS sent_id, stored.id AS stored_id,
           sent.digest <> stored.digest AS changed,
           sent.key IS NOT NULL AND sent.id < max(sent.id) OVER (
               PARTITION BY sent.key ORDER BY stored.id
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
           ) AND stored.id IS NOT NULL AS overtaken
    FROM sent FULL JOIN stored USING (message_id)
)
SELECT count(DISTINCT sent_id) AS sent,
       count(stored_id) AS forwarded,
       count(*) FILTER (WHERE stored_id IS NULL) AS lost,
       count(stored_id) - count(DISTINCT message_id) FILTER (WHERE stored_id IS NOT NULL)
           AS duplicated,
       count(*) FILTER (WHERE overtaken) AS out_of_order,
       count(*) FILTER (WHERE changed) AS changed,
       count(*) FILTER (WHERE sent_id IS NULL) AS not_sent,
       %(rolled_back)s::bigint AS rolled_back,
       %(not_atomic)s::bigint AS not_atomic
FROM pairs
"""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was found. All count messages."""

    sent: int
    """In the outbox: the transaction that sent them committed."""
    forwarded: int
    """In the inbox of the MOM store."""
    lost: int
    """In the outbox, not in the inbox."""
    duplicated: int
    """In the inbox once more than they should."""
    out_of_order: int
    """Stored after a message of their key that was sent later."""
    changed: int
    """Stored with another body, key, service or headers than sent."""
    not_sent: int
    """In the inbox, not in the outbox."""
    not_atomic: int
    """Without their business row, or business rows without their message."""
    rolled_back: int
    """Written to the outbox by a transaction that rolled back."""

    @property
    def holds(self) -> bool:
        """Every message was delivered exactly once, unchanged, in order."""
        harmless = {"sent", "forwarded", "rolled_back"}
        return not any(getattr(self, f.name) for f in fields(self) if f.name not in harmless)


def prove(application: Dsn, mom: Dsn) -> Proof:
    """Compare an application's outbox with a MOM store that nobody else sends to."""
    with application.connect(role="proof") as sender, mom.connect(role="proof") as receiver:
        row = sender.execute(SENDER).fetchone()
        assert row is not None  # noqa: S101 - two scalar subqueries give a row
        receiver.execute(SENT)
        with (
            sender.cursor().copy(OUTBOX) as outbox,
            receiver.cursor().copy("COPY sent FROM STDIN (FORMAT binary)") as sent,
        ):
            for data in outbox:
                sent.write(data)
        receiver.execute("ANALYZE sent")
        with psycopg.Cursor(receiver, row_factory=class_row(Proof)) as comparison:
            comparison.execute(COMPARISON, {"rolled_back": row[0], "not_atomic": row[1]})
            proof = comparison.fetchone()
    assert proof is not None  # noqa: S101 - an aggregate gives a row
    return proof
