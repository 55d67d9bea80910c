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
from datetime import datetime, timedelta
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
    MAX_MESSAGE_NAME,
    MAX_NAME,
    Encoder,
    Form,
    IfThere,
    Message,
    Row,
    Sent,
    check_due,
    check_text,
    encode,
)
from saf.sending import asynchronous
from saf.transaction import LARGEST_STATEMENT, Entrance, Rows, refuse_in_parts

if TYPE_CHECKING:
    from saf.sending.asynchronous import AsyncConn
    from saf.signing.signer import Signer
    from saf.transaction import Conn, Transaction

COLUMNS = ", ".join(SENT)
INSERT = f"INSERT INTO saf.outbox ({COLUMNS}) VALUES ({{}})".format(
    ", ".join(f"CAST(%({name})s AS {type_})" for name, type_ in SENT.items())
)
ABSENT: dict[str, tuple[str, Callable[[UUID], object]]] = {
    **dict.fromkeys(("from_service", "key", "message_type", "name"), ("''", lambda _: "")),
    "to_broker": ("message_id", lambda message_id: message_id),
    **dict.fromkeys(
        ("deliver_at", "expires_at"), (f"'{LAST_DAY:%Y-%m-%d} UTC'", lambda _: LAST_DAY)
    ),
    **dict.fromkeys(
        ("once_for", "later_limit"), ("interval '-1 s'", lambda _: timedelta(seconds=-1))
    ),
}
"""What stands in an array for a missing value, in SQL and here: a value that no message has. The
function gets the message's id."""

# One statement and one round trip for any number of messages. unnest keeps the arrays' order, so
# ids rise in the order of the messages. No array contains NULL: a session may have array_nulls off,
# and then a driver's NULL is the text "NULL".
INSERT_MANY = "INSERT INTO saf.outbox ({}) SELECT {} FROM unnest({}) AS sent ({})".format(
    COLUMNS,
    ", ".join(f"nullif({name}, {ABSENT[name][0]})" if name in ABSENT else name for name in SENT),
    ", ".join(f"CAST(%({name})s AS {type_}[])" for name, type_ in SENT.items()),
    COLUMNS,
)

NAMING = {"name": "text", "if_there": "text", "once_for": "interval", "later_limit": "interval"}
"""Further arguments of saf.hold, with their PostgreSQL types."""
HELD = SENT | NAMING

