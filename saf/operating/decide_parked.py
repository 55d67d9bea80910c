"""Parked messages for a decision: how they are locked, passed on and given up.

They are passed to the forwarder for another destination, in a separate lane and in the order in
which they were written.

While an operator decides about a message, no process has it in hand. For a forwarder, the lanes of
the destination are locked (`saf.setaside.in_hand`); for receivers, the cursors of the shards, as
receivers do themselves (`saf.receiving.claim`). A member may have read due messages without a lock,
and writes their results under the lock of the cursor. So in a member's shards, decisions concern
only keys that are not due for a while, and end long before that (`LONGEST_SECONDS`). Messages that
a forwarder or a receiver has in hand at that moment, or that operators may not decide about, stay
parked (`saf.setaside.selection`).

No source knows whether a parked message has arrived after all, because a destination stored it and
its answer got lost (`saf.setaside.in_hand`). A retry is dropped there as a repeat. But then a
redirected message arrives at both destinations, and a discarded message has arrived.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf.columns import COLUMNS
from saf.database import fetch
from saf.dialogs import conversations, statements
from saf.errors import Unavailable
from saf.log.cursor import note_taken_out
from saf.log.shards import failed, newest
from saf.operating import decide_dead
from saf.setaside import backoff, in_hand, parking
from saf.setaside.lane import NO_BROKER, SAME_LANE, THE_LANE, Kind, Lane
from saf.setaside.selection import REST_SECONDS, RESTING, TAKEN, ParkedMessages
from saf.setaside.unhandled import FOR_ALL

T = TypeVar("T")

LONGEST_SECONDS = REST_SECONDS / 2
"""Maximum time for deciding about a member's keys; the rest is for the commit."""

# The lanes and shards that must be in hand before their rows are read for the decision
CONCERNED = ParkedMessages.sql(f"""
WITH {TAKEN}, chosen AS (
    SELECT p.subscription_id, s.log, p.destination, p.shard {{chosen}} AND ({{stays}}) IS NULL
    ORDER BY p.parked_id LIMIT %(limit)s)
SELECT DISTINCT subscription_id, log, destination, CASE WHEN log = 'inbox' THEN shard END
FROM chosen
""")

# Note what a receiver's failed delivery left in the row, before a lock overwrites it. Leave shards
# that a process has in hand to that process.
CLAIM = f"""
UPDATE saf.cursor c SET allowance = CASE WHEN n.failed THEN 1 ELSE c.allowance END
FROM (SELECT subscription_id, shard, batch, {failed("touched")} AS failed
      FROM (SELECT f.subscription_id, f.shard, f.batch, f.xmax AS touched
            FROM {newest("unnest(%(shards)s::smallint[])")} AS k
            JOIN saf.cursor f USING (subscription_id, shard, batch)
            ORDER BY f.shard FOR UPDATE OF f SKIP LOCKED) AS locked) AS n
WHERE (c.subscription_id, c.shard, c.batch) = (n.subscription_id, n.shard, n.batch)
RETURNING c.shard, c.owner IS NOT NULL
"""

# Read while the shards are in hand, so that a member's keys are as its last marks left them
LOCKED = ParkedMessages.sql(f"""
WITH {TAKEN}
SELECT p.parked_id, p.message_id, p.subscription_id, s.log,
       p.destination, p.kind, p.subject, p.broker, p.shard, p.conversation_id, p.from_initiator,
       coalesce(p.sequence::text, p.message_type, '') AS name
{{chosen}} AND ({{stays}}) IS NULL
  AND (p.subscription_id, p.destination, CASE WHEN s.log = 'inbox' THEN p.shard ELSE -1 END) IN (
      SELECT * FROM unnest(%(subscription_ids)s::int[], %(destinations)s::text[],
                           %(shards)s::smallint[]))
ORDER BY p.parked_id LIMIT %(limit)s FOR UPDATE OF p
""")

# Operators may make a key due at any time (`saf.setaside.waiting.retry_now`); this prevents it
HOLD = f"""
SELECT subject FROM saf.backoff b
WHERE subscription_id = %(subscription_id)s AND destination = '' AND kind = '{Kind.KEY}'
  AND subject = ANY (%(subjects)s) AND {RESTING}
ORDER BY subject FOR UPDATE
"""

