"""Growth: how many processes of a worker run, by how busy they are.

As Service Broker's queue monitors do, a supervisor starts another reader while messages wait
although all readers are busy, and ends readers that are not needed. It asks no database: a reader
that finds nothing to take is idle (`Idle`), and reports once a second which share of the time it
was idle. Readers that wait for a database, for the end of a pause or for permits are idle, too:
more of them would not help. Nor does another one start while a new one has not reported, or because
one key has a long backlog, since the next reader finds nothing to take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

BUSY_SHARE = 0.05
"""Largest share of a second that a busy reader is idle."""

GROW_SECONDS = 3
"""Seconds for which all readers must be busy before another one starts."""

SPARE_READERS = 1.25
"""Idle shares of all readers together from which one of them is not needed."""

SHRINK_SECONDS = 30
"""Seconds for which a reader must not be needed before one ends."""


class Idle:
    """The time for which the threads of a process have been idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0.0
        self._since: dict[int, float] = {}

    @contextmanager
    def period(self) -> Iterator[None]:
        """Count the time of a block, in which this thread is idle."""
        thread = threading.get_ident()
        with self._lock:
            self._since[thread] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._total += time.monotonic() - self._since.pop(thread)

    def seconds(self) -> float:
        """Return the seconds for which threads have been idle, of all threads together."""
        with self._lock:
            now = time.monotonic()
            return self._total + sum(now - since for since in self._since.values())


class Growth:
    """The number of readers to run, from ``least`` to ``most``; asked once a second.

    >>> growth = Growth(least=1, most=3)
    >>> [growth.next([0.0]) for _ in range(4)]
    [1, 1, 2, 2]
    >>> [growth.next([0.0, 1.0]) for _ in range(3)], growth.next([0.0, 0.5])
    ([2, 2, 2], 2)
    >>> [growth.next([0.7, 0.7]) for _ in range(SHRINK_SECONDS)][-2:]
    [2, 1]
    """

    def __init__(self, *, least: int, most: int) -> None:
        self.wanted = least
        self._least = least
        self._most = most
        self._busy = self._spare = 0

    def next(self, idle: Sequence[float]) -> int:
        """Return how many readers to run, given the idle share of each in the last second."""
        self._busy = self._busy + 1 if max(idle) <= BUSY_SHARE else 0
        self._spare = self._spare + 1 if sum(idle) >= SPARE_READERS else 0
        if self._busy >= GROW_SECONDS:
            self._busy, self.wanted = 0, min(self.wanted + 1, self._most)
        elif self._spare >= SHRINK_SECONDS:
            self._spare, self.wanted = 0, max(self.wanted - 1, self._least)
        return self.wanted
