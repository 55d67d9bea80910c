"""The exchange of one conversation: its ends, and its messages in the logs of a broker.

A log keeps a message until it is purged, so only the last part of a long conversation may be left.
All messages of a conversation are in one shard; only that shard is searched.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf.database import fetch, of_broker
from saf.dialogs.conversations import Conversation, conversations
from saf.log.cursor import BY_INDEX
from saf.log.shards import shard_of

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
        with psycopg.Cursor(connection, row_factory=class_row(Spoken)) as cursor:
            found = cursor.execute(SPOKEN, {**params, "shard": shard, "limit": limit}).fetchall()
    return Exchange(ends=tuple(ends), messages=tuple(sorted(found, key=lambda entry: entry.at)))
