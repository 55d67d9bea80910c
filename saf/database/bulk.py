"""Connections for Arrow in bulk, by ADBC: bounded as all sessions of saf's own are.

The driver's calls wait inside a C library, without a word on for how long and without a way to
tell them. So each is watched from outside, see `saf.database.patience`, by the socket that the
driver has opened while it connected.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import adbc_driver_manager
import adbc_driver_manager.dbapi as adbc
import adbc_driver_postgresql
import pyarrow as pa

from saf.database import Dsn, NoAnswer
from saf.database.bounds import Limits
from saf.database.patience import Waiting, answer_within, shut, sockets
from saf.errors import Unavailable

_direct: set[Dsn] = set()
"""Databases that this process has met without a pooler in between."""

KNOWN = 16
"""Of so many databases a process remembers the types; they are about a MB each."""

_known: OrderedDict[str, Any] = OrderedDict()
_lock = threading.Lock()


def connect(dsn: Dsn, role: str, what: str) -> Connection:
    """A connection in a transaction, that shows up as ``saf ROLE`` in pg_stat_activity.

    ``what``: the database, as people know it.

    Raises:
        adbc.Error: the server does not answer, or refuses the login.
        Unavailable, ConfigurationError: the same, and that it is a pooler.
    """
    limits = dsn.bounds.of(role)
    assert limits is not None  # noqa: S101 - all bulk is saf's own
    if dsn not in _direct:
        # only libpq itself knows which process the server has named
        try:
            dsn.connect(role="identify", autocommit=True).close()
        except Unavailable as error:
            raise error.of(what) from None
        _direct.add(dsn)
    before = sockets()
    with _answered(limits.answer, lambda: shut(sockets() - before)):
        database = _types_known(dsn.for_role(role))
        try:
            handle = adbc_driver_manager.AdbcConnection(database._db)
            connection = Connection(database, handle, limits, sockets() - before)
        finally:
            database.close()
    try:
        with connection.cursor() as cursor:
            cursor.execute(limits.setting())
            cursor.fetchall()
        connection.commit()
    except BaseException:
        connection.close()
        raise
    return connection


def _types_known(uri: str) -> Any:
    """What connections to one database share: its types, which take ten times a login to read.

    The caller closes it; the driver counts who uses it.
    """
    with _lock:
        if uri in _known:
            _known.move_to_end(uri)
            return _known[uri].clone()
    # not within the lock: a server that does not answer must not hold up other servers' callers
    read = adbc._SharedDatabase(adbc_driver_postgresql.connect(uri))
    with _lock:
        if uri in _known:  # another thread was faster
            return read
        _known[uri] = read
        if len(_known) > KNOWN:
            _known.popitem(last=False)[1].close()
        return read.clone()


class Connection(adbc.Connection):
    """An ADBC connection that is cut when its server says nothing for too long."""

    def __init__(self, database: Any, handle: Any, limits: Limits, descriptors: set[int]) -> None:
        self._limits = limits
        self._descriptors = descriptors
        with self.answered():
            super().__init__(database, handle)

    def cursor(self, **_: Any) -> BulkCursor:
        """A cursor in the connection's transaction."""
        cursor = BulkCursor(self)
        self._cursors.add(cursor)
        return cursor

    def commit(self) -> None:
        """As the driver's."""
        with self.answered():
            super().commit()

    def rollback(self) -> None:
        """As the driver's."""
        with self.answered():
            super().rollback()

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Calls of the driver that wait for the server."""
        with _answered(self._limits.answer, lambda: shut(self._descriptors)):
            yield


class BulkCursor(adbc.Cursor):
    """A cursor of a bounded connection."""

    def execute(self, *arguments: Any, **options: Any) -> Any:
        """As the driver's."""
        with self._answered():
            return super().execute(*arguments, **options)

    def fetchall(self) -> list[tuple[Any, ...]]:
        """As the driver's."""
        with self._answered():
            return super().fetchall()

    def adbc_ingest(self, *arguments: Any, **options: Any) -> int:
        """As the driver's."""
        with self._answered():
            return super().adbc_ingest(*arguments, **options)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """What a query gives, each batch within the bound."""
        reader = self.fetch_record_batch()
        while True:
            with self._answered():
                try:
                    rows = reader.read_next_batch()
                except StopIteration:
                    return
            yield rows

    def _answered(self) -> Any:
        connection: Any = self._conn
        return connection.answered()


@contextmanager
def _answered(seconds: float | None, cut: Callable[[], None]) -> Iterator[Waiting | None]:
    with answer_within(seconds, cut) as waiting:
        try:
            yield waiting
        # of a stream that breaks off Arrow itself says so
        except (adbc.Error, OSError) as error:
            if waiting is None or not waiting.given_up:
                raise
            raise adbc.OperationalError(
                str(waiting),
                status_code=adbc_driver_manager.AdbcStatusCode.TIMEOUT,
                sqlstate=NoAnswer.sqlstate,
            ) from error
