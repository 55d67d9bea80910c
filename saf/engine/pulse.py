"""A pulse: the sign of life that a task gives, so that its driver keeps the lease for it.

The driver cannot know by itself whether a task is slow or its process is stopped. If it renewed the
lease for a stopped process, the shards would be kept from everybody else for ever. So the task's
session at the source holds an advisory lock by which the driver knows the session, and a thread
uses the session now and then. When a process is stopped, its thread is stopped too.

The pulse also stops when the task has asked no database for anything for as long as a chunk may
take: then its own code hangs, such as a classifier.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread, get_ident
from types import TracebackType
from typing import Any, Self

import psycopg

from saf.database import fetch
from saf.database.patience import quiet_seconds

# The session may have been another task's before
BEGIN = """
SELECT pg_advisory_unlock_all(), pg_advisory_lock_shared(hashtextextended(%(life)s, 0))
"""
END = "SELECT pg_advisory_unlock_all()"

# For tasks that have a session: for how long it has done nothing. A task may run twice, and one of
# the runs may have lost its machine.
SILENT = """
SELECT min(CASE WHEN a.state = 'active' THEN 0
                ELSE extract(epoch FROM clock_timestamp() - a.state_change) END)::float
FROM unnest(%(lives)s::text[]) AS t (life)
JOIN pg_locks l ON l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.classid::bigint << 32 | l.objid::bigint = hashtextextended(t.life, 0)
JOIN pg_stat_activity a USING (pid)
WHERE a.state_change IS NOT NULL
GROUP BY t.life
"""


def silent(connection: psycopg.Connection[Any], lives: list[str]) -> list[float]:
    """For how many seconds each task was not heard of; only for tasks that are at work."""
    return [float(seconds) for (seconds,) in fetch(connection, SILENT, {"lives": lives})]


class Pulse:
    """Beats several times a lease while its block runs, in a thread of its own."""

    def __init__(self, beat: Callable[[], object], every_seconds: float, patience: float) -> None:
        self._beat = beat
        self._every = every_seconds
        self._patience = patience
        self._task = get_ident()
        self._over = Event()
        self._thread = Thread(target=self._run, name="saf pulse", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every):
            if quiet_seconds(self._task) < self._patience:
                self._beat()