# The server holds messages that are due later, and knows the names. All senders take names in one
# order, so that two of these statements never wait for each other in a circle. Messages that are
# sent immediately get ids in their order. The time of a message with a name may change, so its
# signature does not cover the time.
HOLD_MANY = """
WITH given AS MATERIALIZED (
    SELECT {given}, place FROM unnest({arrays}) WITH ORDINALITY AS sent ({names}, place)
), kept AS MATERIALIZED (
    SELECT g.*, h.stored_id, h.outcome, h.send_now
    FROM (SELECT * FROM given ORDER BY to_service COLLATE "C", name COLLATE "C", place) AS g
    CROSS JOIN LATERAL saf.hold({arguments}) AS h
), passed AS (
    INSERT INTO saf.outbox ({columns}) SELECT {sent} FROM kept WHERE send_now ORDER BY place
)
SELECT stored_id, outcome FROM kept ORDER BY place
""".format(
    given=", ".join(
        f"nullif({name}, {ABSENT[name][0]}) AS {name}" if name in ABSENT else name for name in HELD
    ),
    arrays=", ".join(f"CAST(%({name})s AS {type_}[])" for name, type_ in HELD.items()),
    names=", ".join(HELD),
    arguments=", ".join(f"g.{name}" for name in HELD),
    columns=COLUMNS,
    sent=COLUMNS.replace(
        "deliver_at",
        "CASE WHEN name IS NULL OR NOT headers ? 'saf-signature' THEN deliver_at END",
    ),
)
CANCEL = "SELECT saf.cancel(CAST(%(service)s AS text), CAST(%(name)s AS text))"
RESCHEDULE = (
    "SELECT saf.reschedule(CAST(%(service)s AS text), CAST(%(name)s AS text), "
    "CAST(%(deliver_at)s AS timestamptz))"
)
DONE = {CANCEL: "cancelled", RESCHEDULE: "rescheduled"}
"""What a statement does with a message, for an error; the others send it."""

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
        name: str | None = None,
        if_there: IfThere = "skip",
        once_for: timedelta | None = None,
        later_limit: timedelta | None = None,
    ) -> Sent:
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
            deliver_at: earliest time of delivery; a datetime with a time zone. If it is in the
                future, by the database's clock, the message is held in the database, and goes into
                the outbox when it is due.
            expires_at: time after which the message is useless; a datetime with a time zone.
            to_broker: the broker that the message is for, where several host the service.
            from_service: the sender's service name.
            name: the name of the effect, up to 255 bytes of UTF-8, e.g. ``remind-42``. Messages to
                one service with one name are sent once, until ``once_for`` is over. `cancel` and
                `reschedule` find a held message by its name.
            if_there: if a message with this name is held: ``skip`` leaves it as it is; ``replace``
                puts this one in its place; ``later`` does too, and moves it to the later of both
                times. If the message was sent already, nothing is sent.
            once_for: time after sending during which the name is still known, up to 100 years; 0:
                the name may be used again once the message was sent. Default: 7 days; with
                ``later``, 0, so that a change after the sending is sent, too.
            later_limit: with ``later``, the longest time by which a message may be moved, counted
                from its first send, which it does not limit. Default: unlimited.

        Returns:
            The id of the message that has the name afterwards. Its ``outcome`` is ``sent``,
            ``held``, ``replaced``, ``kept`` or ``already_sent`` (`Sent`); its ``is_new`` is False
            if a message already had this name.

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
            name=name,
            if_there=if_there,
            once_for=once_for,
            later_limit=later_limit,
        )
        row = self._row(message)
        if message.passes_by:
            self._execute(conn, INSERT, row._asdict())
            return Sent(row.message_id)
        (sent,) = self._fetch(conn, HOLD_MANY, *_held([(message, row)]))
        return Sent(*sent)

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
        name: str | None = None,
        if_there: IfThere = "skip",
        once_for: timedelta | None = None,
        later_limit: timedelta | None = None,
    ) -> Sent:
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
            name=name,
            if_there=if_there,
            once_for=once_for,
            later_limit=later_limit,
        )
        row = self._row(message)
        if message.passes_by:
            await self._await(conn, INSERT, row._asdict())
            return Sent(row.message_id)
        (sent,) = await self._ask(conn, HOLD_MANY, *_held([(message, row)]))
        return Sent(*sent)

    def send_many(self, conn: Conn, messages: Iterable[Message]) -> list[Sent]:
        """Send messages together; return their ids in order.

        They are one statement, and from 100 messages on a COPY, where possible; large
        messages are divided among as few statements as PostgreSQL's protocol allows. If any message
        has a name or ``deliver_at``, all are sent by INSERT. All messages are checked before the
        first is written. Raises the errors of `send`; an `InvalidMessage` names the message at
        fault, as in ``messages[3].key``.
        """
        pairs = self._encoded(messages)
        rows = [row for _, row in pairs]
        if not _pass_by(pairs):
            return [Sent(*sent) for sent in self._fetch(conn, HOLD_MANY, *_held(pairs))]
        transaction = self._enter(conn, allow_autocommit=self.allow_autocommit)
        with self._enter.with_right(transaction):
            if rows and not copied(transaction, rows):
                statements = in_statements(rows)
                refuse_in_parts(transaction, statements)
                for group in statements:
                    transaction.execute(INSERT_MANY, _columns(group))
        return [Sent(row.message_id) for row in rows]

    async def asend_many(self, conn: AsyncConn, messages: Iterable[Message]) -> list[Sent]:
        """Send messages under asyncio; otherwise like `send_many`."""
        pairs = self._encoded(messages)
        rows = [row for _, row in pairs]
        if not _pass_by(pairs):
            found = await self._ask(conn, HOLD_MANY, *_held(pairs))
            return [Sent(*sent) for sent in found]
        if rows:
            await self._await(conn, INSERT_MANY, *map(_columns, in_statements(rows)))
        return [Sent(row.message_id) for row in rows]

    def cancel(self, conn: Conn, service: str, name: str) -> bool:
        """Take a held message back, in the caller's transaction.

        Returns:
            True: the message is never sent, once the transaction commits. False: it was sent, or
            is on its way, or no message to ``service`` has this name.

        Raises the errors of `send`.
        """
        ((taken_back,),) = self._fetch(conn, CANCEL, _named(service, name))
        return bool(taken_back)

    async def acancel(self, conn: AsyncConn, service: str, name: str) -> bool:
        """Take a held message back under asyncio; otherwise like `cancel`."""
        ((taken_back,),) = await self._ask(conn, CANCEL, _named(service, name))
        return bool(taken_back)

    def reschedule(self, conn: Conn, service: str, name: str, deliver_at: datetime) -> bool:
        """Move a held message to another time, earlier or later, in the caller's transaction.

        Returns:
            True: the message is sent at this time. False: it was sent, or is on its way, or no
            message to ``service`` has this name.

        Raises the errors of `send`.
        """
        check_due(deliver_at)
        params = {**_named(service, name), "deliver_at": deliver_at}
        ((moved,),) = self._fetch(conn, RESCHEDULE, params)
        return bool(moved)

    async def areschedule(
        self, conn: AsyncConn, service: str, name: str, deliver_at: datetime
    ) -> bool:
        """Move a held message to another time under asyncio; otherwise like `reschedule`."""
        check_due(deliver_at)
        params = {**_named(service, name), "deliver_at": deliver_at}
        ((moved,),) = await self._ask(conn, RESCHEDULE, params)
        return bool(moved)

    def _encoded(self, messages: Iterable[Message]) -> list[tuple[Message, Row]]:
        pairs: list[tuple[Message, Row]] = []
        for message in messages:
            if not isinstance(message, Message):
                problem = f"expected saf.Message, got {type(message).__name__}"
                raise InvalidMessage(f"messages[{len(pairs)}]", problem)
            try:
                pairs.append((message, self._row(message)))
            except InvalidMessage as error:
                raise error.of_item(len(pairs)) from None
        return pairs

    def _row(self, message: Message) -> Row:
        row = encode(message, self.max_bytes, self._encode)
        if self.from_service is not None and row.from_service is None:
            row = row._replace(from_service=self.from_service)
        if self.signer is None:
            return row
        return self.signer.sign(row if message.name is None else row._replace(deliver_at=None))

    def _execute(self, conn: Any, statement: str, *params: Mapping[str, Any]) -> Rows:
        transaction = self._enter(conn, allow_autocommit=self.allow_autocommit)
        refuse_in_parts(transaction, params)
        with self._enter.with_right(transaction):
            for row in params:
                transaction.execute(statement, row)
        return ()

    def _fetch(self, conn: Any, statement: str, *params: Mapping[str, Any]) -> Rows:
        transaction = self._enter(
            conn, allow_autocommit=self.allow_autocommit, done=DONE.get(statement, "sent")
        )
        refuse_in_parts(transaction, params)
        found: list[tuple[Any, ...]] = []
        with self._enter.with_right(transaction):
            for row in params:
                found += transaction.fetch(statement, row)
        return found

    async def _await(self, conn: AsyncConn, statement: str, *params: Mapping[str, Any]) -> None:
        await asynchronous.execute(
            conn,
            statement,
            params,
            self._enter,
            self._execute,
            allow_autocommit=self.allow_autocommit,
        )

    async def _ask(self, conn: AsyncConn, statement: str, *params: Mapping[str, Any]) -> Rows:
        return await asynchronous.execute(
            conn,
            statement,
            params,
            self._enter,
            self._fetch,
            allow_autocommit=self.allow_autocommit,
            returns=True,
            done=DONE.get(statement, "sent"),
        )


