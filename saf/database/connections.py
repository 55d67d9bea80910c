"""Connections that a process keeps from one task to the next.

To connect takes an ADBC driver longer than a task of a few hundred messages takes for all else: it
asks the server for its types. Kept are a few, one for each purpose and database, those that were
used last; in a process that is not used any more they end with it. One that was not used for a
minute is closed when another is put back, so that nobody is in the way of who wants to drop its
database.

What is kept may be lost by the time it is wanted. So what makes a connection fit for its purpose is
done each time that it is taken, and where that fails on one that was kept, a new one is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import adbc_driver_manager.dbapi as adbc
import psycopg

from saf.database import Dsn

MOST = 6
"""So many are kept by a process: two sources, to read and to mark, and two destinations."""
IDLE_SECONDS = 60.0
"""How long one is kept without being used."""


class Closeable(Protocol):
    """A connection of any driver."""

    def close(self) -> None:
        """End it."""


C = TypeVar("C", bound=Closeable)

_kept: dict[tuple[str, Dsn], Any] = {}
"""By purpose and database, the last used last."""
_since: dict[tuple[str, Dsn], float] = {}
"""When each was put back."""


def take(role: str, dsn: Dsn, connect: Callable[[], C], fit: Callable[[C], object]) -> C:
    """A connection for one purpose, kept or new, after ``fit`` has made it so.

    Raises whatever ``connect`` does, and ``fit`` on a new connection.
    """
    kept: C | None = _kept.pop((role, dsn), None)
    if kept is not None:
        try:
            return _fitted(kept, fit)
        except (adbc.Error, psycopg.Error):
            pass  # lost meanwhile: a new one takes its place
    return _fitted(connect(), fit)


def put(keep: bool, role: str, dsn: Dsn, connection: Closeable) -> None:
    """Keep for the next `take` a connection that is in no transaction; or close it."""
    if not keep:
        drop(connection)
        return
    before = _kept.pop((role, dsn), None)
    _kept[role, dsn] = connection
    if before is None and len(_kept) > MOST:
        before = _kept.pop(next(iter(_kept)))
    if before is not None:
        drop(before)
    _since[role, dsn] = now = time.monotonic()
    for key, since in list(_since.items()):
        if key not in _kept or now - since > IDLE_SECONDS:
            del _since[key]
            if (idle := _kept.pop(key, None)) is not None:
                drop(idle)


def forget(dsn: Dsn) -> None:
    """Close what this process keeps of one database, so that it can be dropped."""
    for role, kept in list(_kept):
        if kept == dsn and (connection := _kept.pop((role, kept), None)) is not None:
            drop(connection)


def drop(connection: Closeable) -> None:
    """Close a connection; one that the server has cut has nothing left to close."""
    try:
        connection.close()
    except (adbc.Error, psycopg.Error):
        return


def _fitted(connection: C, fit: Callable[[C], object]) -> C:
    try:
        fit(connection)
    except BaseException:  # Ctrl-C too must not leave it open
        drop(connection)
        raise
    return connection
