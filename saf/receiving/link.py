"""A link: the connection to receive on, as the application's library has it.

``engine`` is one of

    a SQLAlchemy Engine on psycopg     ``delivery.connection`` is a SQLAlchemy Connection
    a dsn                              a psycopg Connection, opened for this block
    a callable                         a psycopg Connection, from ``with engine() as connection``:
                                       ``pool.connection`` of psycopg_pool, a partial of connect
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus

from saf.database import Dsn, fetch
from saf.database.bounds import Bounds
from saf.database.patience import answer_within
from saf.errors import Unavailable, UsageError
from saf.receiving import claim

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import AsyncEngine as AsyncSqlAlchemyEngine

    Engine = sa.Engine | Dsn | str | Callable[[], AbstractContextManager[psycopg.Connection[Any]]]
    AsyncEngine = (
        AsyncSqlAlchemyEngine
        | Dsn
        | str
        | Callable[[], AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]]
    )


FOR_ASYNC = "Async connections are for saf.areceive, and for workers with async handlers"

CANCEL_SECONDS = 1.0
"""How long it may take to ask the server to cancel a statement."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection as the application's library has it, and the psycopg connection below it."""

    connection: Any
    raw: psycopg.Connection[Any]
    begin: Callable[[], AbstractContextManager[Any]]
    lock_seconds: float = Bounds().lock_seconds
    """How long to wait for a lock on saf's tables."""
    always: str = ""
    """A statement with which each transaction begins; or none."""
    own: str = ""
    """The statement that restores saf's own settings after handlers; see `saf.receiving.own`."""

    @contextmanager
    def transaction(self, *, claims: bool = True, plans_once: bool = False) -> Iterator[None]:
        """Run the block in a transaction, which commits at its end or is rolled back.

        One that ``claims`` is READ COMMITTED, whatever the connection's default. If it also
        ``plans_once``, it goes on with a block `planned_once`, which shares a round trip with it.

        Raises:
            UsageError: it would not be a transaction of its own.
            Unavailable: something that it needs was locked for too long.
        """
        if self._status() != TransactionStatus.IDLE:
            raise UsageError("a transaction is open on this connection: receive begins its own")
        with self.begin():
            first = [claim.begin(self.lock_seconds)] * claims + [self.always] * bool(self.always)
            first += [claim.REMEMBER, claim.PLAN_ONCE] * plans_once
            if first:
                with self.locking(None):  # the server has the bound
                    self.raw.execute("; ".join(first))
            if claims and self._status() != TransactionStatus.INTRANS:
                raise UsageError(
                    "this engine is in AUTOCOMMIT: each statement would commit separately, "
                    "and no rollback is possible. Receive with another isolation level"
                )
            yield

    @contextmanager
    def planned_once(self) -> Iterator[None]:
        """Run a block whose statements are planned once; the application's are not, after it."""
        yield
        self.raw.execute(claim.AS_BEFORE)

    @contextmanager
    def locking(self, seconds: float | None) -> Iterator[None]:
        """Run a block that is one statement, which may have to wait for a lock.

        It is canceled after so many seconds; None: the server has been told how long it may take.

        Raises:
            Unavailable: the lock was not given in time.
        """
        what = f"database {self.raw.info.dbname!r}"
        try:
            with answer_within(seconds, self._cancel) as waiting:
                yield
        except psycopg.errors.LockNotAvailable as error:
            reason = str(error).splitlines()[0]
            raise Unavailable(what, reason, hangs=True) from error
        except psycopg.errors.QueryCanceled as error:
            if not (waiting and waiting.given_up):
                raise
            reason = f"canceled at the lock timeout of {seconds:g} s"
            raise Unavailable(what, reason, hangs=True) from error

    def reads_committed(self) -> bool:
        """Whether transactions are READ COMMITTED by default."""
        if self.raw.isolation_level not in (None, IsolationLevel.READ_COMMITTED):
            return False
        return fetch(self.raw, "SHOW default_transaction_isolation") == [("read committed",)]

    def _cancel(self) -> None:
        with suppress(psycopg.Error, OSError):
            self.raw.cancel_safe(timeout=CANCEL_SECONDS)

    def _status(self) -> TransactionStatus:
        return TransactionStatus(self.raw.info.transaction_status)


@contextmanager
def connected(engine: Engine | AsyncEngine) -> Iterator[Link]:
    """Open a connection to receive on.

    Raises:
        UsageError: ``engine`` is none of the things that give a connection.
        Unavailable: the database does not answer.
    """
    if isinstance(engine, (str, Dsn)):
        dsn = Dsn(engine) if isinstance(engine, str) else engine
        with dsn.connect(role="receive", autocommit=True) as raw:
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
    if not callable(engine):
        raise UsageError(
            f"cannot receive from a {type(engine).__module__}.{type(engine).__qualname__}: "
            "expected a SQLAlchemy Engine, a dsn, or a callable that gives psycopg connections. "
            f"{FOR_ASYNC}"
        )
    given: Any = engine()
    if not hasattr(given, "__enter__") and hasattr(given, "__aenter__"):
        raise UsageError(
            f"cannot receive from a {type(given).__module__}.{type(given).__qualname__}. "
            f"{FOR_ASYNC}"
        )
    with given as raw, as_it_was(_psycopg(raw)):
        yield Link(connection=raw, raw=raw, begin=raw.transaction)


@contextmanager
def as_it_was(raw: psycopg.Connection[Any]) -> Iterator[None]:
    """Restore at the end how the connection prepares statements, because it is given back."""
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
