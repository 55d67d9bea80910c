"""Bulk connections for Arrow, by ADBC, with the bounds of all of saf's own sessions.

The driver's calls wait inside a C library, which reports no waiting times and takes no limit. So
each call is watched from outside (`saf.database.bounds`), by the socket that the driver opened
when connecting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import adbc_driver_manager
import adbc_driver_manager.dbapi as adbc
import adbc_driver_postgresql
import pyarrow as pa

from saf.database import Dsn, NoAnswer, connections
from saf.database.bounds import Limits, Waiting, answer_within, hung_up, shut, sockets
from saf.errors import Unavailable

connections.errors.add(adbc.Error)

_direct: set[Dsn] = set()
"""Databases that this process has reached without a pooler in between."""

TRUSTED_SECONDS = 5.0
"""Seconds after an answer of the server in which a connection counts as alive."""

USE_COPY = "adbc.postgresql.use_copy"

_ready: list[Any] = []
"""Driver databases that have read their types, and that no call is using to connect now."""


def connect(dsn: Dsn, role: str, what: str) -> Connection:
    """Return a connection in a transaction, which pg_stat_activity shows as ``saf ROLE``.

    ``what`` names the database in errors.

    Raises:
        adbc.Error: the server does not answer, or refuses the login.
        Unavailable: the server does not answer.
        ConfigurationError: the login is refused, or a pooler answers.
    """
    limits = dsn.bounds.of(role)
    assert limits is not None  # noqa: S101 - all bulk is saf's own
    if dsn not in _direct:
        # only libpq itself knows which process number the server has announced
        try:
            dsn.connect(role="identify", autocommit=True).close()
        except Unavailable as error:
            raise error.of(what) from None
        _direct.add(dsn)
    before = sockets()
    with _answered(limits.answer, lambda: shut(sockets() - before)):
        database = _database(dsn.for_role(role))
        try:
            handle = adbc_driver_manager.AdbcConnection(database)
            connection = Connection(handle, limits, sockets() - before)
        finally:
            _ready.append(database)
    try:
        with connection.cursor() as cursor:
            cursor.execute(limits.setting())
            cursor.fetchall()
        connection.commit()
    except BaseException:
        connection.close()
        raise
    return connection


def _database(uri: str) -> Any:
    """Return a driver database that connects to ``uri``, for this caller only.

    The driver reads all types of the first database that it connects to, which takes as long as ten
    logins. saf's statements use only PostgreSQL's built-in types, which are the same everywhere. So
    the types of one database serve for all. As many are read as connections are made at the same
    time.
    """
    try:
        database = _ready.pop()
    except IndexError:
        return adbc_driver_postgresql.connect(uri)
    database.set_options(uri=uri)
    return database


class _Lasting:
    """The database of a connection, for the driver: others use it after the connection's end."""

    def close(self) -> None:
        """Do nothing."""


class Connection(adbc.Connection):
    """An ADBC connection that is cut when its server sends nothing for too long."""

    def __init__(self, handle: Any, limits: Limits, descriptors: set[int]) -> None:
        self.learnt: dict[str, Any] = {}
        """Facts about the database that users have learnt, for the connection's next user."""
        self._heard_at = time.monotonic()
        self._limits = limits
        self._descriptors = descriptors
        self._alone = False
        lasting: Any = _Lasting()
        with self.answered():
            super().__init__(lasting, handle)

    def cursor(self, **_: Any) -> BulkCursor:
        """Return a cursor in the connection's transaction, which the caller closes."""
        return BulkCursor(self)

    def commit(self) -> None:
        """Commit the transaction, as the driver does."""
        if not self._alone:
            with self.answered():
                super().commit()

    def rollback(self) -> None:
        """Roll the transaction back, as the driver does."""
        if not self._alone:
            with self.answered():
                super().rollback()

    def let_alone(self, alone: bool) -> None:
        """Let each statement be its own transaction, or not; call it outside a transaction.

        Beginning and ending a transaction takes a round trip each.
        """
        if alone is not self._alone:
            with self.answered():
                self.adbc_connection.set_autocommit(alone)
            self._alone = alone

    def refuse_lost(self) -> None:
        """Raise an adbc.Error if the connection is lost; call it outside a transaction.

        Seeing that the server has hung up takes no round trip. The server is asked if it may have
        hung up; if it has not answered for a while, because a device in between may have forgotten
        the connection; and if other sockets were opened together with this one, because then its
        own socket is unknown.
        """
        recent = time.monotonic() - self._heard_at <= TRUSTED_SECONDS
        if recent and len(self._descriptors) == 1 and not hung_up(self._descriptors):
            return
        with self.cursor() as cursor:
            cursor.execute("SELECT")
        self.rollback()

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Watch calls of the driver that wait for the server."""
        with _answered(self._limits.answer, lambda: shut(self._descriptors)):
            yield
        self._heard_at = time.monotonic()


class BulkCursor(adbc.Cursor):
    """A cursor of a bounded connection."""

    def execute(self, *arguments: Any, **options: Any) -> Any:
        """Execute a statement, as the driver does."""
        with self._answered():
            return super().execute(*arguments, **options)

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        """Return all rows of a statement that has few, in one round trip instead of three."""
        self.adbc_statement.set_options(**{USE_COPY: "false"})
        try:
            self.execute(statement)
            return self.fetchall()
        finally:
            self.adbc_statement.set_options(**{USE_COPY: "true"})

    def update(self, statement: str) -> None:
        """Execute a statement that returns no rows, in one round trip."""
        with self._answered():
            self.adbc_statement.set_sql_query(statement)
            self.adbc_statement.execute_update()

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return all rows, in a fraction of the time that the driver's own method takes."""
        with self._answered():
            columns = [column.to_pylist() for column in self.fetch_arrow_table().columns]
        return list(zip(*columns, strict=True))

    def adbc_ingest(self, *arguments: Any, **options: Any) -> int:
        """Ingest Arrow, as the driver does."""
        with self._answered():
            return super().adbc_ingest(*arguments, **options)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield a query's result batch by batch, each within the bound."""
        reader = self.fetch_record_batch()
        while True:
            with self._answered():
                try:
                    rows = reader.read_next_batch()
                except StopIteration:
                    return
            yield rows

    @property
    def connection(self) -> Connection:
        """The connection that the cursor belongs to."""
        connection: Any = super().connection
        return connection  # type: ignore[no-any-return] # the connection that created it

    def _answered(self) -> AbstractContextManager[None]:
        return self.connection.answered()


@contextmanager
def _answered(seconds: float | None, cut: Callable[[], None]) -> Iterator[Waiting | None]:
    with answer_within(seconds, cut) as waiting:
        try:
            yield waiting
        # Arrow itself raises OSError for a stream that breaks off
        except (adbc.Error, OSError) as error:
            if waiting is None or not waiting.given_up:
                raise
            raise adbc.OperationalError(
                str(waiting),
                status_code=adbc_driver_manager.AdbcStatusCode.TIMEOUT,
                sqlstate=NoAnswer.sqlstate,
            ) from error
