"""The proof: compare the application's messages with the contents of the MOM stores.

It trusts neither the forwarder's counters nor a classifier: a flight's row determines where its
message belongs. The outbox is copied next to each inbox, and SQL compares the two message by
message: as sets and, for each key, as sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from saf.database import Dsn

# All parts of a message that its receiver sees
DIGEST = (
    "sha256(convert_to("
    "ROW(message_id, from_service, {service}, key, message_type, headers, body)::text, 'UTF8'))"
)
STORED = DIGEST.format(service="to_service")

# A sequence never takes back numbers when a transaction rolls back.
SENDER = """
SELECT (SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('saf.outbox', 'id')), 0)
               - count(*) FROM saf.outbox) AS rolled_back,
       (SELECT count(*) FROM flight f FULL JOIN saf.outbox o USING (message_id)
        WHERE f.message_id IS NULL OR o.message_id IS NULL) AS not_atomic
"""

OUTBOX = f"""
COPY (SELECT message_id, id, key, {STORED}, true FROM saf.outbox) TO STDOUT (FORMAT binary)
"""
# The expected contents of one airport's store; messages of the others should be missing there
ROUTED = f"""
COPY (SELECT message_id, id, key, {DIGEST.format(service="origin")}, origin = {{store}}
      FROM saf.outbox JOIN flight USING (message_id)) TO STDOUT (FORMAT binary)
"""

SENT = """
SET LOCAL work_mem = '256MB';
CREATE TEMP TABLE sent (message_id uuid, id bigint, key text COLLATE "C", digest bytea,
                        here boolean)
ON COMMIT DROP
"""

Received = tuple[int, str | None, str | None, str | None, str | None, str | None, str | None, bytes]
"""A message as read from a queue: its place in the order of arrival, message_id, from_service,
to_service, key, message_type, headers and body."""

RECEIVED = """
CREATE TEMP TABLE received (id bigint, message_id uuid, from_service text, to_service text,
                            key text, message_type text, headers jsonb, body bytea)
ON COMMIT DROP
"""
FILL = "COPY received FROM STDIN"

INBOX = sql.Identifier("saf", "inbox")

# A message is out of order if a later message of its key is stored before it.
COMPARISON = f"""
WITH stored AS (
    SELECT message_id, id, {STORED} AS digest FROM {{held}}
),
pairs AS (
    SELECT message_id, sent.id AS sent_id, stored.id AS stored_id, here,
           sent.digest <> stored.digest AS changed,
           sent.key IS NOT NULL AND sent.id < max(sent.id) OVER (
               PARTITION BY sent.key ORDER BY stored.id
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
           ) AND stored.id IS NOT NULL AS overtaken
    FROM sent FULL JOIN stored USING (message_id)
    WHERE here OR stored.id IS NOT NULL
)
SELECT count(DISTINCT sent_id) FILTER (WHERE here) AS sent,
       count(stored_id) AS forwarded,
       count(*) FILTER (WHERE stored_id IS NULL) AS lost,
       count(*) FILTER (WHERE NOT here) AS misrouted,
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
    """Result, as numbers of messages."""

    sent: int
    """Messages in the outbox, sent by transactions that committed."""
    forwarded: int
    """Messages in the inboxes of the MOM stores."""
    lost: int
    """Messages in the outbox that are missing in their inbox."""
    misrouted: int
    """Messages in an inbox where they do not belong."""
    duplicated: int
    """Additional copies of messages in an inbox."""
    out_of_order: int
    """Messages that are stored after a later message of their key."""
    changed: int
    """Messages whose stored body, key, service or headers differ from those sent."""
    not_sent: int
    """Messages in an inbox that are missing in the outbox."""
    not_atomic: int
    """Messages without their business row, and business rows without their message."""
    rolled_back: int
    """Messages that a transaction wrote to the outbox and rolled back."""

    @property
    def holds(self) -> bool:
        """True if every message was delivered exactly once, unchanged and in order."""
        harmless = {"sent", "forwarded", "rolled_back"}
        return not any(getattr(self, f.name) for f in fields(self) if f.name not in harmless)


def prove(application: Dsn, mom: Dsn, airport: str | None = None) -> Proof:
    """Compare an application's outbox with a MOM store that nobody else sends to.

    With an airport, the store must have the messages about flights from there, for a service of
    that name.
    """
    outbox = sql.SQL(OUTBOX if airport is None else ROUTED).format(store=sql.Literal(airport))
    with application.connect(role="proof") as sender, mom.connect(role="proof") as receiver:
        return _compared(sender, receiver, outbox, INBOX)


def prove_received(application: Dsn, messages: Iterable[Received]) -> Proof:
    """Compare an application's outbox with a queue's messages, in the application's database."""
    outbox = sql.SQL(OUTBOX).format()
    with application.connect(role="proof") as sender, application.connect(role="proof") as receiver:
        receiver.execute(RECEIVED)
        with receiver.cursor().copy(FILL) as filled:
            for message in messages:
                filled.write_row(message)
        return _compared(sender, receiver, outbox, sql.Identifier("received"))


def _compared(
    sender: psycopg.Connection[Any],
    receiver: psycopg.Connection[Any],
    outbox: sql.Composed,
    held: sql.Identifier,
) -> Proof:
    row = sender.execute(SENDER).fetchone()
    assert row is not None  # noqa: S101 - two scalar subqueries return a row
    receiver.execute(SENT)
    with (
        sender.cursor().copy(outbox) as messages,
        receiver.cursor().copy("COPY sent FROM STDIN (FORMAT binary)") as sent,
    ):
        for data in messages:
            sent.write(data)
    receiver.execute("ANALYZE sent")
    with psycopg.Cursor(receiver, row_factory=class_row(Proof)) as comparison:
        comparison.execute(
            sql.SQL(COMPARISON).format(held=held), {"rolled_back": row[0], "not_atomic": row[1]}
        )
        proof = comparison.fetchone()
    assert proof is not None  # noqa: S101 - an aggregate returns a row
    return proof


def together(proofs: Iterable[Proof]) -> Proof:
    """Add up the results of several stores of one application."""
    found = list(proofs)
    counts = {f.name: sum(getattr(proof, f.name) for proof in found) for f in fields(Proof)}
    of_the_sender = {name: getattr(found[0], name) for name in ("rolled_back", "not_atomic")}
    return Proof(**(counts | of_the_sender))
