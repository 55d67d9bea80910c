"""The proof: compare the application's messages with those that their destinations hold.

It trusts neither the forwarder's counters nor a classifier: a flight's row determines where its
message belongs. All messages of a destination are copied next to the outbox, and SQL compares the
two message by message: as sets and, for each key, as sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from saf.database import Dsn

COLUMNS = (
    *("message_id", "from_service", "to_service", "key", "message_type"),
    *("headers", "body"),
)
"""All parts of a message that its receiver sees."""

Received = tuple[
    str | None, str | None, str | None, str | None, str | None, str | None, bytes | str
]
"""A message as its receiver reads it: the values of `COLUMNS`; a body as text is PostgreSQL's."""

RECEIVED = """
CREATE TEMP TABLE received (id bigint GENERATED ALWAYS AS IDENTITY, message_id uuid,
                            from_service text, to_service text, key text, message_type text,
                            headers jsonb, body bytea)
ON COMMIT DROP
"""
FILL = f"COPY received ({', '.join(COLUMNS)}) FROM STDIN"
STORED = """
COPY (SELECT message_id, from_service, to_service, key, message_type, headers - {without}, body
      FROM saf.inbox ORDER BY id) TO STDOUT
"""

DIGEST = (
    "sha256(convert_to("
    "ROW(message_id, from_service, {service}, key, message_type, headers, body)::text, 'UTF8'))"
)
SENT = f"SELECT message_id, id, key, {DIGEST.format(service='to_service')}, true FROM saf.outbox"
# The expected contents of one airport's store; messages of the others should be missing there
ROUTED = f"""
SELECT message_id, id, key, {DIGEST.format(service="origin")}, origin = {{store}}
FROM saf.outbox JOIN flight USING (message_id)
"""

# A message is out of order if a later message of its key is stored before it. A sequence never
# takes back numbers when a transaction rolls back.
COMPARISON = f"""
WITH sent (message_id, id, key, digest, here) AS (
    {{sent}}
),
stored AS (
    SELECT message_id, id, {DIGEST.format(service="to_service")} AS digest FROM received
),
pairs AS (
    SELECT message_id, sent.id AS sent_id, stored.id AS stored_id, here,
           sent.digest <> stored.digest AS changed,
           sent.key IS NOT NULL AND sent.id < max(sent.id) OVER (
               PARTITION BY sent.key COLLATE "C" ORDER BY stored.id
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
       (SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('saf.outbox', 'id')), 0)
               - count(*) FROM saf.outbox) AS rolled_back,
       (SELECT count(*) FROM flight FULL JOIN saf.outbox USING (message_id)
        WHERE flight.message_id IS NULL OR outbox.message_id IS NULL) AS not_atomic
FROM pairs
"""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Result, as numbers of messages."""

    sent: int
    """Messages in the outbox, sent by transactions that committed."""
    forwarded: int
    """Messages at the destinations."""
    lost: int
    """Messages in the outbox that are missing at their destination."""
    misrouted: int
    """Messages at a destination where they do not belong."""
    duplicated: int
    """Additional copies of messages at a destination."""
    out_of_order: int
    """Messages that are stored after a later message of their key."""
    changed: int
    """Messages whose stored body, key, service or headers differ from those sent."""
    not_sent: int
    """Messages at a destination that are missing in the outbox."""
    not_atomic: int
    """Messages without their business row, and business rows without their message."""
    rolled_back: int
    """Messages that a transaction wrote to the outbox and rolled back."""

    @property
    def holds(self) -> bool:
        """True if every message was delivered exactly once, unchanged and in order."""
        harmless = {"sent", "forwarded", "rolled_back"}
        return not any(getattr(self, f.name) for f in fields(self) if f.name not in harmless)


def prove(application: Dsn, messages: Iterable[Received], airport: str | None = None) -> Proof:
    """Compare an application's outbox with the messages of a destination, in order of arrival.

    With an airport, these must be the messages about flights from there, for a service of that
    name.
    """
    sent = sql.SQL(SENT if airport is None else ROUTED).format(store=sql.Literal(airport))
    with (
        application.connect(role="demo") as connection,
        psycopg.Cursor(connection, row_factory=class_row(Proof)) as cursor,
    ):
        cursor.execute("SET LOCAL work_mem = '256MB'")
        cursor.execute(RECEIVED)
        with cursor.copy(FILL) as filled:
            for message in messages:
                filled.write_row(message)
        cursor.execute("ANALYZE received")
        cursor.execute(sql.SQL(COMPARISON).format(sent=sent))
        proof = cursor.fetchone()
    assert proof is not None  # an aggregate returns a row
    return proof


def stored(mom: Dsn, without: str = "") -> Iterator[Received]:
    """Yield all messages of a MOM store's inbox, without a header that was added on the way."""
    query = sql.SQL(STORED).format(without=sql.Literal(without))
    with mom.connect(role="demo") as connection, connection.cursor().copy(query) as rows:
        yield from rows.rows()


def together(proofs: Iterable[Proof]) -> Proof:
    """Add up the results of several stores of one application."""
    found = list(proofs)
    counts = {f.name: sum(getattr(proof, f.name) for proof in found) for f in fields(Proof)}
    of_the_sender = {name: getattr(found[0], name) for name in ("rolled_back", "not_atomic")}
    return Proof(**(counts | of_the_sender))
