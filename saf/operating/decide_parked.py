"""Operators' decisions about parked messages: give them up, or send them elsewhere.

`discard` gives them up, as `saf.operating.decide.discard` does with dead letters: if a dialog
misses one of them, its ends get an Error, and so do the subscribers of a monolog. `redirect` passes
them to the forwarder for another destination, in a separate lane and in the order in which they
were written. Both record in ``saf.audit`` who decided, when and why. To retry them now, call
`saf.setaside.waiting.retry_now`.

While an operator decides about a message, no process has it in hand. For a forwarder, the lanes of
the destination are locked (`saf.setaside.in_hand`); for receivers, the cursors of the shards, as
receivers do themselves (`saf.receiving.claim`). A member may have read due messages without a lock,
and writes their results under the lock of the cursor. So in a member's shards, decisions concern
only keys that are not due for a while, and end long before that (`LONGEST_SECONDS`). Messages that
a forwarder or a receiver has in hand at that moment, or that operators may not decide about, stay
parked (`saf.setaside.staying`).

No source knows whether a parked message has arrived after all, because a destination stored it and
its answer got lost (`saf.setaside.in_hand`). A retry is dropped there as a repeat. But then a
redirected message arrives at both destinations, and a discarded message has arrived.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import asdict
from typing import Any
from uuid import UUID

import psycopg

from saf.columns import COLUMNS
from saf.database import fetch
from saf.dialogs import monologs, statements
from saf.dialogs.giving_up import Lost, give_up
from saf.errors import Unavailable
from saf.log.cursor import note_taken_out
from saf.log.shards import failed, newest
from saf.setaside import backoff, in_hand, parking
from saf.setaside.audit import ONE_AT_A_TIME, audit
from saf.setaside.lane import NO_BROKER, SAME_LANE, THE_LANE, Kind, Lane
from saf.setaside.parked_messages import CHOSEN, FREE, REST_SECONDS, RESTING, ParkedFilter
from saf.setaside.staying import TAKEN
from saf.setaside.unhandled import FOR_ALL

LONGEST_SECONDS = REST_SECONDS / 2
"""Maximum time for deciding about a member's keys; the rest is for the commit."""

# The lanes and shards that must be in hand before their rows are read for the decision
CONCERNED = f"""
WITH {TAKEN}, chosen AS (
    SELECT p.subscription_id, s.log, p.destination, p.shard {CHOSEN} AND {FREE}
    ORDER BY p.parked_id LIMIT %(limit)s)
SELECT DISTINCT subscription_id, log, destination, CASE WHEN log = 'inbox' THEN shard END
FROM chosen
"""

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
LOCKED = f"""
WITH {TAKEN}
SELECT p.parked_id, p.message_id, p.subscription_id, s.log,
       p.destination, p.kind, p.subject, p.broker, p.shard, p.conversation_id, p.from_initiator,
       coalesce(p.sequence::text, p.message_type, '')
{CHOSEN} AND {FREE}
  AND (p.subscription_id, p.destination, CASE WHEN s.log = 'inbox' THEN p.shard ELSE -1 END) IN (
      SELECT * FROM unnest(%(subscription_ids)s::int[], %(destinations)s::text[],
                           %(shards)s::smallint[]))
ORDER BY p.parked_id LIMIT %(limit)s FOR UPDATE OF p
"""

# Operators may make a key due at any time (`saf.setaside.waiting.retry_now`); this prevents it
HOLD = f"""
SELECT subject FROM saf.backoff b
WHERE subscription_id = %(subscription_id)s AND destination = '' AND kind = '{Kind.KEY}'
  AND subject = ANY (%(subjects)s) AND {RESTING}
ORDER BY subject FOR UPDATE
"""