def _pass_by(pairs: Iterable[tuple[Message, Row]]) -> bool:
    """Return whether all messages go into the outbox in any case."""
    return all(message.passes_by for message, _ in pairs)


def _named(service: str, name: str) -> dict[str, Any]:
    """Return the parameters that identify a held message."""
    check_text("service", service, MAX_NAME)
    if name == "":
        raise InvalidMessage("name", "is empty")
    check_text("name", name, MAX_MESSAGE_NAME)
    return {"service": service, "name": name}


def _held(pairs: Iterable[tuple[Message, Row]]) -> list[dict[str, list[Any] | None]]:
    """Return the parameters of each execution of `HOLD_MANY`."""
    rows, naming = [], {}
    for message, row in pairs:
        rows.append(row._replace(deliver_at=message.deliver_at))
        naming[row.message_id] = tuple(getattr(message, name) for name in NAMING)
    return [
        _columns([(*row, *naming[row.message_id]) for row in group], HELD)
        for group in in_statements(rows)
    ]


def _columns(
    rows: Sequence[tuple[Any, ...]], names: Iterable[str] = tuple(SENT)
) -> dict[str, list[Any] | None]:
    """Return the values of each column as a list, or None for a column without any value.

    The first column is the message's id.
    """
    columns: dict[str, list[Any] | None] = {}
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        if None not in values:
            columns[name] = [*values]
        elif any(value is not None for value in values):
            pairs = zip(rows, values, strict=True)
            columns[name] = [ABSENT[name][1](row[0]) if v is None else v for row, v in pairs]
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
