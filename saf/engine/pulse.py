"""A pulse: a task's sign of life, so that its driver keeps the lease for the task.

The driver cannot tell a slow task from one whose process is stopped. If it renewed the lease for a
stopped process, no other process could ever take the shards. So the task's session at the source
holds an advisory lock by which the driver recognizes the session, and a thread uses the session now
and then. A stopped process stops this thread too.

The pulse also stops after the task has asked no database for anything for as long as a chunk may
take. Then the task's own code hangs, such as a classifier.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread, get_ident
from types import TracebackType
from typing import Any, Self

import psycopg

from saf.database import fetch
from saf.database.bounds import quiet_seconds

# The session may have belonged to another task
BEGIN = """
SELECT pg_advisory_unlock_all(), pg_advisory_lock_shared(hashtextextended(%(life)s, 0))
"""
END = "SELECT pg_advisory_unlock_all()"

# For tasks that have a session: seconds since it was last used. A task may run twice, and one run
# may have lost its machine.
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
    """Return the seconds since each running task was last heard of; omits all other tasks."""
    return [float(seconds) for (seconds,) in fetch(connection, SILENT, {"lives": lives})]


class Pulse:
    """Beats several times a lease in its own thread while the block runs."""

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
