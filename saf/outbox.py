"""The outbox: send a message as part of the caller's own transaction.

    outbox = saf.Outbox()
    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.send(session, "billing", {"order": order.number}, key=order.number)

The message exists if and only if that transaction commits. The outbox never opens, commits or
rolls back a transaction, and swallows no error: what the database refuses, the caller sees, and
the business transaction fails with it.

``conn`` may be a SQLAlchemy Session or Connection (on any PostgreSQL driver), or a psycopg
connection or cursor. Under asyncio: ``await async_session.run_sync(outbox.send, "billing", …)``.
In Django: ``connection.connection`` inside ``transaction.atomic()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from saf.columns import SENT
from saf.message import DEFAULT_MAX_BYTES, Message, encode
from saf.transaction import Entrance

if TYPE_CHECKING:
    from saf.transaction import Conn

COLUMNS = ", ".join(SENT)
INSERT = f"INSERT INTO saf.outbox ({COLUMNS}) VALUES ({{}})".format(
    ", ".join(f"CAST(%({name})s AS {type_})" for name, type_ in SENT.items())
)
# One statement and one round trip for any number of messages. unnest keeps the arrays' order, so
# ids rise in the order of the messages.
INSERT_MANY = f"INSERT INTO saf.outbox ({COLUMNS}) SELECT * FROM unnest({{}})".format(
    ", ".join(f"CAST(%({name})s AS {type_}[])" for name, type_ in SENT.items())
)


class Outbox:
    """Sends messages in the caller's transaction.

    Args:
        max_bytes: largest body accepted.
        from_service: the sender's service name, unless a message says otherwise.
        allow_autocommit: also send on a connection that commits by itself.

    One Outbox serves a whole process and all its threads. It remembers which databases it has
    checked the schema of, so only the first send on each costs an extra query.
    """

    def __init__(
        self,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        from_service: str | None = None,
        allow_autocommit: bool = False,
    ) -> None:
        self.max_bytes = max_bytes
        self.from_service = from_service
        self.allow_autocommit = allow_autocommit
        self._enter = Entrance()

    def send(
        self,
        conn: Conn,
        service: str,
        body: object,
        *,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        message_type: str | None = None,
        deliver_at: datetime | None = None,
        expires_at: datetime | None = None,
        to_broker: UUID | None = None,
        from_service: str | None = None,
    ) -> UUID:
        """Send one message to ``service`` and return its id.

        Args:
            conn: the caller's connection, with the transaction that the message is part of.
            service: the named endpoint that the message is for, up to 255 bytes of UTF-8.
            body: bytes, str, or anything that `json.dumps` accepts; the content type goes into
                the headers.
            key: what must stay in order together (an order's number); up to 1024 bytes.
            headers: JSON values by name.
            message_type: what the body is, for the consumer's dispatch.
            deliver_at: no consumer gets the message before this time; a datetime with a time zone.
            expires_at: the message is of no use after this time; a datetime with a time zone.
            to_broker: the one broker that it is for, where several host the service.
            from_service: the sender's service name.

        Raises:
            InvalidMessage: the message cannot be stored; raised before anything is written.
            AutocommitError: the connection would commit the message by itself.
            SchemaMissing, SchemaMismatch: the database is not a broker of this version.
        """
        message = Message(
            service=service,
            body=body,
            key=key,
            headers=headers,
            message_type=message_type,
            deliver_at=deliver_at,
            expires_at=expires_at,
            to_broker=to_broker,
            from_service=from_service or self.from_service,
        )
        row = encode(message, self.max_bytes)
        transaction = self._enter(conn, allow_autocommit=self.allow_autocommit)
        transaction.execute(INSERT, row._asdict())
        return row.message_id

    def send_many(self, conn: Conn, messages: Iterable[Message]) -> list[UUID]:
        """Send messages in one statement and one round trip; return their ids in order.

        All are checked before the first is written. Raises what `send` raises.
        """
        rows = [encode(message, self.max_bytes) for message in messages]
        if self.from_service:
            rows = [
                row._replace(from_service=row.from_service or self.from_service) for row in rows
            ]
        transaction = self._enter(conn, allow_autocommit=self.allow_autocommit)
        if rows:
            columns = [list(column) for column in zip(*rows, strict=True)]
            transaction.execute(INSERT_MANY, dict(zip(SENT, columns, strict=True)))
        return [row.message_id for row in rows]