# For the ends of conversations, which learn of a given-up message as they learn of a dead letter.
# A message parked at a receiver has already reached its end (`saf.dialogs.giving_up`).
BURY = f"""
INSERT INTO saf.dead_letter
    (subscription_id, destination, shard, id, reason, error, {", ".join(COLUMNS)})
SELECT subscription_id, destination, shard, id, '{statements.PARKED}', '', {", ".join(COLUMNS)}
FROM saf.parked WHERE parked_id = ANY (%(parked_ids)s) AND conversation_id IS NOT NULL
  AND subscription_id IN (SELECT subscription_id FROM saf.subscription WHERE log = 'outbox')
RETURNING dead_letter_id
"""
WHO = "SELECT session_user::text"
UNBURY = "DELETE FROM saf.dead_letter WHERE dead_letter_id = ANY (%(dead_letter_ids)s)"

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


def discard(
    connection: psycopg.Connection[Any],
    chosen: ParkedFilter,
    why: str,
    person: str | None = None,
    limit: int | None = None,
) -> list[UUID]:
    """Give parked messages up for good; return their message ids.

    ``person``: see `saf.setaside.audit.audit`. With ``limit``, only those parked first are given
    up.

    Raises:
        Unavailable: a forwarder has them in hand, and does not release them in time.
    """
    with connection.transaction():
        rows = _locked(connection, chosen, limit, to=None)
        if rows:
            params: dict[str, Any] = {"parked_ids": rows.parked_ids}
            rows.note(connection)
            audit(connection, "discard", rows.message_ids, why, person)
            connection.execute(LET_KEYS_GO_ON, params)
            _tell_conversations(connection, params)
            if rows.arrived:
                ((operator,),) = fetch(connection, WHO)
                give_up(connection, rows.arrived, operator)
            parking.unpark(connection, rows.parked_ids)
            for subscription_id, lanes in rows.forgettable.items():
                backoff.forget(connection, subscription_id, lanes)
            rows.check()
    return rows.message_ids


def redirect(
    connection: psycopg.Connection[Any],
    chosen: ParkedFilter,
    why: str,
    person: str | None = None,
    limit: int | None = None,
    *,
    to: str,
) -> list[UUID]:
    """Pass parked messages to the forwarder for the destination ``to``; like `discard`.

    Messages of dialogs stay, because their other ends cannot move, and so do those that already
    wait for ``to``. The caller has checked that the destination exists.
    """
    with connection.transaction():
        connection.execute(ONE_AT_A_TIME)
        rows = _locked(connection, chosen, limit, to=to)
        if rows:
            rows.note(connection)
            number = audit(connection, f"redirect to {to}", rows.message_ids, why, person)
            target = Lane(destination=to, kind=Kind.RETRY)
            for subscription_id, lanes in rows.lanes.items():
                # all lanes in one statement, because others lock them in the order of lanes
                parking.touch(connection, subscription_id, [*lanes, target], "redirected")
            params: dict[str, Any] = {"to": to, "person": person, "number": number}
            params |= {"parked_ids": rows.parked_ids, "subscription_ids": [*rows.lanes]}
            connection.execute(PARK, params)
            connection.execute(DUE, params)
            parking.unpark(connection, rows.parked_ids)
            for subscription_id, lanes in rows.lanes.items():
                backoff.forget(connection, subscription_id, lanes)
    return rows.message_ids


