"""Operators' decisions about messages set aside: deliver them again, or give them up.

`retry` returns dead letters to the forwarder or the receivers that set them aside. `redirect`
passes dead letters or parked messages to the forwarder, for another destination. `discard` gives
either up: if a dialog misses one, both of its ends get an Error, and so do the subscribers of a
monolog. To retry parked messages now, call `saf.setaside.waiting.retry_now`. Each decision releases
keys that waited for it, and records in ``saf.audit`` who decided, when and why. Some messages stay
as they are (`saf.setaside.selection`).

A decision about a million messages in one transaction would hold its locks for minutes, and could
not be stopped. So `in_chunks` decides about `CHUNK` messages at a time, the oldest first, each time
in a transaction with its own line in the audit. If a decision stops or fails midway, decided
messages are done, and the others are still set aside. `in_chunks` does not touch messages set aside
after it began, so a message that fails again immediately is not decided about twice.

The two kinds differ in how messages are locked for a decision, and in what becomes of them.

*Dead letters* (`HeldDead`) are passed to the forwarder, in a separate lane (see
`saf.setaside.lane`) and in the order in which they became dead letters; or to the receivers of
their subscription, in the lane of their key, in the order of the log and ahead of the messages that
wait in that lane. If a dialog's message becomes a dead letter on its way, the other end waits for
it. The dialog continues in order if the message is retried. A monolog does not wait; its
subscribers get an Error in place of a message that is given up.

*Parked messages* (`HeldParked`) are passed to the forwarder for another destination, in a separate
lane and in the order in which they were written.

While an operator decides about a parked message, no process has it in hand. For a forwarder, the
lanes of the destination are locked (`saf.setaside.in_hand`); for receivers, the cursors of the
shards, as receivers do themselves (`saf.receiving.claim`). A member may have read due messages
without a lock, and writes their results under the lock of the cursor. So in a member's shards,
decisions concern only keys that are not due for a while, and end long before that
(`LONGEST_SECONDS`). Messages that a forwarder or a receiver has in hand at that moment, or that
operators may not decide about, stay parked.

No source knows whether a parked message has arrived after all, because a destination stored it and
its answer got lost (`saf.setaside.in_hand`). A retry is dropped there as a repeat. But then a
redirected message arrives at both destinations, and a discarded message has arrived.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf.columns import COLUMNS
from saf.database import fetch
from saf.dialogs import conversations, monologs, statements
from saf.errors import Unavailable
from saf.log.cursor import note_taken_out
from saf.log.shards import failed, newest
from saf.operating.held import HeldMessages, LockedHeld
from saf.setaside import backoff, in_hand, parking
from saf.setaside.audit import ONE_AT_A_TIME, audit
from saf.setaside.fingerprint import BEFORE
from saf.setaside.lane import NO_BROKER, SAME_LANE, THE_LANE, Kind, Lane
from saf.setaside.selection import (
    REST_SECONDS,
    RESTING,
    TAKEN,
    DeadLetters,
    ParkedMessages,
    Selection,
)
from saf.setaside.unhandled import FOR_ALL

LOCKED_DEAD = DeadLetters.sql(f"""
WITH {TAKEN}
SELECT dead_letter_id, message_id, s.log, s.name {{chosen}} AND ({{stays}}) IS NULL
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
PARK_DEAD = f"""
INSERT INTO saf.parked
    (subscription_id, destination, kind, subject, shard, id, batch, position, {", ".join(COLUMNS)})
SELECT subscription_id, coalesce(%(to)s::text, destination), kind, subject, shard, id, %(number)s,
       row_number() OVER (ORDER BY dead_letter_id),
       {", ".join("NULL" if c == "expires_at" else f"d.{c}" for c in COLUMNS)}
FROM {RETRIED}
"""
DUE_OF_DEAD = f"""
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, error)
SELECT subscription_id, coalesce(%(to)s::text, destination), kind, subject, of_key,
       'retried by ' || coalesce(%(person)s::text, session_user) || '{BEFORE}'
       || (array_agg(d.error ORDER BY dead_letter_id))[1]
FROM {RETRIED}
GROUP BY subscription_id, coalesce(%(to)s::text, destination), kind, subject, of_key
ON CONFLICT (subscription_id, destination, kind, subject, broker)
DO UPDATE SET attempts = 0, next_attempt_at = now(), {FOR_ALL}
"""
# Release keys that waited for an operator's decision
LET_KEYS_OF_DEAD_GO_ON = f"""
UPDATE saf.backoff b SET next_attempt_at = now() FROM {RETRIED}
  AND (b.subscription_id, b.destination, b.kind, b.subject)
      = (d.subscription_id, d.destination, l.kind, l.subject)
  AND of_key IS NOT NULL AND b.attempts = 0 AND NOT b.awaits_handler
"""
DELETE = "DELETE FROM saf.dead_letter WHERE dead_letter_id = ANY (%(dead_letter_ids)s)"


FORWARDER: frozenset[str | None] = frozenset([None])


class HeldDead:
    """Dead letters that are locked for a decision."""

    names = None

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        chosen: DeadLetters,
        limit: int | None,
        to: str | None,
    ) -> None:
        rows = fetch(connection, LOCKED_DEAD, chosen.params(limit, to))
        self._dead_letter_ids: list[int] = [number for number, *_ in rows]
        self.message_ids: list[UUID] = [message_id for _, message_id, *_ in rows]
        self.readers = frozenset(name if log == "inbox" else None for *_, log, name in rows)
        self.last = self._dead_letter_ids[-1] if rows else None

    def pass_on(
        self, connection: psycopg.Connection[Any], to: str | None, number: int, person: str | None
    ) -> None:
        """Pass them to their program, or for ``to`` to the forwarder."""
        params = {"number": number, "to": to, "person": person}
        for statement in (DUE_OF_DEAD, PARK_DEAD, DELETE):
            connection.execute(statement, params | {"dead_letter_ids": self._dead_letter_ids})

    def give_up(self, connection: psycopg.Connection[Any]) -> None:
        """Give them up for good."""
        give_up(connection, self._dead_letter_ids)


