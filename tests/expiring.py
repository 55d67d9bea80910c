"""Messages that have expired when they are committed, which an `Outbox` refuses to send."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from saf import Outbox

LET_EXPIRE = "UPDATE saf.outbox SET expires_at = %s WHERE message_id = %s"


def send(
    connection: psycopg.Connection[Any],
    service: str,
    body: object,
    *,
    expires_at: datetime | None = None,
    **more: Any,
) -> UUID:
    """Send a message that may have expired, as one whose transaction takes long."""
    message_id = Outbox().send(connection, service, body, **more)
    if expires_at is not None:
        connection.execute(LET_EXPIRE, [expires_at, message_id])
    return message_id
