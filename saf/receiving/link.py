"""A link: the connection to receive on, as an object of the application's library.

``engine`` is one of

    a SQLAlchemy Engine on psycopg     ``delivery.connection`` is a SQLAlchemy Connection
    Django's ``connection``            Django's connection of this thread, in an ``atomic()``
    a dsn                              a psycopg Connection, opened for this block
    a callable                         a psycopg Connection, from ``with engine() as connection``:
                                       ``pool.connection`` of psycopg_pool, a partial of connect

`Link.transaction` begins each transaction by the application's own library. A statement that waits
too long for a lock is canceled, and `Unavailable` is raised (`Link.locking`). A connection that the
application lends is given back with its own prepare threshold (`as_it_was`).

*Settings.* saf's statements run as saf's role, whatever a handler has set. A handler shares saf's
session and transaction. It may take a role (``SET LOCAL ROLE tenant``), or set search_path or a
timeout. The setting lasts until the transaction ends; without LOCAL, until the session ends. So a
receiver reads the settings at the beginning, and restores them after the handlers and before its
own statements, for the session as well (`restoring`). The restore shares a round trip with a
statement that is sent anyway.

Other settings, such as synchronous_commit, belong to the handlers. Handlers of one delivery share
its transaction: a setting made by one applies to the later ones too.

*Django.* The ORM works in the delivery's transaction. Django's own state of the transaction goes
back to a savepoint together with the database (`DjangoState`): functions of
``transaction.on_commit`` that a failed handler has registered are not called. Like at the beginning
of a request, connections to other databases are closed if they are broken or too old.

*Notifications.* With them, a receiver learns of new messages immediately, instead of at its next
poll. Both ends are optional. An inbox notifies, once for each statement that stores messages, if
`switch` has enabled its trigger. A receiver listens if it is told to (`start_listening`). Messages
that become due later (``deliver_at``, another attempt) are found by polling in any case.

The cost: PostgreSQL lets transactions that notify commit only one after the other, in the whole
database, and wakes each listening session each time. This is little for the chunks of a forwarder,
but not for applications that fill an inbox one row at a time. LISTEN needs a session of its own,
not a pooler's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import IsolationLevel, sql
from psycopg.pq import TransactionStatus

from saf.database import Dsn, fetch, reason_of
from saf.database.bounds import Bounds, answer_within
from saf.database.dsn import refuse_pooler
from saf.errors import ConfigurationError, Unavailable, UsageError
from saf.receiving import claim
from saf.receiving.savepoints import State
from saf.transaction import DjangoConnection, below_django, of_django

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import AsyncEngine as AsyncSqlAlchemyEngine

    Engine = (
        sa.Engine
        | DjangoConnection
        | Dsn
        | str
        | Callable[[], AbstractContextManager[psycopg.Connection[Any]]]
    )
    AsyncEngine = (
        AsyncSqlAlchemyEngine
        | Dsn
        | str
        | Callable[[], AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]]
    )

CANCEL_SECONDS = 1.0
"""Time limit for asking the server to cancel a statement."""

TICK_SECONDS = 0.2
"""Longest time until a listening receiver notices that it must stop, in seconds."""

FOR_ASYNC = "Async connections are for saf.areceive, and for workers with async handlers"

SETTINGS = ("role", "search_path", "row_security", "statement_timeout", "lock_timeout")
"""Settings that decide whether saf's statements find its tables and may use them."""

ASK_SETTINGS = "SELECT " + ", ".join(f"current_setting('{name}')" for name in SETTINGS)
ALWAYS = {"array_nulls": "on"}
"""Setting that saf's parameters depend on."""

LISTEN, UNLISTEN = "LISTEN saf_inbox", "UNLISTEN saf_inbox"

