"""What a person decides about dead letters: to try them again, here or elsewhere, or to give up.

`retry` hands them to the forwarder again, in the order they had, in a lane of their own (see
`saf.setaside.lane`), or to the receivers of their subscription, in the lane of their key and
ahead of what waits there. `redirect` hands them to the forwarder for another destination. `discard`
gives them up. All let a key go on that waited for the decision, and remember who did it, when and
why in ``saf.audit``. `saf.operating.bulk` does the same with many, some at a time.

If a message of a dialog is a dead letter on its way, the other end waits for it. The dialog goes on
in order if the message is retried, and fails at both ends if it is given up. A monolog goes on
meanwhile; its subscribers get an Error in place of a message that is given up.

A dead letter of a batch that is open, and not past it, stays (`saf.setaside.staying`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from uuid import UUID

import psycopg

from saf.columns import COLUMNS
from saf.database import fetch
from saf.dialogs import monologs, statements
from saf.setaside.audit import ONE_AT_A_TIME, audit
from saf.setaside.dead import CHOSEN, STAYS, Filter
from saf.setaside.lane import Kind
from saf.setaside.staying import TAKEN
from saf.setaside.unhandled import FOR_ALL

LOCKED = f"""
WITH {TAKEN}
SELECT dead_letter_id, message_id {CHOSEN} AND ({STAYS}) IS NULL
ORDER BY 1 LIMIT %(limit)s FOR UPDATE OF d
"""

# A retry's number, its audit_id, rises with each retry, and so does the lane's watermark; within a
# retry, the order is that in which the messages died. Expired messages go too: a person says so.
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
# Lets keys go on that waited for a person's decision
LET_KEYS_GO_ON = f"""
UPDATE saf.backoff b SET next_attempt_at = now() FROM {RETRIED}
  AND (b.subscription_id, b.destination, b.kind, b.subject)
      = (d.subscription_id, d.destination, l.kind, l.subject)
  AND of_key IS NOT NULL AND b.attempts = 0 AND NOT b.awaits_handler
"""
DELETE = "DELETE FROM saf.dead_letter WHERE dead_letter_id = ANY (%(dead_letter_ids)s)"


def retry(
    connection: psycopg.Connection[Any],
    chosen: Filter,
    why: str,
    person: str | None = None,
    limit: int | None = None,
) -> list[UUID]:
    """Hand dead letters again to the program that had them; return their message ids, in order.

    A message that is retried is no longer a dead letter, so a second retry of it does nothing.
    ``person`` is as for `saf.setaside.audit.audit`; with ``limit``, only the oldest are retried.
    """
    return _hand_over(connection, chosen, why, person, limit, to=None)


def redirect(
    connection: psycopg.Connection[Any],
    chosen: Filter,
    why: str,
    person: str | None = None,
    limit: int | None = None,
    *,
    to: str,
) -> list[UUID]:
    """Hand dead letters of the forwarder to it again, for the destination ``to``; as `retry` does.

    Those of receivers stay, because they have arrived, and so do those of dialogs, whose other ends
    are where they are. Whether there is such a destination, the caller has checked.
    """
    return _hand_over(connection, chosen, why, person, limit, to=to)


def discard(
    connection: psycopg.Connection[Any],
    chosen: Filter,
    why: str,
    person: str | None = None,
    limit: int | None = None,
) -> list[UUID]:
    """Give dead letters up for good; return their message ids.

    Both ends of a dialog that lacks one of them get an Error, and so do the subscribers of a
    monolog.
    """
    with connection.transaction():
        ids, message_ids = _locked(connection, chosen, limit)
        if ids:
            audit(connection, "discard", message_ids, why, person)
            params = {"dead_letter_ids": ids}
            connection.execute(statements.GIVE_UP, params)
            connection.execute(monologs.GIVE_UP, params)
            connection.execute(LET_KEYS_GO_ON, params)
            connection.execute(DELETE, params)
    return message_ids


def _hand_over(
    connection: psycopg.Connection[Any],
    chosen: Filter,
    why: str,
    person: str | None,
    limit: int | None,
    *,
    to: str | None,
) -> list[UUID]:
    with connection.transaction():
        connection.execute(ONE_AT_A_TIME)
        ids, message_ids = _locked(connection, chosen, limit, to=to)
        if ids:
            action = "retry" if to is None else f"redirect to {to}"
            number = audit(connection, action, message_ids, why, person)
            params = {"number": number, "dead_letter_ids": ids, "to": to, "person": person}
            connection.execute(DUE, params)
            connection.execute(PARK, params)
            connection.execute(DELETE, params)
    return message_ids


def _locked(
    connection: psycopg.Connection[Any],
    chosen: Filter,
    limit: int | None,
    *,
    to: str | None = None,
) -> tuple[list[int], list[UUID]]:
    params = asdict(chosen) | {"limit": limit, "to": to}
    rows = fetch(connection, LOCKED, params)
    return [row[0] for row in rows], [row[1] for row in rows]
