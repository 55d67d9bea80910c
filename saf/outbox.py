"""The outbox: sends messages as part of the caller's own transaction.

    outbox = saf.Outbox()
    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.send(session, "billing", {"order": order.number}, key=order.number)

The message exists if and only if that transaction commits. The outbox never opens, commits or
rolls back a transaction, and swallows no error: if the database rejects a message, the caller gets
the error, and the business transaction fails.

``conn`` may be a SQLAlchemy Session or Connection (on any PostgreSQL driver), a psycopg connection
or cursor, or Django's ``connection``. Under asyncio, ``await outbox.asend(conn, …)`` takes
SQLAlchemy's AsyncSession and AsyncConnection, psycopg's AsyncConnection, and asyncpg's Connection.

`saf.message` lists the bodies that are accepted besides bytes, str and plain JSON. An object of a
`saf.event` brings its type, key and version.

Many messages are sent by COPY, which takes half the time of an INSERT of arrays. COPY needs a
psycopg connection beneath the caller's, and a role without active row-level security: with
row-level security, PostgreSQL rejects COPY FROM. So a database in which `saf sender` has rules gets
an INSERT instead. So do other drivers, asyncio, and few messages. Many large messages take several
INSERTs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
from psycopg.pq import PipelineStatus

from saf.columns import SENT
from saf.database import queries
from saf.errors import InvalidMessage
from saf.message import (
    DEFAULT_MAX_BYTES,
    LAST_DAY,
    MAX_NAME,
    Encoder,
    Form,
    Message,
    Row,
    check_text,
    encode,
)
from saf.sending import asynchronous
from saf.transaction import LARGEST_STATEMENT, Entrance, refuse_in_parts

if TYPE_CHECKING:
    from saf.sending.asynchronous import AsyncConn
    from saf.signing.signer import Signer
    from saf.transaction import Conn, Transaction

COLUMNS = ", ".join(SENT)
INSERT = f"INSERT INTO saf.outbox ({COLUMNS}) VALUES ({{}})".format(
    ", ".join(f"CAST(%({name})s AS {type_})" for name, type_ in SENT.items())
)
ABSENT: dict[str, tuple[str, Callable[[Row], object]]] = {
    **dict.fromkeys(("from_service", "key", "message_type"), ("''", lambda _: "")),
    "to_broker": ("message_id", lambda row: row.message_id),
    **dict.fromkeys(
        ("deliver_at", "expires_at"), (f"'{LAST_DAY:%Y-%m-%d} UTC'", lambda _: LAST_DAY)
    ),
}
"""What stands in an array for a missing value, in SQL and here: a value that no message has."""

# One statement and one round trip for any number of messages. unnest keeps the arrays' order, so
# ids rise in the order of the messages. No array contains NULL: a session may have array_nulls off,
# and then a driver's NULL is the text "NULL".
INSERT_MANY = "INSERT INTO saf.outbox ({}) SELECT {} FROM unnest({}) AS sent ({})".format(
    COLUMNS,
    ", ".join(f"nullif({name}, {ABSENT[name][0]})" if name in ABSENT else name for name in SENT),
    ", ".join(f"CAST(%({name})s AS {type_}[])" for name, type_ in SENT.items()),
    COLUMNS,
)

MANY = 100
"""Minimum number of messages for a COPY; fewer are sent by INSERT."""

FORBIDDEN = "SELECT row_security_active('saf.outbox')"
COPY = f"COPY saf.outbox ({', '.join(SENT)}) FROM STDIN"


class Outbox:
    """Sends messages in the caller's transaction.

    Args:
        max_bytes: largest accepted body.
        from_service: the sender's service name, unless a message sets its own.
        allow_autocommit: also send on a connection in autocommit.
        encoder: the application's own JSON forms of values; see `saf.message`.
        signer: signs each message, so that a target can reject altered messages; see
            docs/security.md.

    Raises:
        InvalidMessage: ``from_service`` is not a valid service name.

    One Outbox serves a whole process and all its threads. It remembers the databases whose schema
    it has checked, so only the first send on each costs an extra query.
    """

    def __init__(
        self,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        from_service: str | None = None,
        allow_autocommit: bool = False,
        encoder: Form | None = None,
        signer: Signer | None = None,
    ) -> None:
        if from_service is not None:
            check_text("from_service", from_service, MAX_NAME)
        self.max_bytes = max_bytes
        self.from_service = from_service
        self.allow_autocommit = allow_autocommit
        self.signer = signer
        self._encode = Encoder(encoder)
        self._enter = Entrance("writer", sends=True)

    def send(
        self,
        conn: Conn,
        service: str,
        body: object,
        *,
        key: str | int | UUID | None = None,
        headers: Mapping[str, Any] | None = None,
        message_type: str | None = None,
        deliver_at: datetime | None = None,
        expires_at: datetime | None = None,
        to_broker: UUID | None = None,
        from_service: str | None = None,
    ) -> UUID:
        """Send one message to ``service`` and return its id.

        Args:
            conn: the caller's connection, in the transaction that the message is part of.
            service: the service that gets the message; its name has up to 255 bytes of UTF-8.
            body: bytes, str, or any value that has a JSON form (`saf.message`). Its
                content type goes into the headers, unless they already have one.
            key: messages with the same key stay in order, e.g. an order's number. It has up to 1024
                bytes; an int or a UUID is stored as its text.
                Default: the key of the body, if the body is an event (`saf.event`).
            headers: JSON values by name; names are compared without case.
            message_type: the type of the body, for dispatch at the consumer. An event has its own.
            deliver_at: earliest time of delivery; a datetime with a time zone. Only an inbox holds
                messages back: other destinations, such as Kafka, get them immediately.
            expires_at: time after which the message is useless; a datetime with a time zone.
            to_broker: the broker that the message is for, where several host the service.
            from_service: the sender's service name.

        Raises:
            InvalidMessage: the message cannot be stored; raised before anything is written.
            AutocommitError: the connection would commit the message separately.
            SchemaMissing, SchemaMismatch: the database is not a broker of this version, or of the
                schema's next revision.
            ConfigurationError: the role may not send.
            UsageError: ``conn`` is not a connection to PostgreSQL, or it is closed.
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
            from_service=self.from_service if from_service is None else from_service,
        )
        row = self._row(message)
        self._execute(conn, INSERT, row._asdict())
        return row.message_id

    async def asend(
        self,
        conn: AsyncConn,
        service: str,
        body: object,
        *,
        key: str | int | UUID | None = None,
        headers: Mapping[str, Any] | None = None,
        message_type: str | None = None,
        deliver_at: datetime | None = None,
        expires_at: datetime | None = None,
        to_broker: UUID | None = None,
        from_service: str | None = None,
    ) -> UUID:
        """Send one message under asyncio; otherwise like `send`."""
        message = Message(
            service=service,
            body=body,
            key=key,
            headers=headers,
            message_type=message_type,
            deliver_at=deliver_at,
            expires_at=expires_at,
            to_broker=to_broker,
            from_service=self.from_service if from_service is None else from_service,
        )
        row = self._row(message)
        await self._await(conn, INSERT, row._asdict())
        return row.message_id

    def send_many(self, conn: Conn, messages: Iterable[Message]) -> list[UUID]:
        """Send messages together; return their ids in order.

        They are one statement, and from 100 messages on a COPY, where possible; large
        messages are divided among as few statements as PostgreSQL's protocol allows. All messages
        are checked before the first is written. Raises the errors of `send`; an `InvalidMessage`
        names the message at fault, as in ``messages[3].key``.
        """
        rows = self._encoded(messages)
        transaction = self._enter(conn, allow_autocommit=self.allow_autocommit)
        with self._enter.with_right(transaction):
            if rows and not copied(transaction, rows):
                statements = in_statements(rows)
                refuse_in_parts(transaction, statements)
                for group in statements:
                    transaction.execute(INSERT_MANY, _columns(group))
        return [row.message_id for row in rows]

    async def asend_many(self, conn: AsyncConn, messages: Iterable[Message]) -> list[UUID]:
        """Send messages under asyncio; otherwise like `send_many`."""
        rows = self._encoded(messages)
        if rows:
            await self._await(conn, INSERT_MANY, *map(_columns, in_statements(rows)))
        return [row.message_id for row in rows]

    def _encoded(self, messages: Iterable[Message]) -> list[Row]:
        rows: list[Row] = []
        for message in messages:
            if not isinstance(message, Message):
                problem = f"expected saf.Message, got {type(message).__name__}"
                raise InvalidMessage(f"messages[{len(rows)}]", problem)
            try:
                rows.append(self._row(message))
            except InvalidMessage as error:
                raise error.of_item(len(rows)) from None
        return rows

    def _row(self, message: Message) -> Row:
        row = encode(message, self.max_bytes, self._encode)
        if self.from_service is not None and row.from_service is None:
            row = row._replace(from_service=self.from_service)
        return row if self.signer is None else self.signer.sign(row)

    def _execute(self, conn: Any, statement: str, *params: Mapping[str, Any]) -> None:
        transaction = self._enter(conn, allow_autocommit=self.allow_autocommit)
        refuse_in_parts(transaction, params)
        with self._enter.with_right(transaction):
            for row in params:
                transaction.execute(statement, row)

    async def _await(self, conn: AsyncConn, statement: str, *params: Mapping[str, Any]) -> None:
        await asynchronous.execute(
            conn,
            statement,
            params,
            self._enter,
            self._execute,
            allow_autocommit=self.allow_autocommit,
        )


