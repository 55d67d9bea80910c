"""Pauses: how long a reader that finds nothing in a log waits until it asks again.

A pause is a share of the time since the reader last found something. So messages that follow soon
do not wait, and a quiet log is asked rarely.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock

SHORTEST_SECONDS = 0.001
SHARE = 0.25


class Pauses:
    """The pauses of one reader."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """Note that the reader has found something."""
        self._since = time.monotonic()

    def next(self, longest: float) -> float:
        """Return the next pause, at most ``longest``, in seconds."""
        return min(max(SHORTEST_SECONDS, (time.monotonic() - self._since) * SHARE), longest)


READERS = 10
"""Readers whose turns come as often as if each asked by itself."""

LOOK_SECONDS = 0.5
"""Time after which a reader that waits for its turn looks whether it should stop, in seconds."""


class Turn:
    """The turn to ask a log, which idle readers of one process pass on: one asks for all of them.

    It asks as often as all would, up to `READERS`, so a message waits no longer and each further
    reader costs nothing.
    """

    def __init__(self, readers: int = 1) -> None:
        self._pauses = Pauses()
        self._share = min(readers, READERS)
        self._lock = Lock()

    def end(self) -> None:
        """Note that a reader has found something."""
        self._pauses.end()

    def next(self, longest: float) -> float:
        """Return the next pause of the reader whose turn it is, in seconds.

        ``longest`` is the longest pause of a reader alone.
        """
        return self._pauses.next(longest / self._share)

    @contextmanager
    def taken(self, deadline: float, stopping: Event) -> Iterator[None]:
        """Run a block in this reader's turn, or once ``deadline`` is over or it should stop."""
        taken = False
        while not taken and not stopping.is_set() and (left := deadline - time.monotonic()) > 0:
            taken = self._lock.acquire(timeout=min(left, LOOK_SECONDS))
        try:
            yield
        finally:
            if taken:
                self._lock.release()