SWITCH = {
    True: "ALTER TABLE saf.inbox ENABLE TRIGGER inbox_notify",
    False: "ALTER TABLE saf.inbox DISABLE TRIGGER inbox_notify",
}
IS_ON = """
SELECT tgenabled <> 'D' FROM pg_trigger
WHERE tgrelid = 'saf.inbox'::regclass AND tgname = 'inbox_notify'
"""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection of the application's library, and the psycopg connection below it."""

    connection: Any
    raw: psycopg.Connection[Any]
    begin: Callable[[], AbstractContextManager[Any]]
    lock_seconds: float = Bounds().lock_seconds
    """Longest wait for a lock on saf's tables."""
    always: str = ""
    """Statement that begins each transaction; empty for none."""
    own: str = ""
    """Statement that restores saf's own settings after handlers; see `restoring`."""
    state: State = field(default_factory=State)
    """State of the transaction that the application's library keeps."""

    @contextmanager
    def transaction(self, *, claims: bool = True, plans_once: bool = False) -> Iterator[None]:
        """Run the block in a transaction, which commits at its end or is rolled back.

        With ``claims``, the transaction is READ COMMITTED, whatever the connection's default. With
        ``plans_once`` too, enter `planned_once` next: its settings are sent in the same round trip.

        Raises:
            UsageError: a transaction is already open, or the connection is in autocommit mode.
            Unavailable: a table was locked for too long.
        """
        if self._status() != TransactionStatus.IDLE:
            raise UsageError("a transaction is open on this connection: receive begins its own")
        with self.begin():
            first = [claim.begin(self.lock_seconds)] * claims + [self.always] * bool(self.always)
            first += [claim.REMEMBER, claim.PLAN_ONCE] * plans_once
            if first:
                with self.locking(None):  # the server enforces the bound
                    self.raw.execute("; ".join(first))
            if claims and self._status() != TransactionStatus.INTRANS:
                raise UsageError(
                    "this engine is in AUTOCOMMIT: each statement would commit separately, "
                    "and no rollback is possible. Receive with another isolation level"
                )
            yield

    @contextmanager
    def planned_once(self) -> Iterator[None]:
        """Plan a block's statements once; afterwards, restore the application's own settings."""
        yield
        self.raw.execute(claim.AS_BEFORE)

    @contextmanager
    def locking(self, seconds: float | None) -> Iterator[None]:
        """Run a block that is one statement, which may have to wait for a lock.

        The statement is canceled after ``seconds``. None: the server already has a time limit.

        Raises:
            Unavailable: the lock was not granted in time.
        """
        database = f"database {self.raw.info.dbname!r}"
        try:
            with answer_within(seconds, self._cancel) as waiting:
                yield
        except psycopg.errors.LockNotAvailable as error:
            reason = reason_of(error)
            raise Unavailable(database, reason, hangs=True) from error
        except psycopg.errors.QueryCanceled as error:
            if not (waiting and waiting.given_up):
                raise
            reason = f"canceled at the lock timeout of {seconds:g} s"
            raise Unavailable(database, reason, hangs=True) from error

    def reads_committed(self) -> bool:
        """Return whether transactions are READ COMMITTED by default."""
        if self.raw.isolation_level not in (None, IsolationLevel.READ_COMMITTED):
            return False
        return fetch(self.raw, "SHOW default_transaction_isolation") == [("read committed",)]

    def _cancel(self) -> None:
        with suppress(psycopg.Error, OSError):
            self.raw.cancel_safe(timeout=CANCEL_SECONDS)

    def _status(self) -> TransactionStatus:
        return TransactionStatus(self.raw.info.transaction_status)


def restoring(connection: psycopg.Connection[Any], *, pooled: bool) -> str:
    """Return the statement that restores the current settings; it has no parameters.

    Behind a pooler, the session is not the receiver's, so only the transaction's settings are
    restored.
    """
    (found,) = fetch(connection, ASK_SETTINGS)
    values = {**dict(zip(SETTINGS, found, strict=True)), **ALWAYS}
    restored = (
        sql.SQL("set_config({}, {}, {})").format(name, value, pooled)
        for name, value in values.items()
    )
    return "SELECT " + sql.SQL(", ").join(restored).as_string(connection)


@contextmanager
def connected(engine: Engine | AsyncEngine, subscription: str = "") -> Iterator[Link]:
    """Open a connection to receive on; if saf opens it, its name contains the subscription.

    Raises:
        UsageError: ``engine`` does not provide a connection.
        Unavailable: the database does not answer.
    """
    if isinstance(engine, (str, Dsn)):
        dsn = Dsn(engine) if isinstance(engine, str) else engine
        with dsn.connect(role="receive", autocommit=True, subject=subscription) as raw:
            yield Link(
                connection=raw, raw=raw, begin=raw.transaction, lock_seconds=dsn.bounds.lock_seconds
            )
        return
    if "sqlalchemy" in sys.modules:
        import sqlalchemy as sa

        if isinstance(engine, sa.Engine):
            with engine.connect() as connection:
                below = _psycopg(connection.connection.driver_connection)
                with as_it_was(below):
                    yield Link(connection=connection, raw=below, begin=connection.begin)
                return
    if (django := of_django(engine)) is not None:
        with _on_django(django.alias) as link:
            yield link
        return
    if not callable(engine):
        raise UsageError(
            f"cannot receive from a {type(engine).__module__}.{type(engine).__qualname__}: "
            "expected a SQLAlchemy Engine, Django's connection, a dsn, or a callable that gives "
            f"psycopg connections. {FOR_ASYNC}"
        )
    given: Any = engine()
    if not hasattr(given, "__enter__") and hasattr(given, "__aenter__"):
        raise UsageError(
            f"cannot receive from a {type(given).__module__}.{type(given).__qualname__}. "
            f"{FOR_ASYNC}"
        )
    with given as raw, as_it_was(_psycopg(raw)):
        yield Link(connection=raw, raw=raw, begin=raw.transaction)


