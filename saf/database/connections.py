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

import atexit
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, TypeVar

import psycopg

from saf.database import Dsn

MOST = 10
"""Connections that a process keeps: three each to two sources, and two each to two destinations.
A process that serves more sources makes room for them."""
IDLE_SECONDS = 60.0
"""Seconds that an unused connection is kept."""


class Closeable(Protocol):
    """A connection of any driver."""

    def close(self) -> None:
        """End the connection."""


C = TypeVar("C", bound=Closeable)


@dataclass(frozen=True)
class Kept:
    """A connection that waits for its next use."""

    role: str
    dsn: Dsn
    connection: Any
    since: float
    """When it was put back, by the monotonic clock."""


errors: set[type[Exception]] = {psycopg.Error}
"""The errors of the drivers in use; a driver that is imported adds its own."""

_most = MOST

_kept: list[Kept] = []
"""The kept connections, the most recently used one last."""
_lock = Lock()
"""Guards `_kept`: threads take and put connections."""


def take(role: str, dsn: Dsn, connect: Callable[[], C], fit: Callable[[C], object]) -> C:
    """Return a connection for one purpose, kept or new, after preparing it with ``fit``.

    Raises the errors of ``connect``, and those of ``fit`` for a new connection.
    """
    kept: C | None = _taken(role, dsn)
    if kept is not None:
        try:
            return _fitted(kept, fit)
        except tuple(errors):
            pass  # lost while kept: a new one takes its place
    return _fitted(connect(), fit)


def put(keep: bool, role: str, dsn: Dsn, connection: Closeable) -> None:
    """Keep a connection, which is in no transaction, for the next `take`; or close it."""
    if not keep:
        drop(connection)
        return
    now = time.monotonic()
    with _lock:
        _kept.append(Kept(role, dsn, connection, now))
        unused = [
            kept
            for place, kept in enumerate(_kept)
            if place < len(_kept) - _most or now - kept.since > IDLE_SECONDS
        ]
        for kept in unused:
            _kept.remove(kept)
    for kept in unused:
        drop(kept.connection)


def make_room(sources: int) -> None:
    """Keep the connections of ``sources`` sources, instead of two."""
    global _most  # noqa: PLW0603 - one per process, like `_kept`
    _most = max(_most, MOST + 3 * (sources - 2))


def forget(dsn: Dsn | None = None) -> None:
    """Close the kept connections to one database, so that it can be dropped; None: to all."""
    with _lock:
        of_it = [kept for kept in _kept if dsn in (None, kept.dsn)]
        for kept in of_it:
            _kept.remove(kept)
    for kept in of_it:
        drop(kept.connection)


atexit.register(forget)  # while the drivers' modules still exist


def drop(connection: Closeable) -> None:
    """Close a connection. If the server has cut it, there is nothing to close."""
    try:
        connection.close()
    except tuple(errors):
        return


def _taken(role: str, dsn: Dsn) -> Any:
    """Take out the kept connection that was used last; None if there is none."""
    with _lock:
        for kept in reversed(_kept):
            if (kept.role, kept.dsn) == (role, dsn):
                _kept.remove(kept)
                return kept.connection
    return None


def _fitted(connection: C, fit: Callable[[C], object]) -> C:
    try:
        fit(connection)
    except BaseException:  # Ctrl-C too must not leave it open
        drop(connection)
        raise
    return connection
