"""The journey of one message: where it is in each broker, from its sender to its handlers.

A broker is asked for what it knows of a message by its id: sent from its outbox, stored in its
inbox and how far each subscription there is with it, tried in vain at an endpoint, parked, a dead
letter, or decided about by a person. No log is indexed by message ids. So a message is looked for
in the shard of its key, if the key is given or the message has none, and otherwise in the whole
log, for no longer than is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row, dict_row

from saf.database import fetch
from saf.errors import UsageError
from saf.limits import HEADERS_READABLE
from saf.log.cursor import BY_INDEX
from saf.log.shards import LAST, shard_of
from saf.operating import outbox
from saf.operating.outbox import Details
from saf.setaside.dead import SHOWN
from saf.setaside.lane import BROKER, SAME_LANE, Kind, Lane

SECONDS = 10.0
"""How long a statement may take, by default, in seconds."""

SHARDS = "SELECT shards FROM saf.broker"
TIMEOUT = "SELECT set_config('statement_timeout', %(milliseconds)s, true)"

STORED = f"""
SELECT i.id, i.shard, i.message_id, i.source, left(i.from_service, {SHOWN}) AS from_service,
       left(i.to_service, {SHOWN}) AS service, left(i.key, {SHOWN}) AS key,
       left(i.message_type, {SHOWN}) AS message_type, i.conversation_id, i.from_initiator,
       i.sequence, octet_length(i.body) AS bytes, i.created_at, i.received_at,
       CASE WHEN {HEADERS_READABLE} THEN i.headers::text END AS headers, i.txid::text AS txid
FROM saf.inbox i
WHERE (%(shard)s::smallint IS NULL OR i.shard = %(shard)s) AND i.message_id = %(message_id)s
ORDER BY i.id LIMIT 1
"""
# The newest version of each cursor, as in saf.log.shards
READERS = f"""
SELECT s.name AS subscription, m.name AS owner,
       pg_visible_in_snapshot(%(txid)s::xid8, c.done)
       OR c.open IS NOT NULL AND pg_visible_in_snapshot(%(txid)s::xid8, c.open)
          AND %(id)s <= c.position AS complete
FROM saf.subscription s
CROSS JOIN LATERAL (
    SELECT * FROM saf.cursor
    WHERE (subscription_id, shard, batch) <= (s.subscription_id, %(shard)s::smallint, {LAST})
    ORDER BY subscription_id DESC, shard DESC, batch DESC LIMIT 1) AS c
LEFT JOIN saf.member m ON m.member_id = c.owner
WHERE s.log = 'inbox' AND (s.service IS NULL OR s.service = %(service)s)
  AND c.subscription_id = s.subscription_id AND c.shard = %(shard)s
ORDER BY s.name
"""
PARKED = f"""
SELECT s.name AS subscription, p.parked_at AS since, p.destination, p.kind, p.subject,
       {BROKER.replace("broker,", "p.broker,")}, b.attempts, b.next_attempt_at, b.error,
       coalesce(b.awaits_handler, false) AS awaits_handler
FROM saf.parked p JOIN saf.subscription s USING (subscription_id)
LEFT JOIN saf.backoff b ON {SAME_LANE}
WHERE p.message_id = %(message_id)s ORDER BY p.parked_id LIMIT 100
"""
DEAD = """
SELECT s.name AS subscription, d.dead_letter_at AS since, d.destination, d.reason, d.error,
       d.dead_letter_id
FROM saf.dead_letter d JOIN saf.subscription s USING (subscription_id)
WHERE d.message_id = %(message_id)s ORDER BY d.dead_letter_id LIMIT 100
"""
# Those that failed at an endpoint; of each subscription only some are kept, so no index is needed
ATTEMPTED = """
SELECT a.at, s.name AS subscription, a.status, a.seconds, a.outcome, a.error
FROM saf.attempt a JOIN saf.subscription s USING (subscription_id)
WHERE a.message_id = %(message_id)s ORDER BY a.attempt_id LIMIT 100
"""
DECIDED = """
SELECT audit_at, who, person, action, why FROM saf.audit
WHERE message_ids @> ARRAY[%(message_id)s::uuid] ORDER BY audit_id DESC LIMIT 20
"""
BODY = """
SELECT body FROM saf.inbox WHERE shard = %(shard)s AND txid = %(txid)s::xid8 AND id = %(id)s
"""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A message in an inbox, without its body."""

    id: int
    shard: int
    message_id: UUID
    source: UUID | None
    """The broker_id of the outbox that it comes from."""
    from_service: str | None
    service: str
    key: str | None
    message_type: str | None
    conversation_id: UUID | None
    from_initiator: bool | None
    sequence: int | None
    bytes: int
    created_at: datetime
    received_at: datetime
    headers: str | None
    """As JSON text; None also if they are too large to be read."""
    txid: str


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How far a subscription of an inbox is with the message."""

    subscription: str
    owner: str | None
    """The member that has its shard; None if nobody has."""
    complete: bool
    """It was taken: handled, unless it is set aside."""


@dataclass(frozen=True, kw_only=True)
class Aside:
    """A message that is set aside: parked in a lane, or a dead letter."""

    state: str
    """Either parked or dead."""
    subscription: str
    destination: str
    since: datetime
    error: str | None
    lane: str | None = None
    attempts: int | None = None
    next_attempt_at: datetime | None = None
    reason: str | None = None
    dead_letter_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class Attempted:
    """An attempt of a dispatcher that failed, as long as it is remembered."""

    at: datetime
    subscription: str
    status: int | None
    """What the endpoint answered; None if it did not."""
    seconds: float
    outcome: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What a person has decided about it."""

    audit_at: datetime
    who: str
    person: str | None
    action: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Stay:
    """What one broker knows of a message."""

    sent: Details | None
    stored: Stored | None
    readings: tuple[Reading, ...]
    attempts: tuple[Attempted, ...]
    aside: tuple[Aside, ...]
    decided: tuple[Decided, ...]

    @property
    def nothing(self) -> bool:
        """Whether the broker knows nothing of it."""
        return not (self.sent or self.stored or self.aside or self.decided)

    def as_dict(self) -> dict[str, Any]:
        """Return it as a dict for JSON."""
        return {
            "sent": self.sent and self.sent.as_dict(),
            "stored": self.stored and _plain(self.stored),
            "subscriptions": [_plain(one) for one in self.readings],
            "attempts": [_plain(one) for one in self.attempts],
            "set_aside": [_plain(one) for one in self.aside],
            "decided": [_plain(one) for one in self.decided],
        }


