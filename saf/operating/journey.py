"""The journey of one message: where it is in each broker, from its sender to its handlers.

A journey consists of stays. A `Stay` is one broker's knowledge of the message: held until it is
due; sent from its outbox; stored in its inbox, with each subscription's progress; tried in vain at
an endpoint; parked; a dead letter; or decided about by an operator. `stay` looks a message up in
one broker, by its id, and only reads. The caller visits the brokers.

Logs have no index of message ids. So the search covers the shard of the key, if the key is given;
otherwise it reads each log from the end, within a time limit (`saf.log.finding`). `Stay.unfinished`
names the parts that were not searched. If a statement exceeds its own time limit, nothing is
returned, and the error asks for the key or the time of sending.

A stay does not contain the message's body, which may be large: `body` returns it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row, dict_row

from saf.broker.health import refuse
from saf.database import fetch, of_broker
from saf.errors import UsageError
from saf.limits import HEADERS_READABLE
from saf.log import finding
from saf.log.finding import Row, Search
from saf.log.shards import LAST, shard_of
from saf.operating import held, outbox
from saf.operating.held import HeldDetails
from saf.operating.outbox import Details
from saf.setaside.dead import SHOWN
from saf.setaside.lane import BROKER, SAME_LANE, Kind, Lane

SECONDS = 10.0
"""Default time limit, in seconds, of a statement, and of the whole search for a message."""

DECIDED_ABOUT: Mapping[str, str] = MappingProxyType(
    {"retry": "dead letter"}
    | dict.fromkeys(("discard", "redirect"), "dead letter or parked message")
    | {"cancel": "held message", "reschedule": "held message", "move": "refused message"}
)
"""What each action of an operator may concern."""

NOWHERE: Mapping[str, str] = MappingProxyType({})

SHARDS = "SELECT shards FROM saf.broker"
BOUNDS = (
    "SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = {milliseconds}; SET LOCAL jit = off"
)

STORED = f"""
SELECT i.id, i.shard, i.message_id, i.source, left(i.from_service, {SHOWN}) AS from_service,
       left(i.to_service, {SHOWN}) AS service, left(i.key, {SHOWN}) AS key,
       left(i.message_type, {SHOWN}) AS message_type, i.conversation_id, i.from_initiator,
       i.sequence, octet_length(i.body) AS bytes, i.created_at, i.received_at,
       CASE WHEN {HEADERS_READABLE} THEN i.headers::text END AS headers, i.txid::text AS txid
FROM saf.inbox i
WHERE i.shard = %(shard)s AND i.message_id = %(message_id)s
  AND (%(id)s::bigint IS NULL OR i.txid = %(txid)s::xid8 AND i.id = %(id)s)
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
# Tables of messages set aside have no index of message ids either, but have fewer rows
SCANS = "SET LOCAL enable_seqscan = on"
PARKED = f"""
SELECT s.name AS subscription, p.parked_at AS since, p.destination, p.kind, p.subject,
       {BROKER.replace("broker,", "p.broker,")}, b.attempts, b.next_attempt_at, b.error,
       coalesce(b.awaits_handler, false) AS awaits_handler, b.message_type
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
# Failed attempts at an endpoint; each subscription keeps only some, so no index is needed
ATTEMPTED = """
SELECT a.at, s.name AS subscription, a.status, a.seconds, a.outcome, a.error
FROM saf.attempt a JOIN saf.subscription s USING (subscription_id)
WHERE a.message_id = %(message_id)s ORDER BY a.attempt_id LIMIT 100
"""
DECIDED = """
SELECT audit_at, who, person, action, why FROM saf.audit
WHERE message_ids @> ARRAY[%(message_id)s::uuid] ORDER BY audit_id DESC LIMIT 20
"""
# Most brokers know nothing of a message, and need only this query
ANY_MORE = """
SELECT EXISTS (SELECT FROM saf.parked WHERE message_id = %(message_id)s)
       OR EXISTS (SELECT FROM saf.dead_letter WHERE message_id = %(message_id)s),
       EXISTS (SELECT FROM saf.attempt WHERE message_id = %(message_id)s),
       EXISTS (SELECT FROM saf.audit WHERE message_ids @> ARRAY[%(message_id)s::uuid])
