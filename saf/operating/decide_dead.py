"""Dead letters for a decision: how they are locked, passed on and given up.

They are passed to the forwarder, in a separate lane (see `saf.setaside.lane`) and in the order in
which they became dead letters; or to the receivers of their subscription, in the lane of their key,
in the order of the log and ahead of the messages that wait in that lane. If a dialog's message
becomes a dead letter on its way, the other end waits for it. The dialog continues in order if the
message is retried. A monolog does not wait; its subscribers get an Error in place of a message that
is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg

from saf.columns import COLUMNS
from saf.database import fetch
from saf.dialogs import monologs, statements
from saf.setaside.lane import Kind
from saf.setaside.selection import TAKEN, DeadLetters
from saf.setaside.unhandled import FOR_ALL

LOCKED = DeadLetters.sql(f"""
WITH {TAKEN}
SELECT dead_letter_id, message_id {{chosen}} AND ({{stays}}) IS NULL
ORDER BY 1 LIMIT %(limit)s FOR UPDATE OF d
""")

# A retry's number, its audit_id, rises with each retry, and so does the lane's watermark; within a
# retry, messages keep the order in which they became dead letters. Expired messages go too: an
# operator wants it.
RETRIED = f"""
saf.dead_letter d JOIN saf.subscription s USING (subscription_id)
CROSS JOIN LATERAL (
    SELECT CASE WHEN s.log = 'inbox' THEN '{Kind.KEY}' ELSE '{Kind.RETRY}' END AS kind,
           CASE WHEN s.log = 'inbox' THEN coalesce(d.key, d.message_id::text)
                ELSE '' END AS subject,
           CASE WHEN s.log = 'inbox' THEN d.shard END AS of_key) AS l
WHERE dead_letter_id = ANY (%(dead_letter_ids)s)
"""
PARK = f"""
INSERT INTO saf.parked
    (subscription_id, destination, kind, subject, shard, id, batch, position, {", ".join(COLUMNS)})
SELECT subscription_id, coalesce(%(to)s::text, destination), kind, subject, shard, id, %(number)s,
       row_number() OVER (ORDER BY dead_letter_id),
       {", ".join("NULL" if c == "expires_at" else f"d.{c}" for c in COLUMNS)}
FROM {RETRIED}
"""
DUE = f"""
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, error)
SELECT DISTINCT subscription_id, coalesce(%(to)s::text, destination), kind, subject, of_key,
       'retried by ' || coalesce(%(person)s::text, session_user)
FROM {RETRIED}
ON CONFLICT (subscription_id, destination, kind, subject, broker)
DO UPDATE SET attempts = 0, next_attempt_at = now(), {FOR_ALL}
"""
# Release keys that waited for an operator's decision
LET_KEYS_GO_ON = f"""
UPDATE saf.backoff b SET next_attempt_at = now() FROM {RETRIED}
  AND (b.subscription_id, b.destination, b.kind, b.subject)
      = (d.subscription_id, d.destination, l.kind, l.subject)
  AND of_key IS NOT NULL AND b.attempts = 0 AND NOT b.awaits_handler
"""
DELETE = "DELETE FROM saf.dead_letter WHERE dead_letter_id = ANY (%(dead_letter_ids)s)"


class HeldDead:
    """Dead letters that are locked for a decision."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        chosen: DeadLetters,
        limit: int | None,
        to: str | None,
    ) -> None:
        rows = fetch(connection, LOCKED, chosen.params(limit, to))
        self._dead_letter_ids: list[int] = [number for number, _ in rows]
        self.message_ids: list[UUID] = [message_id for _, message_id in rows]

    def pass_on(
        self, connection: psycopg.Connection[Any], to: str | None, number: int, person: str | None
    ) -> None:
        """Pass them to their program, or for ``to`` to the forwarder."""
        params = {"number": number, "to": to, "person": person}
        for statement in (DUE, PARK, DELETE):
            connection.execute(statement, params | {"dead_letter_ids": self._dead_letter_ids})

    def give_up(self, connection: psycopg.Connection[Any]) -> None:
        """Give them up for good."""
        give_up(connection, self._dead_letter_ids)


def give_up(connection: psycopg.Connection[Any], dead_letter_ids: Sequence[int]) -> None:
    """Delete dead letters; let conversations know, and keys go on that waited for the decision."""
    for statement in (statements.GIVE_UP, monologs.GIVE_UP, LET_KEYS_GO_ON, DELETE):
        connection.execute(statement, {"dead_letter_ids": dead_letter_ids})