def stay(
    connection: psycopg.Connection[Any],
    message_id: UUID,
    key: str | None = None,
    *,
    seconds: float = SECONDS,
) -> Stay:
    """Return what a broker knows of a message. Only reads.

    Args:
        connection: in autocommit.
        message_id: of the message.
        key: its key, if it is known to have one; finds it in one shard.
        seconds: the bound of a statement.

    Raises:
        UsageError: it takes longer.
        Restored: the cursors do not say how far the broker is.
    """
    sent = outbox.details(connection, message_id, key=key, seconds=seconds)
    params: dict[str, Any] = {"message_id": message_id}
    try:
        with connection.transaction():
            connection.execute("SET TRANSACTION READ ONLY")
            connection.execute(BY_INDEX)
            connection.execute(TIMEOUT, {"milliseconds": str(max(1, round(seconds * 1000)))})
            stored = _stored(connection, message_id, key or (sent.message.key if sent else None))
            readings: tuple[Reading, ...] = ()
            if stored is not None:
                with psycopg.Cursor(connection, row_factory=class_row(Reading)) as cursor:
                    readings = (*cursor.execute(READERS, asdict(stored)).fetchall(),)
            with psycopg.Cursor(connection, row_factory=dict_row) as rows:
                parked = [_parked(row) for row in rows.execute(PARKED, params)]
                dead = [Aside(state="dead", **row) for row in rows.execute(DEAD, params)]
            with psycopg.Cursor(connection, row_factory=class_row(Attempted)) as tries:
                attempts = tries.execute(ATTEMPTED, params).fetchall()
            with psycopg.Cursor(connection, row_factory=class_row(Decided)) as some:
                decided = some.execute(DECIDED, params).fetchall()
    except psycopg.errors.QueryCanceled:
        raise UsageError(
            f"it took longer than {seconds:g} s to look for message {message_id}: name its key, "
            "from which the shard follows"
        ) from None
    return Stay(
        sent=sent,
        stored=stored,
        readings=readings,
        attempts=tuple(attempts),
        aside=(*parked, *dead),
        decided=tuple(decided),
    )


def body(connection: psycopg.Connection[Any], there: Stay) -> bytes | None:
    """Return the body of a message where a broker has it; None if it has it no more."""
    if there.sent is not None:
        return outbox.body(connection, there.sent.message.id)
    if there.stored is not None:
        found = fetch(connection, BODY, asdict(there.stored))
        return bytes(found[0][0]) if found else None
    return None


def _stored(
    connection: psycopg.Connection[Any], message_id: UUID, key: str | None
) -> Stored | None:
    ((shards,),) = fetch(connection, SHARDS)
    params: dict[str, Any] = {
        "message_id": message_id,
        "shard": shard_of(key or str(message_id), shards),
    }
    with psycopg.Cursor(connection, row_factory=class_row(Stored)) as cursor:
        found = cursor.execute(STORED, params).fetchone()
        if found is None and key is None:
            found = cursor.execute(STORED, params | {"shard": None}).fetchone()
    return found


def _parked(row: dict[str, Any]) -> Aside:
    lane = Lane(
        destination=row["destination"],
        kind=Kind(row["kind"]),
        subject=row["subject"],
        broker=row["broker"],
    )
    return Aside(
        state="parked",
        subscription=row["subscription"],
        destination=row["destination"],
        since=row["since"],
        error=row["error"],
        lane=str(lane),
        attempts=row["attempts"],
        next_attempt_at=row["next_attempt_at"],
    )


def _plain(one: Any) -> dict[str, Any]:
    known: dict[type, Callable[[Any], Any]] = {UUID: str, datetime: datetime.isoformat}
    plain = {k: known.get(type(v), lambda same: same)(v) for k, v in asdict(one).items()}
    plain.pop("txid", None)
    if plain.get("headers") is not None:
        with suppress(ValueError, RecursionError):  # as text if Python cannot decode them
            plain["headers"] = json.loads(plain["headers"])
    return plain