"""
BODY = """
SELECT body FROM saf.{log} WHERE shard = %(shard)s AND txid = %(txid)s::xid8 AND id = %(id)s
"""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A message in an inbox, without its body."""

    id: int
    shard: int
    message_id: UUID
    source: UUID | None
    """The broker_id of the outbox that the message comes from."""
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
    """The progress of an inbox's subscription with the message."""

    subscription: str
    owner: str | None
    """The member that has the message's shard; None if no member does."""
    complete: bool
    """True if the message was taken, i.e. handled, unless it is set aside."""


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
    """A failed attempt of a dispatcher, as long as it is remembered."""

    at: datetime
    subscription: str
    status: int | None
    """The endpoint's status code; None if it did not answer."""
    seconds: float
    outcome: str
    error: str

    @property
    def words(self) -> str:
        """The attempt in words, without its error."""
        answer = "no answer" if self.status is None else f"answer {self.status}"
        return f"attempt of {self.seconds:.1f} s: {answer}"


@dataclass(frozen=True, kw_only=True)
class Decided:
    """An operator's decision about the message."""

    audit_at: datetime
    who: str
    person: str | None
    action: str
    why: str

    @property
    def words(self) -> str:
        """The decision in words; other entries of the audit have their own.

        >>> decision = dict(audit_at=datetime.now(), who="ann", person=None, why="")
        >>> for action in ("retry", "discard", "redirect to mom", "discard with subscription a"):
        ...     print(Decided(action=action, **decision).words)
        decision to retry the dead letter
        decision to discard the dead letter or parked message
        decision to redirect the dead letter or parked message to mom
        discarded with subscription a
        """
        action, _, rest = self.action.partition(" ")
        if action not in DECIDED_ABOUT:
            return self.action
        if rest.startswith("with "):
            return f"discarded {rest}"
        return f"decision to {action} the {DECIDED_ABOUT[action]} {rest}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Stay:
    """One broker's knowledge of a message."""

    sent: Details | None
    held: HeldDetails | None
    """The message, if it is in no log yet."""
    stored: Stored | None
    readings: tuple[Reading, ...]
    attempts: tuple[Attempted, ...]
    aside: tuple[Aside, ...]
    decided: tuple[Decided, ...]
    unfinished: Mapping[str, Search]
    """The logs that were not searched to the end, and where the search stopped."""

    @property
    def nothing(self) -> bool:
        """True if the broker does not know the message."""
        return not (self.sent or self.held or self.stored or self.aside or self.decided)

    @property
    def size(self) -> int | None:
        """The size of the message's body in bytes; None if the broker does not have it."""
        if self.sent is not None:
            return self.sent.message.bytes
        copy = self.held or self.stored
        return copy.bytes if copy is not None else None

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "sent": self.sent and self.sent.as_dict(),
            "held": self.held and self.held.as_dict(),
            "stored": self.stored and _plain(self.stored),
            "subscriptions": [_plain(item) for item in self.readings],
            "attempts": [_plain(item) for item in self.attempts],
            "set_aside": [_plain(item) for item in self.aside],
            "decided": [_plain(item) for item in self.decided],
            "not_looked_through": {
                log: {"looked_at_since": item.since and item.since.isoformat(), "part": item.part}
                for log, item in self.unfinished.items()
            },
        }


def _plain(item: Any) -> dict[str, Any]:
    known: dict[type, Callable[[Any], Any]] = {UUID: str, datetime: datetime.isoformat}
    plain = {k: known.get(type(v), lambda value: value)(v) for k, v in asdict(item).items()}
    plain.pop("txid", None)
    if plain.get("headers") is not None:
        with suppress(ValueError, RecursionError):  # as text if Python cannot decode them
            plain["headers"] = json.loads(plain["headers"])
    return plain