# For the ends of conversations, which learn of a given-up message as they learn of a dead letter.
# A message parked at a receiver has already reached its end (`saf.dialogs.conversations`).
BURY = f"""
INSERT INTO saf.dead_letter
    (subscription_id, destination, shard, id, reason, error, {", ".join(COLUMNS)})
SELECT subscription_id, destination, shard, id, '{statements.PARKED}', '', {", ".join(COLUMNS)}
FROM saf.parked WHERE parked_id = ANY (%(parked_ids)s) AND conversation_id IS NOT NULL
  AND subscription_id IN (SELECT subscription_id FROM saf.subscription WHERE log = 'outbox')
RETURNING dead_letter_id
"""
WHO = "SELECT session_user::text"

# A key whose first message goes starts again with the next one. A key that waits for an operator's
# decision about a dead letter keeps waiting.
LET_KEYS_GO_ON = f"""
UPDATE saf.backoff b SET attempts = 0, next_attempt_at = clock_timestamp(), {FOR_ALL}
FROM (SELECT DISTINCT subscription_id, {THE_LANE} FROM saf.parked
      WHERE parked_id = ANY (%(parked_ids)s) AND kind = '{Kind.KEY}') AS p
WHERE {SAME_LANE} AND (b.attempts > 0 OR b.awaits_handler)
  AND (SELECT m.parked_id FROM saf.parked m
       WHERE (m.subscription_id, m.destination, m.kind, m.subject, m.broker)
             = (b.subscription_id, b.destination, b.kind, b.subject, b.broker)
       ORDER BY m.id LIMIT 1) = ANY (%(parked_ids)s)
"""

# A lane's number is the audit_id, which rises; within it, messages keep the order of the log. They
# expire as before: unlike a retry, a redirect is not a decision that late is better than never.
PARK = f"""
INSERT INTO saf.parked
    (subscription_id, destination, kind, subject, shard, id, batch, position, {", ".join(COLUMNS)})
SELECT subscription_id, %(to)s, '{Kind.RETRY}', '', shard, id, %(number)s,
       row_number() OVER (ORDER BY id, parked_id), {", ".join(COLUMNS)}
FROM saf.parked WHERE parked_id = ANY (%(parked_ids)s) ORDER BY id, parked_id
"""
DUE = f"""
UPDATE saf.backoff SET attempts = 0, next_attempt_at = clock_timestamp(),
       error = 'redirected by ' || coalesce(%(person)s::text, session_user)
WHERE subscription_id = ANY (%(subscription_ids)s) AND destination = %(to)s
  AND kind = '{Kind.RETRY}'
"""


@dataclass(frozen=True, kw_only=True)
class Locked:
    """One locked message."""

    parked_id: int
    message_id: UUID
    subscription_id: int
    log: str
    destination: str
    kind: str
    subject: str
    broker: UUID
    shard: int
    conversation_id: UUID | None
    from_initiator: bool | None
    name: str
    """The message in an error's text."""

    @property
    def lane(self) -> Lane:
        """The lane that it is in."""
        return Lane(
            destination=self.destination,
            kind=Kind(self.kind),
            subject=self.subject,
            broker=None if self.broker == NO_BROKER else self.broker,
        )

    @property
    def in_shard(self) -> tuple[int, int]:
        """Its subscription_id and shard."""
        return self.subscription_id, self.shard