class _Rows:
    """The messages of a decision, all locked."""

    def __init__(
        self,
        rows: list[tuple[Any, ...]],
        owned: Collection[tuple[int, int]] = (),
        began: float = 0.0,
    ) -> None:
        self._began = began
        self._owned = bool(owned)
        self.parked_ids: list[int] = [row[0] for row in rows]
        self.message_ids: list[UUID] = [row[1] for row in rows]
        self.lanes: dict[int, set[Lane]] = {}
        self.forgettable: dict[int, set[Lane]] = {}
        """Lanes that may be deleted when empty. A member may be about to park another message in a
        lane that it found; it deletes its empty lanes itself."""
        self.arrived: list[Lost] = []
        """Messages that have reached an end of a conversation."""
        self._shards: dict[int, set[int]] = {}
        """The shards of messages that have not arrived, by subscription."""
        for _, _, subscription_id, log, destination, kind, subject, broker, shard, *dialog in rows:
            lane = Lane(
                destination=destination,
                kind=Kind(kind),
                subject=subject,
                broker=None if broker == NO_BROKER else broker,
            )
            self.lanes.setdefault(subscription_id, set()).add(lane)
            if log == "outbox" or (subscription_id, shard) not in owned:
                self.forgettable.setdefault(subscription_id, set()).add(lane)
            if log == "outbox":
                self._shards.setdefault(subscription_id, set()).add(shard)
            conversation_id, from_initiator, name = dialog
            if log == "inbox" and conversation_id is not None and from_initiator is not None:
                self.arrived.append((conversation_id, from_initiator, name))

    def note(self, connection: psycopg.Connection[Any]) -> None:
        """Record at the source the messages that leave their lanes; see `saf.destinations.marks`.

        Call this before any lane is written: a forwarder locks cursors first, and then lanes.
        """
        for subscription_id in sorted(self._shards):
            note_taken_out(connection, subscription_id, self._shards[subscription_id])
        if self._shards:
            in_hand.note(connection, self.parked_ids)

    def check(self) -> None:
        """Raise if the decision took so long that a member may have read a key that became due.

        Raises:
            Unavailable: it took longer than `LONGEST_SECONDS`.
        """
        if self._owned and time.monotonic() - self._began > LONGEST_SECONDS:
            raise Unavailable(
                "what receivers have parked", "to decide took too long: decide about fewer"
            )

    def __bool__(self) -> bool:
        return bool(self.parked_ids)


def _locked(
    connection: psycopg.Connection[Any],
    chosen: ParkedFilter,
    limit: int | None,
    *,
    to: str | None,
) -> _Rows:
    """Lock out processes that might have the chosen messages in hand; then lock the messages."""
    params = asdict(chosen) | {"limit": limit, "to": to}
    places: set[tuple[int, str, int]] = set()
    shards: dict[int, list[int]] = {}
    for subscription_id, log, destination, shard in fetch(connection, CONCERNED, params):
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
    if not places:
        return _Rows([])
    subscription_ids, destinations, numbers = zip(*places, strict=True)
    params |= {
        "subscription_ids": list(subscription_ids),
        "destinations": list(destinations),
        "shards": list(numbers),
    }
    began = time.monotonic()
    rows = _held(connection, fetch(connection, LOCKED, params), owned)
    return _Rows(rows, owned, began)


def _held(
    connection: psycopg.Connection[Any],
    rows: list[tuple[Any, ...]],
    owned: Collection[tuple[int, int]],
) -> list[tuple[Any, ...]]:
    """Return the rows, except those of members' keys that are due by now; lock the others' keys."""
    of_members = [row for row in rows if row[3] == "inbox" and (row[2], row[8]) in owned]
    due: set[tuple[int, str]] = set()
    for subscription_id in sorted({row[2] for row in of_members}):
        subjects = {row[6] for row in of_members if row[2] == subscription_id}
        params = {"subscription_id": subscription_id, "subjects": list(subjects)}
        rest = {subject for (subject,) in fetch(connection, HOLD, params)}
        due |= {(subscription_id, subject) for subject in subjects - rest}
    gone = {row[0] for row in of_members if (row[2], row[6]) in due}
    return [row for row in rows if row[0] not in gone]


def _tell_conversations(connection: psycopg.Connection[Any], params: dict[str, Any]) -> None:
    dead = [number for (number,) in fetch(connection, BURY, params)]
    if dead:
        params = {"dead_letter_ids": dead}
        connection.execute(statements.GIVE_UP, params)
        connection.execute(monologs.GIVE_UP, params)
        connection.execute(UNBURY, params)