def give_up(connection: psycopg.Connection[Any], dead_letter_ids: Sequence[int]) -> None:
    """Delete dead letters; let conversations know, and keys go on that waited for the decision."""
    for statement in (statements.GIVE_UP, monologs.GIVE_UP, LET_KEYS_OF_DEAD_GO_ON, DELETE):
        connection.execute(statement, {"dead_letter_ids": dead_letter_ids})


T = TypeVar("T")
C = TypeVar("C", bound=Selection[Any])

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

    last = None  # messages before them may be released later
    names = None
    readers = FORWARDER

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
            give_up(connection, dead)
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


CHUNK = 1000
"""Number of messages decided about in one transaction."""


class Held(Protocol):
    """Some messages that are locked for a decision, until the transaction ends."""

    message_ids: list[UUID]
    readers: frozenset[str | None]
    """The subscriptions of the inbox that a retry returns them to; None: the forwarder."""

    @property
    def names(self) -> Sequence[str | None] | None:
        """Names of held messages, in the order of their ids; None for other messages."""

    @property
    def last(self) -> int | None:
        """The number after which the next messages are; None: anywhere."""

    def pass_on(
        self, connection: psycopg.Connection[Any], to: str | None, number: int, person: str | None
    ) -> None:
        """Pass the messages to their program, or for ``to`` to the forwarder.

        ``number`` is that of the decision in the audit.
        """

    def give_up(self, connection: psycopg.Connection[Any]) -> None:
        """Give the messages up for good."""


HELD: Mapping[type, Callable[[psycopg.Connection[Any], Any, int | None, str | None], Held]] = {
    DeadLetters: HeldDead,
    ParkedMessages: HeldParked,
    HeldMessages: LockedHeld,
}
"""How the oldest of some chosen messages are locked, by the kind of the selection."""


LOSES = ("discard", "cancel")
"""Actions that give messages up."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of messages: one of the ``DECISIONS`` of their selection."""

    action: str
    to: str | None = None
    """The destination of a redirection, which the caller has checked; or the time of a
    rescheduling, in ISO form."""

    def of_these(self, chosen: C) -> C:
        """Return the messages that it may concern: of held ones, only refused ones are moved."""
        if self.action == "move" and isinstance(chosen, HeldMessages):
            return replace(chosen, state="refused")
        return chosen

    def __str__(self) -> str:
        return self.action if self.to is None else f"{self.action} to {self.to}"

    def __call__(
        self,
        connection: psycopg.Connection[Any],
        chosen: Selection[Any],
        why: str,
        person: str | None = None,
        limit: int | None = None,
    ) -> list[UUID]:
        """Decide about chosen messages; return their message ids, in order.

        Deciding again does nothing. ``person``: see `saf.setaside.audit.audit`. With ``limit``,
        the decision concerns only the oldest messages.

        Raises:
            Unavailable: a forwarder has them in hand, and does not release them in time; or it
                took too long to decide about messages of receivers.
        """
        return self.held(connection, chosen, why, person, limit).message_ids

    def held(
        self,
        connection: psycopg.Connection[Any],
        chosen: Selection[Any],
        why: str,
        person: str | None = None,
        limit: int | None = None,
    ) -> Held:
        """Decide like `__call__`; return the messages as they were held."""
        passes_on = self.action not in LOSES
        with connection.transaction():
            if passes_on:
                connection.execute(ONE_AT_A_TIME)
            held = HELD[type(chosen)](connection, chosen, limit, self.to)
            if held.message_ids:
                number = audit(
                    connection,
                    str(self),
                    held.message_ids,
                    why,
                    person=person,
                    names=held.names,
                )
                if passes_on:
                    held.pass_on(connection, self.to, number, person)
                else:
                    held.give_up(connection)
        return held


retry, discard = Decision(action="retry"), Decision(action="discard")


def redirect(to: str) -> Decision:
    """Return the decision to pass messages to the forwarder for the destination ``to``.

    Messages of receivers stay, because they have arrived, and so do those of dialogs, whose other
    ends cannot move.
    """
    return Decision(action="redirect", to=to)


def in_chunks(
    connection: psycopg.Connection[Any],
    decision: Decision,
    chosen: Selection[Any],
    why: str,
    *,
    person: str | None = None,
    chunk: int = CHUNK,
    stop: Callable[[], bool] = lambda: False,
    decided: Callable[[Held], object] = lambda _: None,
) -> Iterator[list[UUID]]:
    """Decide about all chosen messages that are set aside now; yield the ids of each chunk.

    Call ``stop`` before each chunk: if it returns true, the remaining messages stay as they are.
    Call ``decided`` after each chunk.
    The connection is in autocommit.
    """
    chosen = chosen.until_now(connection)
    while not stop():
        held = decision.held(connection, chosen, why, person, chunk)
        if not held.message_ids:
            return
        decided(held)
        yield held.message_ids
        if held.last is not None:
            # do not read again what did not match: a criterion may cost more than a decision
            chosen = replace(chosen, beyond=held.last)
