"""Conversations of a broker: lists for operators, cleanup, and messages that are given up.

`conversations` lists the ends in a broker. `exchange` shows one conversation: its ends, and its
messages in the broker's logs. A log keeps a message until it is purged, so only the last part of a
long conversation may be left. All messages of a conversation are in one shard; only that shard is
searched.

`clean_up` closes one end on an operator's request, and does not tell the other end. `forget`
deletes conversations that were closed long ago. Both delete fragments for ends that are over.

`give_up` is for an operator who gives up a message that has arrived at its end and was not handled.
The conversation would have a gap. So it fails at both ends, as for a message that becomes a dead
letter there. All other functions only read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg

from saf.database import fetch, of_broker, records
from saf.database.queries import Page, foreign, page_of
from saf.dialogs.dialog import open_dialog
from saf.dialogs.statements import Code, State
from saf.errors import DialogNotFound, UsageError
from saf.log.read import BY_INDEX
from saf.log.shards import shard_expression, shard_of
from saf.setaside.dropped import ADD, Reason
from saf.setaside.isolation import of_messages
from saf.setaside.lane import Kind
from saf.transaction import enter

if TYPE_CHECKING:
    from saf.transaction import Conn

KEPT_SECONDS = 86400.0
"""Minimum time for which a closed conversation is remembered, in seconds."""

FIELDS = (
    *("handle", "conversation_id", "is_initiator", "monolog", "state", "service", "far_service"),
    *("far_broker", "contract", "contract_version", "group_id", "send_sequence"),
    *("receive_sequence", "error_code", "error_text", "expires_at", "created_at", "changed_at"),
)
LIST = f"""
SELECT {", ".join(f"c.{name}" for name in FIELDS)},
       (SELECT count(*) FROM saf.parked p
        WHERE p.subscription_id = s.subscription_id AND p.destination = ''
          AND p.kind = '{Kind.AHEAD}' AND p.subject = c.conversation_id::text
          AND p.from_initiator <> c.is_initiator),
       CASE WHEN CAST(%(handle)s AS uuid) IS NOT NULL THEN
           (SELECT CAST(g.state AS text) FROM saf.conversation_group g
            WHERE g.group_id = c.group_id) END
FROM saf.conversation c
LEFT JOIN saf.subscription s ON s.log = 'inbox' AND s.name = c.service AND s.service = c.service
WHERE (CAST(%(service)s AS text) IS NULL OR c.service = CAST(%(service)s AS text))
  AND (CAST(%(states)s AS text[]) IS NULL OR c.state = ANY (CAST(%(states)s AS text[])))
  AND (CAST(%(handle)s AS uuid) IS NULL OR c.handle = CAST(%(handle)s AS uuid))
  AND (CAST(%(after)s AS uuid) IS NULL
       OR (c.created_at, c.handle) $beyond (CAST(%(since)s AS timestamptz),
                                            CAST(%(after)s AS uuid)))
ORDER BY c.created_at $order, c.handle $order LIMIT CAST(%(limit)s AS int)
"""

SHARDS = "SELECT shards FROM saf.broker"
HANDLES = "SELECT handle FROM saf.conversation WHERE conversation_id = %(conversation_id)s"

# Only the last part of a long body is shown: the other parts have the same number
SPOKEN = """
SELECT DISTINCT ON (from_initiator, sequence, log) log, message_id, from_service, to_service,
       from_initiator, sequence, message_type, bytes, at
FROM (
    SELECT 'outbox' AS log, id, message_id, left(from_service, 1024) AS from_service,
           left(to_service, 1024) AS to_service, from_initiator, sequence,
           left(message_type, 1024) AS message_type, octet_length(body) AS bytes, created_at AS at
    FROM saf.outbox WHERE shard = %(shard)s AND conversation_id = %(conversation_id)s
    UNION ALL
    SELECT 'inbox', id, message_id, left(from_service, 1024), left(to_service, 1024),
           from_initiator, sequence, left(message_type, 1024), octet_length(body), received_at
    FROM saf.inbox WHERE shard = %(shard)s AND conversation_id = %(conversation_id)s
) AS spoken
ORDER BY from_initiator, sequence, log, id DESC LIMIT %(limit)s
"""

CLEAN_UP = """
UPDATE saf.conversation SET ended_here = true, ended_there = true, timer = NULL, changed_at = now()
WHERE handle = %(handle)s RETURNING handle
"""

SHARD = shard_expression("shards", "CAST(conversation_id AS text)", modulo="%%")

# An end that is over does not wait for the rest of a body. Fragments that have arrived are counted
# as dropped, except those that are ahead: a row for each waits elsewhere, and is counted there.
DROP_FRAGMENTS = f"""
WITH gone AS (
    DELETE FROM saf.fragment f USING saf.conversation c
    WHERE (c.conversation_id, c.is_initiator) = (f.conversation_id, NOT f.from_initiator)
      AND (c.ended_here OR c.error_code IS NOT NULL)
      AND (%(handle)s::uuid IS NULL OR c.handle = %(handle)s)
    RETURNING c.service, c.conversation_id, f.sequence <= c.receive_sequence AS received
)
INSERT INTO saf.dropped AS d (subscription_id, shard, reason, messages, last_message_id)
SELECT subscription_id, {SHARD}, '{Reason.INCOMPLETE}', count(*),
       CAST(max(CAST(conversation_id AS text)) AS uuid)
