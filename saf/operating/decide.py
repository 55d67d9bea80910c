"""Operators' decisions about dead letters: retry them, here or elsewhere, or give them up.

`retry` passes dead letters to their program again: to the forwarder, in their previous order and in
a separate lane (see `saf.setaside.lane`); or to the receivers of their subscription, in the lane of
their key and ahead of the messages that wait in that lane. `redirect` passes them to the forwarder
for another destination. `discard` gives them up. Each decision releases keys that waited for it,
and records in ``saf.audit`` who decided, when and why.

If a dialog's message becomes a dead letter on its way, the other end waits for it. The dialog
continues in order if the message is retried, and fails at both ends if it is given up. A monolog
does not wait; its subscribers get an Error in place of a message that is given up.

`in_chunks` decides about many messages: dead letters, or parked messages (see
`saf.operating.decide_parked`). A decision about a million messages in one transaction would hold
its locks for minutes, and could not be stopped. So each `CHUNK` is a separate transaction, with its
own line in the audit, and the oldest messages go first. If a decision stops or fails midway,
decided messages are done, and the others are still set aside.

Some messages stay as they are. A dead letter stays while its batch is open and has not passed it
(see `saf.setaside.staying`). `in_chunks` does not touch messages set aside after it began, so a
message that fails again immediately is not decided about twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Protocol, TypeVar
from uuid import UUID

import psycopg

from saf.columns import COLUMNS
from saf.database import fetch
from saf.dialogs import monologs, statements
from saf.setaside.audit import ONE_AT_A_TIME, audit
from saf.setaside.dead import CHOSEN, STAYS, Filter
from saf.setaside.lane import Kind
from saf.setaside.parked_messages import ParkedFilter
from saf.setaside.staying import TAKEN
from saf.setaside.unhandled import FOR_ALL

CHUNK = 1000
"""Number of messages decided about in one transaction."""

LOCKED = f"""
WITH {TAKEN}
SELECT dead_letter_id, message_id {CHOSEN} AND ({STAYS}) IS NULL
ORDER BY 1 LIMIT %(limit)s FOR UPDATE OF d
"""

# A retry's number, its audit_id, rises with each retry, and so does the lane's watermark; within a
# retry, messages keep the order in which they died. Expired messages go too: an operator wants it.
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

Chosen = TypeVar("Chosen", Filter, ParkedFilter)
Decided_contra = TypeVar("Decided_contra", Filter, ParkedFilter, contravariant=True)


class Decision(Protocol[Decided_contra]):
    """A function of `saf.operating.decide` or `saf.operating.decide_parked`."""

    def __call__(
        self,
        connection: psycopg.Connection[Any],
        chosen: Decided_contra,
        why: str,
        person: str | None = None,
        limit: int | None = None,
    ) -> list[UUID]:
        """Decide about the oldest of the chosen messages; return their message ids."""


def retry(
    connection: psycopg.Connection[Any],
    chosen: Filter,
    why: str,
    person: str | None = None,
    limit: int | None = None,
) -> list[UUID]:
    """Pass dead letters to their program again; return their message ids, in order.

    A retried message is no longer a dead letter, so a second retry does nothing. ``person``: see
    `saf.setaside.audit.audit`. With ``limit``, only the oldest are retried.
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
    """Pass dead letters of the forwarder to it again, for the destination ``to``; like `retry`.

    Dead letters of receivers stay, because they have arrived, and so do those of dialogs, whose
    other ends cannot move. The caller has checked that the destination exists.
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

    If a dialog misses a message that is given up, both of its ends get an Error. The subscribers of
    a monolog get an Error, too.
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


def in_chunks(
    connection: psycopg.Connection[Any],
    decision: Decision[Chosen],
    chosen: Chosen,
    why: str,
    *,
    person: str | None = None,
    chunk: int = CHUNK,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[list[UUID]]:
    """Decide about all chosen messages that are set aside now; yield the ids of each chunk.

    Call ``stop`` before each chunk: if it returns true, the remaining messages stay as they are.
    The connection is in autocommit.
    """
    chosen = chosen.until_now(connection)
    while not stop() and (done := decision(connection, chosen, why, person, chunk)):
        yield done


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
