"""Status of an inbox for operators, and `inbox_once` for consumers with tables elsewhere."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf.broker import services
from saf.broker.health import refuse
from saf.database import application_name, fetch
from saf.log.read import UNREAD
from saf.received import Received
from saf.setaside.dead import SHOWN

STATUS = f"""
SELECT s.name AS subscription, s.service, unread.messages AS unread, unread.oldest,
       extract(epoch FROM now() - unread.oldest)::float AS lag_seconds,
       (SELECT count(*) FROM saf.parked p WHERE p.subscription_id = s.subscription_id) AS parked,
       (SELECT count(*) FROM saf.backoff b
        WHERE b.subscription_id = s.subscription_id AND b.shard IS NOT NULL) AS keys_waiting,
       (SELECT count(*) FROM saf.dead_letter d
        WHERE d.subscription_id = s.subscription_id) AS dead_letters
FROM saf.subscription s
CROSS JOIN LATERAL (
    SELECT count(*) AS messages, min(since.received_at) AS oldest FROM {UNREAD}) AS unread
WHERE s.log = 'inbox' ORDER BY s.name
"""

PEEK = f"""
SELECT since.id, since.message_id, left(since.to_service, {SHOWN}) AS service,
       left(since.key, {SHOWN}) AS key, left(since.message_type, {SHOWN}) AS message_type,
       octet_length(since.body) AS bytes, since.created_at, since.received_at,
       a.error AS last_answer, a.at AS answered_at
FROM saf.subscription s CROSS JOIN LATERAL (SELECT since.* FROM {UNREAD}) AS since
LEFT JOIN LATERAL (
    SELECT error, at FROM saf.attempt a
    WHERE a.subscription_id = s.subscription_id AND a.message_id = since.message_id
    ORDER BY attempt_id DESC LIMIT 1) AS a ON true
WHERE s.log = 'inbox' AND s.name = %(name)s ORDER BY since.id LIMIT %(limit)s
"""

GUARD = """
CREATE TABLE IF NOT EXISTS saf_inbox_once (
    subscription text NOT NULL,
    message_id uuid NOT NULL,
    handled_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (subscription, message_id)
)
"""
"""Creates the table that `inbox_once` needs in the consumer's database."""

ONCE = """
INSERT INTO saf_inbox_once (subscription, message_id) VALUES (%(subscription)s, %(message_id)s)
ON CONFLICT DO NOTHING
"""


RECEIVERS = """
SELECT application_name, array_agg(pid ORDER BY pid) FROM pg_stat_activity
WHERE datname = current_database() AND starts_with(application_name, %(prefix)s) GROUP BY 1
"""


class Receivers:
    """The receivers that are connected to a database now.

    They are known by the names of sessions that saf opens for a dsn. Sessions of an application's
    own engine or pool are not known, nor those of a dsn that sets application_name.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        prefix = f"{application_name('receive')} "
        self._pids = dict(fetch(connection, RECEIVERS, {"prefix": prefix}))

    def of(self, subscription: str) -> list[int]:
        """Return the pids of a subscription's receivers."""
        return list(self._pids.get(application_name("receive", subscription), ()))


@dataclass(frozen=True, kw_only=True)
class SubscriptionStatus:
    """Backlog of one subscription of the inbox."""

    subscription: str
    service: str | None
    unread: int
    """Messages that are committed, but neither handled nor set aside."""
    oldest: datetime | None
    """Time when the oldest unread message was stored here."""
    lag_seconds: float | None
    parked: int
    keys_waiting: int
    dead_letters: int
    receivers: int = 0
    """Connected receivers, as `Receivers` knows them."""

    def as_dict(self) -> dict[str, Any]:
        """Return the status as a dict for JSON."""
        return asdict(self) | {"oldest": self.oldest and self.oldest.isoformat()}


@dataclass(frozen=True, kw_only=True)
class Peeked:
    """A message that waits to be received, without its body."""

    id: int
    message_id: UUID
    service: str
    key: str | None
    message_type: str | None
    bytes: int
    created_at: datetime
    received_at: datetime
    last_answer: str | None
    """The endpoint's answer to the last attempt, if that failed; see `saf.receiving.dispatch`."""
    answered_at: datetime | None

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a dict for JSON."""
        names = ("created_at", "received_at", "answered_at")
        moments = {
            name: moment and moment.isoformat()
            for name in names
            for moment in [getattr(self, name)]
        }
        return asdict(self) | moments | {"message_id": str(self.message_id)}


def inbox_status(connection: psycopg.Connection[Any]) -> list[SubscriptionStatus]:
    """Return the backlog of each subscription of the inbox. Only reads.

    Raises:
        Restored: the database was restored, so its cursors do not show the receivers' progress.
    """
    refuse(connection)
    with psycopg.Cursor(connection, row_factory=class_row(SubscriptionStatus)) as cursor:
        found = cursor.execute(STATUS).fetchall()
    receivers = Receivers(connection)
    return [replace(row, receivers=len(receivers.of(row.subscription))) for row in found]


def peek(connection: psycopg.Connection[Any], subscription: str, limit: int = 20) -> list[Peeked]:
    """Return the next messages of a subscription, in order, without receiving them.

    Raises:
        ConfigurationError: the subscription does not exist.
    """
    services.subscription(connection, subscription)
    with psycopg.Cursor(connection, row_factory=class_row(Peeked)) as cursor:
        return cursor.execute(PEEK, {"name": subscription, "limit": limit}).fetchall()


def inbox_once(connection: psycopg.Connection[Any], subscription: str, message: Received) -> bool:
    """Return whether the consumer's own database sees this message for the first time.

    For a consumer whose tables are not in the inbox's database: its work and its position are two
    commits, so a message may be delivered again after a crash between them. Call this function in
    the transaction that does the work, and do the work only if it returns True. `GUARD` creates the
    table that it needs. Delete the table's rows once they are older than any message that may be
    delivered again.

    If possible, let the forwarder deliver into that database's inbox instead, and receive there.
    """
    params = {"subscription": subscription, "message_id": message.message_id}
    return psycopg.Cursor(connection).execute(ONCE, params).rowcount == 1
