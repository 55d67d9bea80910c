"""Connections that a process keeps from one task to the next.

A new connection costs a login, and the server's process behind it has to look up all tables and
statements again: that takes longer than the rest of a task with a few hundred messages. So a
process keeps a few connections, one for each purpose and database: the most recently used ones.
They end with the process if it is not used any more. When a connection is put back, those that were
unused for a minute are closed, so that they do not block a DROP DATABASE.

A kept connection may be lost by the time it is needed. So each time it is taken, it is prepared for
its purpose again; if that fails, a new connection takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import adbc_driver_manager.dbapi as adbc
import psycopg

from saf.database import Dsn

MOST = 10
"""Connections that a process keeps: three each to two sources, and two each to two destinations.
A process that serves more sources in turn makes room for them."""
IDLE_SECONDS = 60.0
"""Seconds that an unused connection is kept."""


class Closeable(Protocol):
    """A connection of any driver."""

    def close(self) -> None:
        """End the connection."""


C = TypeVar("C", bound=Closeable)

_most = MOST

_kept: dict[tuple[str, Dsn], Any] = {}
"""The kept connections by purpose and database, the most recently used one last."""
_since: dict[tuple[str, Dsn], float] = {}
"""When each was put back, by the monotonic clock."""


def take(role: str, dsn: Dsn, connect: Callable[[], C], fit: Callable[[C], object]) -> C:
    """Return a connection for one purpose, kept or new, after preparing it with ``fit``.

    Raises the errors of ``connect``, and those of ``fit`` for a new connection.
    """
    kept: C | None = _kept.pop((role, dsn), None)
    if kept is not None:
        try:
            return _fitted(kept, fit)
        except (adbc.Error, psycopg.Error):
            pass  # lost while kept: a new one takes its place
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
    """Keep the connections of ``sources`` sources, instead of two."""
    global _most  # noqa: PLW0603 - one per process, like `_kept`
    _most = max(_most, MOST + 3 * (sources - 2))


def forget(dsn: Dsn) -> None:
    """Close this process's kept connections to one database, so that it can be dropped."""
    for role, kept in list(_kept):
        if kept == dsn and (connection := _kept.pop((role, kept), None)) is not None:
            drop(connection)


def drop(connection: Closeable) -> None:
    """Close a connection. If the server has cut it, there is nothing to close."""
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