class DjangoState(State):
    """Django's state of a transaction: whether it must be rolled back, and functions to call after.

    The commit calls the functions that were given to ``transaction.on_commit``.
    """

    def __init__(self, connection: DjangoConnection) -> None:
        self._connection = connection

    def check(self) -> None:
        """Raise if Django would roll the transaction back at its end, as after a failed save."""
        self._connection.validate_no_broken_transaction()

    def mark(self) -> Callable[[], None]:
        """Note the functions registered so far; return the function that forgets later ones."""
        registered = len(self._connection.run_on_commit)

        def restore() -> None:
            del self._connection.run_on_commit[registered:]
            self._connection.set_rollback(False)

        return restore


@contextmanager
def _on_django(alias: str) -> Iterator[Link]:
    """Use this thread's connection of Django; close it afterwards if it was not open before."""
    from django.db import connections, transaction

    connection: Any = connections[alias]
    if connection.in_atomic_block:
        raise UsageError(
            "a transaction is open on Django's connection: receive begins its own. A test that "
            "receives is a TransactionTestCase, or marked django_db(transaction=True)"
        )
    was_open = connection.connection is not None
    raw = below_django(connection)
    state = DjangoState(connection)

    @contextmanager
    def begin() -> Iterator[None]:
        for other in connections.all(initialized_only=True):
            if not other.in_atomic_block and other is not connection:
                other.close_if_unusable_or_obsolete()
        with transaction.atomic(using=alias, durable=True):
            yield
            state.check()

    try:
        with as_it_was(raw):
            yield Link(connection=connection, raw=raw, begin=begin, state=state)
    finally:
        if raw.closed or not was_open:
            connection.close()


@contextmanager
def as_it_was(raw: psycopg.Connection[Any]) -> Iterator[None]:
    """Restore the connection's prepare threshold at the end, because its owner gets it back."""
    before = raw.prepare_threshold
    try:
        yield
    finally:
        raw.prepare_threshold = before


def _psycopg(connection: object) -> psycopg.Connection[Any]:
    if not isinstance(connection, psycopg.Connection):
        raise UsageError(
            f"receiving needs psycopg 3, and this connection is a "
            f"{type(connection).__module__}.{type(connection).__qualname__}: "
            "create the engine with postgresql+psycopg://"
        )
    return connection


def switch(connection: psycopg.Connection[Any], on: bool) -> None:
    """Turn the inbox's notifications on or off; waits for transactions that fill the inbox."""
    connection.execute(SWITCH[on])


def start_listening(connection: psycopg.Connection[Any]) -> None:
    """Make the inbox wake this session, from the next commit on.

    Raises:
        ConfigurationError: the inbox does not notify, or the connection goes through a pooler.
    """
    refuse_pooler(connection)
    ((notifies,),) = fetch(connection, IS_ON)
    if not notifies:
        raise ConfigurationError(
            f"database {connection.info.dbname!r}: its inbox sends no notifications, so listening "
            "is useless. Run `saf inbox notify on`, or do not listen"
        )
    connection.execute(LISTEN)


def listen_if_it_notifies(connection: psycopg.Connection[Any]) -> bool:
    """Make the inbox wake this session if it notifies; return whether it does."""
    ((notifies,),) = fetch(connection, IS_ON)
    connection.execute(LISTEN if notifies else UNLISTEN)
    return bool(notifies)


def forget_notifications(connection: psycopg.Connection[Any]) -> None:
    """Discard received notifications before looking for messages: psycopg would keep them all."""
    for _ in connection.notifies(timeout=0):
        pass


def await_notification(
    connection: psycopg.Connection[Any], seconds: float, stopping: Event
) -> None:
    """Wait outside a transaction for a notification, for ``seconds`` or until told to stop."""
    deadline = time.monotonic() + seconds
    while not stopping.is_set() and (left := deadline - time.monotonic()) > 0:
        if list(connection.notifies(timeout=min(left, TICK_SECONDS), stop_after=1)):
            return