def stay(
    connection: psycopg.Connection[Any],
    message_id: UUID,
    key: str | None = None,
    *,
    about: datetime | None = None,
    places: Mapping[str, str] = NOWHERE,
    seconds: float = SECONDS,
    look_seconds: float | None = None,
) -> Stay:
    """Return a broker's knowledge of a message. Reads only.

    Args:
        connection: In autocommit.
        message_id: The message's id.
        key: The message's key, if known: then only its shard is searched.
        about: When the message was sent, if known: the search begins there.
        places: For each log, the place where an earlier search stopped.
        seconds: Time limit of a statement.
        look_seconds: Time limit of the search in both logs; None: that of a statement.

    Raises:
        UsageError: a statement takes longer.
        Restored: the cursors do not show the broker's progress.
    """
    params: dict[str, Any] = {"message_id": message_id}
    until = time.monotonic() + (seconds if look_seconds is None else look_seconds)
    outbox_search, inbox_search = Search(), Search()
    sent: Details | None = None
    try:
        with connection.transaction():
            connection.execute(BOUNDS.format(milliseconds=max(1, round(seconds * 1000))))
            # first: if it moves now, the outbox will have it
            later = held.details(connection, message_id)
            slots = finding.written(connection) if key is None else {}
            if key is None:
                half = (until - time.monotonic()) / 2
                outbox_search = finding.find(
                    connection,
                    "outbox",
                    message_id,
                    slots["outbox"],
                    seconds=half,
                    about=about,
                    place=places.get("outbox"),
                )
            if outbox_search.row is not None or key is not None:
                row = outbox_search.row or message_id
                sent = outbox.details(connection, row, key=key, seconds=seconds)
            if key is None:
                inbox_search = finding.find(
                    connection,
                    "inbox",
                    message_id,
                    slots["inbox"],
                    seconds=until - time.monotonic(),
                    about=about or (sent.message.created_at if sent else None),
                    place=places.get("inbox"),
                )
            stored = _stored(connection, message_id, inbox_search.row, key)
            readings: tuple[Reading, ...] = ()
            if stored is not None:
                refuse(connection)
                with psycopg.Cursor(connection, row_factory=class_row(Reading)) as cursor:
                    readings = (*cursor.execute(READERS, asdict(stored)).fetchall(),)
            connection.execute(SCANS)
            ((is_aside, was_tried, is_audited),) = fetch(connection, ANY_MORE, params)
            parked, dead = _aside(connection, params) if is_aside else ([], [])
            attempts = failed_attempts(connection, message_id) if was_tried else []
            decided = decisions(connection, message_id) if is_audited else []
    except psycopg.errors.QueryCanceled:
        raise UsageError(
            f"it took longer than {seconds:g} s to look for message {message_id}: add the time "
            "of sending, or the key, which gives the shard"
        ) from None
    return Stay(
        sent=sent,
        held=later if sent is None else None,
        stored=stored,
        readings=readings,
        attempts=tuple(attempts),
        aside=(*parked, *dead),
        decided=tuple(decided),
        unfinished={
            log: search
            for log, search in (("outbox", outbox_search), ("inbox", inbox_search))
            if search.place is not None
        },
    )


def failed_attempts(connection: psycopg.Connection[Any], message_id: UUID) -> list[Attempted]:
    """Return a broker's failed attempts at an endpoint with a message, as far as remembered."""
    with psycopg.Cursor(connection, row_factory=class_row(Attempted)) as tries:
        return tries.execute(ATTEMPTED, {"message_id": message_id}).fetchall()


def decisions(connection: psycopg.Connection[Any], message_id: UUID) -> list[Decided]:
    """Return operators' latest decisions about a message, from a broker's audit."""
    with psycopg.Cursor(connection, row_factory=class_row(Decided)) as cursor:
        return cursor.execute(DECIDED, {"message_id": message_id}).fetchall()


def _stored(
    connection: psycopg.Connection[Any], message_id: UUID, row: Row | None, key: str | None
) -> Stored | None:
    if row is None and key is None:
        return None
    params: dict[str, Any] = {"message_id": message_id, "id": None, "txid": None}
    if row is not None:
        params |= asdict(row)
    else:
        (shards,) = of_broker(connection, SHARDS)
        params["shard"] = shard_of(key or "", shards)
    with psycopg.Cursor(connection, row_factory=class_row(Stored)) as cursor:
        return cursor.execute(STORED, params).fetchone()


def _aside(
    connection: psycopg.Connection[Any], params: Mapping[str, Any]
) -> tuple[list[Aside], list[Aside]]:
    with psycopg.Cursor(connection, row_factory=dict_row) as rows:
        return (
            [_parked(row) for row in rows.execute(PARKED, params)],
            [Aside(state="dead", **row) for row in rows.execute(DEAD, params)],
        )


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
        lane=lane.of_reader(
            row["subscription"],
            awaits_handler=row["awaits_handler"],
            message_type=row["message_type"],
        ),
        attempts=row["attempts"],
        next_attempt_at=row["next_attempt_at"],
    )


def body(connection: psycopg.Connection[Any], there: Stay) -> bytes | None:
    """Return the body of a message where a broker has it; None if it was removed."""
    if there.held is not None:
        return held.body(connection, there.held.message_id)
    for log, row in (("outbox", there.sent and there.sent.row), ("inbox", there.stored)):
        if row is not None:
            found = fetch(connection, BODY.format(log=log), asdict(row))
            return bytes(found[0][0]) if found else None
    return None