class HeldParked:
    """Parked messages that are locked for a decision, and that no other process has in hand."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        chosen: ParkedMessages,
        limit: int | None,
        to: str | None,
    ) -> None:
        params = chosen.params(limit, to)
        places, self._owned = _take(connection, fetch(connection, CONCERNED, params))
        self._began = time.monotonic()
        params |= {
            "subscription_ids": [subscription_id for subscription_id, _, _ in places],
            "destinations": [destination for _, destination, _ in places],
            "shards": [shard for _, _, shard in places],
        }
        with psycopg.Cursor(connection, row_factory=class_row(Locked)) as cursor:
            rows = cursor.execute(LOCKED, params).fetchall() if places else []
        self._rows = self._held(connection, rows)
        self.message_ids = [row.message_id for row in self._rows]
        self._parked_ids = [row.parked_id for row in self._rows]

    def pass_on(
        self, connection: psycopg.Connection[Any], to: str | None, number: int, person: str | None
    ) -> None:
        """Pass them to the forwarder for ``to``."""
        self._note(connection)
        target = Lane(destination=to or "", kind=Kind.RETRY)
        lanes = _grouped((row.subscription_id, row.lane) for row in self._rows)
        for subscription_id in lanes:
            # all lanes in one statement, because others lock them in the order of lanes
            touched = [*lanes[subscription_id], target]
            parking.touch(connection, subscription_id, touched, "redirected")
        params: dict[str, Any] = {"to": to, "person": person, "number": number}
        params |= {"parked_ids": self._parked_ids, "subscription_ids": [*lanes]}
        connection.execute(PARK, params)
        connection.execute(DUE, params)
        self._unpark(connection, lanes)

    def give_up(self, connection: psycopg.Connection[Any]) -> None:
        """Give them up for good.

        Raises:
            Unavailable: it took so long that a member may have read a key that became due.
        """
        self._note(connection)
        params = {"parked_ids": self._parked_ids}
        connection.execute(LET_KEYS_GO_ON, params)
        if dead := [number for (number,) in fetch(connection, BURY, params)]:
            decide_dead.give_up(connection, dead)
        arrived = [
            (row.conversation_id, row.from_initiator, row.name)
            for row in self._rows
            if row.log == "inbox" and row.conversation_id and row.from_initiator is not None
        ]
        if arrived:
            ((operator,),) = fetch(connection, WHO)
            conversations.give_up(connection, arrived, operator)
        # a member may be about to park another message in a lane that it found; it deletes its
        # empty lanes itself
        forgettable = [
            row for row in self._rows if row.log == "outbox" or row.in_shard not in self._owned
        ]
        self._unpark(connection, _grouped((row.subscription_id, row.lane) for row in forgettable))
        if self._owned and time.monotonic() - self._began > LONGEST_SECONDS:
            raise Unavailable(
                "what receivers have parked", "to decide took too long: decide about fewer"
            )

    def _note(self, connection: psycopg.Connection[Any]) -> None:
        """Record at the source the messages that leave their lanes; see `saf.destinations.marks`.

        Call this before any lane is written: a forwarder locks cursors first, and then lanes.
        """
        shards = _grouped(row.in_shard for row in self._rows if row.log == "outbox")
        for subscription_id in sorted(shards):
            note_taken_out(connection, subscription_id, shards[subscription_id])
        if shards:
            in_hand.note(connection, self._parked_ids)

    def _unpark(
        self, connection: psycopg.Connection[Any], forgettable: dict[int, set[Lane]]
    ) -> None:
        """Delete the messages, and lanes that may be deleted and are empty."""
        parking.unpark(connection, self._parked_ids)
        for subscription_id, lanes in forgettable.items():
            backoff.forget(connection, subscription_id, lanes)

    def _held(self, connection: psycopg.Connection[Any], rows: list[Locked]) -> list[Locked]:
        """Return rows but those of members' keys that are due by now; lock the others' keys."""
        of_members = [row for row in rows if row.log == "inbox" and row.in_shard in self._owned]
        subjects = _grouped((row.subscription_id, row.subject) for row in of_members)
        rest = {
            (subscription_id, subject)
            for subscription_id in sorted(subjects)
            for (subject,) in fetch(
                connection,
                HOLD,
                {"subscription_id": subscription_id, "subjects": [*subjects[subscription_id]]},
            )
        }
        due = {
            row.parked_id for row in of_members if (row.subscription_id, row.subject) not in rest
        }
        return [row for row in rows if row.parked_id not in due]


def _take(
    connection: psycopg.Connection[Any], concerned: Iterable[tuple[int, str, str, int]]
) -> tuple[set[tuple[int, str, int]], set[tuple[int, int]]]:
    """Lock out processes that might have messages in hand.

    Return what is locked, as subscription, destination and shard, with -1 for all shards; and the
    shards that members own.
    """
    places: set[tuple[int, str, int]] = set()
    shards: dict[int, list[int]] = {}
    for subscription_id, log, destination, shard in concerned:
        if log == "inbox":
            shards.setdefault(subscription_id, []).append(shard)
        else:
            places.add((subscription_id, destination, -1))
    owned: set[tuple[int, int]] = set()
    in_hand.alone(connection, {(subscription_id, name) for subscription_id, name, _ in places})
    for subscription_id in sorted(shards):
        claimed = {"subscription_id": subscription_id, "shards": shards[subscription_id]}
        for shard, is_owned in fetch(connection, CLAIM, claimed):
            places.add((subscription_id, "", shard))
            if is_owned:
                owned.add((subscription_id, shard))
    return places, owned


def _grouped(pairs: Iterable[tuple[int, T]]) -> dict[int, set[T]]:
    """Return values by subscription."""
    found: dict[int, set[T]] = defaultdict(set)
    for subscription_id, value in pairs:
        found[subscription_id].add(value)
    return found