FROM gone
JOIN saf.subscription s ON s.log = 'inbox' AND s.name = gone.service AND s.service = gone.service
CROSS JOIN saf.broker
WHERE received GROUP BY 1, 2 ORDER BY 1, 2
{ADD}
"""

# The name of an empty group is unknown to applications
FORGET = """
WITH forgotten AS (
    DELETE FROM saf.conversation
    WHERE state = 'closed' AND extract(epoch FROM now() - changed_at) > %(seconds)s
    RETURNING handle)
SELECT count(*) FROM forgotten
"""
FORGET_GROUPS = """
DELETE FROM saf.conversation_group g
WHERE NOT EXISTS (SELECT FROM saf.conversation c WHERE c.group_id = g.group_id)
"""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Present state of one end of a conversation."""

    handle: UUID
    conversation_id: UUID
    is_initiator: bool
    monolog: bool
    state: State
    service: str
    far_service: str
    far_broker: UUID | None
    contract: str | None
    contract_version: int | None
    group_id: UUID
    send_sequence: int
    """Number of the last message sent."""
    receive_sequence: int
    """Number of the last message received."""
    error_code: int | None
    error_text: str | None
    expires_at: datetime | None
    created_at: datetime
    changed_at: datetime
    ahead: int
    """Number of messages that wait here because an earlier one is missing."""
    group_state: Any = None
    """State of the group, such as a saga's process; only if the end was asked for by its handle."""

    def as_dict(self) -> dict[str, Any]:
        """Return the conversation as a dict for JSON."""
        return {
            name: str(value)
            if isinstance(value, UUID)
            else value.isoformat()
            if isinstance(value, datetime)
            else value
            for name, value in asdict(self).items()
            if value is not None
        }


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """A message of a conversation in one log."""

    log: str
    message_id: UUID
    from_service: str | None
    to_service: str
    from_initiator: bool | None
    """The sending end; None: a monolog."""
    sequence: int | None
    """None: from an end to itself, such as a timer."""
    message_type: str | None
    bytes: int
    at: datetime
    """Time of sending or, in an inbox, of storing."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A broker's knowledge of a conversation."""

    ends: tuple[Conversation, ...]
    messages: tuple[Spoken, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the exchange as a dict for JSON."""
        return {
            "ends": [entry.as_dict() for entry in self.ends],
            "messages": [
                {**asdict(entry), "message_id": str(entry.message_id), "at": entry.at.isoformat()}
                for entry in self.messages
            ],
        }


def conversations(
    conn: Conn,
    *,
    service: str | None = None,
    states: Iterable[str] | None = None,
    handle: UUID | None = None,
    limit: int | None = None,
    after: tuple[datetime, UUID] | None = None,
    newest_first: bool = False,
) -> list[Conversation]:
    """Return the ends of conversations in this database, the oldest first.

    Args:
        conn: as for `saf.Outbox.send`.
        service: only ends of this service.
        states: only ends in one of these states.
        handle: only the end with this handle.
        limit: maximum number of ends.
        after: only ends after the end with this ``created_at`` and handle.
        newest_first: return the newest ends first, instead of the oldest.

    Raises:
        UsageError: one of the states does not exist.
    """
    wanted = None if states is None else list(states)
    for state in wanted or ():
        if state not in list(State):
            raise UsageError(f"unknown state {state!r}, only {', '.join(State)}")
    beyond, order = ("<", "DESC") if newest_first else (">", "ASC")
    rows = enter(conn, allow_autocommit=True).fetch(
        LIST.replace("$beyond", beyond).replace("$order", order),
        {
            "service": service,
            "states": wanted,
            "handle": handle,
            "limit": limit,
            "since": after and after[0],
            "after": after and after[1],
        },
    )
    names = (*FIELDS, "ahead", "group_state")
    found = [dict(zip(names, row, strict=True)) for row in rows]
    for fields in found:
        fields["state"] = State(fields["state"])
        fields["group_state"] = json.loads(fields["group_state"] or "null")
    return [Conversation(**fields) for fields in found]


def page(
    conn: Conn,
    limit: int,
    *,
    service: str | None = None,
    states: Iterable[str] | None = None,
    after: tuple[datetime, UUID] | None = None,
    newest_first: bool = False,
) -> Page[Conversation]:
    """Return a page of `conversations`."""
    return page_of(
        lambda most: conversations(
            conn,
            service=service,
            states=states,
            limit=most,
            after=after,
            newest_first=newest_first,
        ),
        limit,
        lambda row: f"{row.created_at.isoformat()} {row.handle}",
    )


def place_at(place: str | None) -> tuple[datetime, UUID] | None:
    """Return the place where a page continues, for `page`, from the previous page's text.

    Raises:
        UsageError: the text is not the end of a page of conversations.
    """
    if place is None:
        return None
    moment, _, handle = place.partition(" ")
    try:
        created_at = datetime.fromisoformat(moment)
        if created_at.tzinfo is not None:  # databases may not know the offset
            return created_at.astimezone(UTC), UUID(handle)
    except (ValueError, OverflowError):
        pass
    raise foreign(place, "conversations")


def exchange(
    connection: psycopg.Connection[Any], conversation_id: UUID, limit: int = 200
) -> Exchange:
    """Return a broker's knowledge of a conversation, with up to ``limit`` messages. Only reads."""
    params = {"conversation_id": conversation_id}
    handles = [handle for (handle,) in fetch(connection, HANDLES, params)]
    ends = [entry for handle in handles for entry in conversations(connection, handle=handle)]
    (shards,) = of_broker(connection, SHARDS)
    shard = shard_of(str(conversation_id), shards)
    with connection.transaction():
        connection.execute(BY_INDEX)
        found = records(connection, Spoken, SPOKEN, {**params, "shard": shard, "limit": limit})
    return Exchange(ends=tuple(ends), messages=tuple(sorted(found, key=lambda entry: entry.at)))


def clean_up(connection: psycopg.Connection[Any], handle: UUID) -> None:
    """Close an end permanently, whatever its state. The other end is not told.

    Raises:
        DialogNotFound: no end in this database has this handle.
    """
    with connection.transaction():
        if not fetch(connection, CLEAN_UP, {"handle": handle}):
            raise DialogNotFound(handle, connection.info.dbname)
        connection.execute(DROP_FRAGMENTS, {"handle": handle})


def forget(connection: psycopg.Connection[Any], retention_seconds: float) -> int:
    """Forget conversations that were closed longer ago than this; return their number.

    A conversation is remembered while a log may hold one of its messages. Fragments for an end that
    is over are deleted immediately.
    """
    with connection.transaction():
        connection.execute(DROP_FRAGMENTS, {"handle": None})
        seconds = max(retention_seconds, KEPT_SECONDS)
        ((count,),) = fetch(connection, FORGET, {"seconds": seconds})
        if count:
            connection.execute(FORGET_GROUPS)
    return int(count)


MET_BY = """
SELECT handle FROM saf.conversation
WHERE conversation_id = %(conversation_id)s AND is_initiator = NOT %(from_initiator)s::boolean
"""

Lost = tuple[UUID, bool, str]
"""A message's conversation, True if sent by the initiator, and its name for errors."""


def give_up(connection: psycopg.Connection[Any], lost: Iterable[Lost], who: str) -> None:
    """Fail conversations at both ends, each for its first message that is given up.

    Call it in a transaction that has the shards of the messages in hand.
    """
    known: set[tuple[UUID, bool]] = set()
    for conversation_id, from_initiator, name in lost:
        if (conversation_id, from_initiator) not in known:
            known.add((conversation_id, from_initiator))
            text = f"message {name} was given up by {who}: it was parked where it had arrived"
            fail(connection, conversation_id, from_initiator, Code.GIVEN_UP, text)


def fail(
    connection: psycopg.Connection[Any],
    conversation_id: UUID,
    from_initiator: bool,
    code: Code,
    text: str,
) -> None:
    """Fail the conversation of a message that has come to its end here, if the end is known.

    An end that has failed or ended before gets no further Error.
    """
    params = {"conversation_id": conversation_id, "from_initiator": from_initiator}
    try:
        with connection.transaction():
            for (handle,) in fetch(connection, MET_BY, params):
                open_dialog(connection, handle).fail(enter(connection), code, text)
    except DialogNotFound:
        return  # the conversation was purged: no end waits for the error
    except (psycopg.DatabaseError, UsageError) as error:
        # the error concerns the conversation itself: no message can be sent on it
        if connection.broken or not of_messages(error):
            raise
