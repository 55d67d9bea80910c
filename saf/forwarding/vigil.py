"""A vigil: whether a job's tasks give signs of life; see `saf.engine.pulse`.

The driver renews a lease only as long as its tasks live. If a task has a session at its source and
is silent for a whole lease, the task and its job are given up: Spark kills the process, the batch
stays open, and the next forwarder continues from its position. A job is also given up if none of
its tasks gives signs of life any more, as when Spark itself hangs. A job that has not begun may
wait longer, as long as Spark answers; during that time, other members may take its shards.

Time in which the driver slept, e.g. because its machine was suspended, does not count against its
tasks: they have slept too. So silence is counted from the time at which the driver was awake again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import psycopg

from saf.engine.pulse import silent
from saf.engine.work import Work
from saf.errors import Unavailable

SILENT_LEASES = 2
"""Leases for which Spark may be silent."""
BEGIN_SECONDS = 600.0
"""Seconds that a job may wait for its first task: executors may need to start."""
SLEPT = 2 / 3
"""Part of a lease after which an inactive driver has slept: normally it checks twice as often."""


class Vigil:
    """The vigil over the tasks of one job."""

    def __init__(self, work: Sequence[Work]) -> None:
        self.group = f"saf {uuid4()}"
        """The name by which Spark knows the job."""
        self._lives: dict[str, list[str]] = {}
        for item in work:
            self._lives.setdefault(item.broker, []).append(item.life)
        self._lease = max(item.lease_seconds for item in work)
        self._heard_at = self._awake_at = self._awake_since = time.monotonic()
        self.heard = False
        """Whether any task has given a sign of life."""
        self._lost: dict[str, float] = {}

    @property
    def brokers(self) -> list[str]:
        """The brokers that its tasks belong to."""
        return list(self._lives)

    def hear(self) -> None:
        """Count as a sign of life of the job that the driver itself works for it."""
        self._heard_at = time.monotonic()

    def silence(self, broker: str, connection: psycopg.Connection[Any]) -> float:
        """Return the seconds since the last sign of life of a broker's most silent task, or the
        job."""
        now = self._awake()
        seconds = [
            min(life, now - self._awake_since)
            for life in silent(connection, self._lives.get(broker, []))
        ]
        if not seconds:
            self._lost.pop(broker, None)
            return now - self._heard_at
        self.heard = True
        self._heard_at = max(self._heard_at, now - min(seconds))
        self._lost[broker] = max(seconds)
        return max(seconds)

    @property
    def given_up(self) -> Unavailable | None:
        """Why to stop waiting for the job; None: keep waiting."""
        silence = self._awake() - self._heard_at
        lost = sorted(name for name, seconds in self._lost.items() if seconds >= self._lease)
        if lost:
            what = f"a task for {', '.join(map(repr, lost))}"
            reason = f"it was not heard of for {self._lease:g} s: its process hangs"
        elif self.heard and silence >= SILENT_LEASES * self._lease:
            what, reason = "Spark", f"no task was heard of for {silence:.0f} s"
        elif not self.heard and silence >= max(self._lease, BEGIN_SECONDS):
            what, reason = "Spark", f"no task has begun for {silence:.0f} s"
        else:
            return None
        return Unavailable(what, f"{reason}. The next run forwards what it had in hand")

    def _awake(self) -> float:
        """Return the time; note whether the driver has slept since the last call."""
        now = time.monotonic()
        if now - self._awake_at > self._lease * SLEPT:
            self._awake_since = self._heard_at = now
            self._lost.clear()
        self._awake_at = now
        return now