def _columns(rows: list[Row]) -> dict[str, list[Any] | None]:
    """Return the parameters of `INSERT_MANY`; None for a column without any value."""
    columns: dict[str, list[Any] | None] = {}
    for name, values in zip(SENT, zip(*rows, strict=True), strict=True):
        if None not in values:
            columns[name] = [*values]
        elif any(value is not None for value in values):
            pairs = zip(rows, values, strict=True)
            columns[name] = [ABSENT[name][1](row) if v is None else v for row, v in pairs]
        else:
            columns[name] = None
    return columns


def copied(transaction: Transaction, rows: Sequence[Row]) -> bool:
    """Store rows in order by COPY in the caller's transaction; False if COPY is not possible."""
    connection = transaction.below
    if connection is None or len(rows) < MANY:
        return False
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        return False  # COPY is impossible in pipeline mode
    # through the caller's library, which then knows that its transaction has begun
    ((forbidden,),) = transaction.fetch(FORBIDDEN)
    if forbidden:
        return False
    # a separate cursor, because the caller's may be in use
    with psycopg.Cursor(connection) as cursor, cursor.copy(COPY) as copy:
        for row in queries.in_rows(connection, rows):
            copy.write_row(row)
    return True


def in_statements(rows: Iterable[Row]) -> list[list[Row]]:
    """Divide rows, in order, among as few INSERTs as a server accepts."""
    statements: list[list[Row]] = [[]]
    size = 0
    for row in rows:
        size += len(row.body) + len(row.headers)
        if size > LARGEST_STATEMENT and statements[-1]:
            statements.append([])
            size = len(row.body) + len(row.headers)
        statements[-1].append(row)
    return statements
