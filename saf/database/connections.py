"""Connections that a process keeps from one task to the next.

A new connection costs a login, and the server's process behind it has all tables and statements to
look up anew: that takes longer than all else in a task of a few hundred messages. So a process
keeps a few connections, one for each purpose and database: those that were used last. They end with
the process if it is not used any more. When a connection is put back, those are closed that were
not used for a minute, so that they are in nobody's way who wants to drop a database.

A kept connection may be lost by the time it is wanted. So each time that it is taken it is made fit
for its purpose again; if that fails, a new connection takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import adbc_driver_manager.dbapi as adbc
import psycopg

from saf.database import Dsn

MOST = 6
"""How many a process keeps: for two sources, to read and to mark, and for two destinations.
One that deals with more sources in turn makes room for them."""
IDLE_SECONDS = 60.0
"""How long a connection is kept without being used, in seconds."""


class Closeable(Protocol):
    """A connection of any driver."""

    def close(self) -> None:
        """End the connection."""


C = TypeVar("C", bound=Closeable)

_most = MOST

_kept: dict[tuple[str, Dsn], Any] = {}
"""The kept connections by purpose and database; the one that was used last is the last."""
_since: dict[tuple[str, Dsn], float] = {}
"""When each was put back, by the monotonic clock."""


def take(role: str, dsn: Dsn, connect: Callable[[], C], fit: Callable[[C], object]) -> C:
    """Return a connection for one purpose, kept or new, after ``fit`` has made it fit.

    Raises whatever ``connect`` raises, and what ``fit`` raises for a new connection.
    """
    kept: C | None = _kept.pop((role, dsn), None)
    if kept is not None:
        try:
            return _fitted(kept, fit)
        except (adbc.Error, psycopg.Error):
            pass  # lost meanwhile: a new one takes its place
    return _fitted(connect(), fit)


def put(keep: bool, role: str, dsn: Dsn, connection: Closeable) -> None:
    """Keep a connection, which is in no transaction, for the next `take`; or close it."""
    if not keep:
        drop(connection)
        return
    before = _kept.pop((role, dsn), None)
    _kept[role, dsn] = connection
    if before is None and len(_kept) > _most:
        before = _kept.pop(next(iter(_kept)))
    if before is not None:
        drop(before)
    _since[role, dsn] = now = time.monotonic()
    for key, since in list(_since.items()):
        if key not in _kept or now - since > IDLE_SECONDS:
            del _since[key]
            if (idle := _kept.pop(key, None)) is not None:
                drop(idle)


def make_room(sources: int) -> None:
    """Keep the connections of so many sources, not only of two."""
    global _most  # noqa: PLW0603 - like what is kept, it is the process's
    _most = max(_most, MOST + 2 * (sources - 2))


def forget(dsn: Dsn) -> None:
    """Close what this process keeps of one database, so that it can be dropped."""
    for role, kept in list(_kept):
        if kept == dsn and (connection := _kept.pop((role, kept), None)) is not None:
            drop(connection)


def drop(connection: Closeable) -> None:
    """Close a connection. If the server has cut it, nothing is left to close."""
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
