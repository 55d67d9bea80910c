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

import sys
import weakref
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from saf.database import HAS_SCHEMA, SCHEMA_REVISION, require_revision
from saf.errors import AutocommitError, UsageError
from saf.message import DEFAULT_MAX_BYTES, Message, Row, encode

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.orm import Session, scoped_session

    Conn = (
        Session
        | scoped_session[Session]
        | sa.Connection
        | psycopg.Connection[Any]
        | psycopg.Cursor[Any]
    )

TYPES = {
    "message_id": "uuid",
    "from_service": "text",
    "to_service": "text",
    "to_broker": "uuid",
    "key": "text",
    "message_type": "text",
    "headers": "jsonb",
    "body": "bytea",
    "deliver_at": "timestamptz",
    "expires_at": "timestamptz",
}
COLUMNS = ", ".join(TYPES)
INSERT = f"INSERT INTO saf.outbox ({COLUMNS}) VALUES ({{}})"
# One statement and one round trip for any number of messages. unnest keeps the arrays' order, so
# ids rise in the order of the messages.
INSERT_MANY = f"INSERT INTO saf.outbox ({COLUMNS}) SELECT * FROM unnest({{}})"

PSYCOPG_INSERT = INSERT.format(", ".join(["%s"] * len(TYPES)))
PSYCOPG_INSERT_MANY = INSERT_MANY.format(", ".join(f"%s::{t}[]" for t in TYPES.values()))
SQLALCHEMY_INSERT = INSERT.format(", ".join(f"CAST(:{n} AS {t})" for n, t in TYPES.items()))
SQLALCHEMY_INSERT_MANY = INSERT_MANY.format(
    ", ".join(f"CAST(:{n} AS {t}[])" for n, t in TYPES.items())
)


class _Transaction(Protocol):
    """What the outbox needs of the caller's connection, whichever library it is from."""

    @property
    def database(self) -> object: ...  # identifies the database among those already checked

    def commits_by_itself(self) -> bool: ...
    def scalar(self, query: str) -> Any: ...
    def insert(self, row: Row) -> None: ...
    def insert_many(self, columns: list[list[Any]]) -> None: ...


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
        self._checked: set[object] = set()

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
            service: the named endpoint that the message is for, up to 255 characters.
            body: bytes, str, or anything that `json.dumps` accepts; the content type goes into
                the headers.
            key: what must stay in order together (an order's number); up to 1024 characters.
            headers: JSON values by name.
            message_type: what the body is, for the consumer's dispatch.
            deliver_at: not handed to a consumer before; a datetime with a time zone.
            expires_at: of no use after; a datetime with a time zone.
            to_broker: the one broker that it is for, where several host the service.
            from_service: the sender's service name.

        Raises:
            InvalidMessage: before anything is written.
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
        self._enter(conn).insert(row)
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
        transaction = self._enter(conn)
        if rows:
            transaction.insert_many([list(column) for column in zip(*rows, strict=True)])
        return [row.message_id for row in rows]

    def _enter(self, conn: object) -> _Transaction:
        transaction = _transaction(conn)
        if not self.allow_autocommit and transaction.commits_by_itself():
            raise AutocommitError
        database = transaction.database
        if database not in self._checked:
            # the table's existence first: a failed query would abort the caller's transaction
            exists = transaction.scalar(HAS_SCHEMA)
            require_revision(
                str(transaction.scalar("SELECT current_database()")),
                transaction.scalar(SCHEMA_REVISION) if exists else None,
            )
            self._checked.add(database)
        return transaction


class _Psycopg:
    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    @property
    def database(self) -> object:
        info = self.connection.info
        return (info.host, info.port, info.dbname)

    def commits_by_itself(self) -> bool:
        return (
            self.connection.autocommit
            and self.connection.info.transaction_status == TransactionStatus.IDLE
        )

    def scalar(self, query: str) -> Any:
        # the caller's row factory may make anything of a row
        with psycopg.Cursor(self.connection, row_factory=tuple_row) as cursor:
            row = cursor.execute(query).fetchone()
        return row[0] if row else None

    def insert(self, row: Row) -> None:
        psycopg.Cursor(self.connection).execute(PSYCOPG_INSERT, row)

    def insert_many(self, columns: list[list[Any]]) -> None:
        psycopg.Cursor(self.connection).execute(PSYCOPG_INSERT_MANY, columns)


class _SQLAlchemy:
    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection

    @property
    def database(self) -> object:
        # weak, so that an engine per tenant does not live as long as the outbox
        return weakref.ref(self.connection.engine)

    def commits_by_itself(self) -> bool:
        raw = self.connection.connection.dbapi_connection
        return raw is not None and self.connection.dialect.detect_autocommit_setting(raw)

    def scalar(self, query: str) -> Any:
        return self.connection.exec_driver_sql(query).scalar()

    def insert(self, row: Row) -> None:
        self.connection.execute(_text(SQLALCHEMY_INSERT), row._asdict())

    def insert_many(self, columns: list[list[Any]]) -> None:
        self.connection.execute(
            _text(SQLALCHEMY_INSERT_MANY), dict(zip(TYPES, columns, strict=True))
        )


_texts: dict[str, sa.TextClause] = {}


def _text(statement: str) -> sa.TextClause:
    """``statement`` parsed once per process."""
    if statement not in _texts:
        import sqlalchemy as sa  # only where the caller uses it already

        _texts[statement] = sa.text(statement)
    return _texts[statement]


def _transaction(conn: object) -> _Transaction:
    if isinstance(conn, psycopg.Connection):
        return _Psycopg(conn)
    if isinstance(conn, psycopg.Cursor):
        return _Psycopg(conn.connection)
    # whoever hands over a Session has imported SQLAlchemy; others need not pay for it
    if "sqlalchemy" in sys.modules:
        import sqlalchemy as sa
        import sqlalchemy.orm

        if isinstance(conn, (sqlalchemy.orm.Session, sqlalchemy.orm.scoped_session)):
            return _SQLAlchemy(conn.connection())
        if isinstance(conn, sa.Connection):
            return _SQLAlchemy(conn)
    raise UsageError(
        f"cannot send on a {type(conn).__module__}.{type(conn).__qualname__}: expected a "
        "SQLAlchemy Session or Connection, or a psycopg connection or cursor"
    )
