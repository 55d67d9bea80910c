"""Pauses: how long a reader of a log that finds nothing waits until it asks again.

A pause is as long as a share of the time since there was something. So what comes soon does not
wait, and a quiet log is asked seldom.
"""

from __future__ import annotations

import time

SHORTEST_SECONDS = 0.003
SHARE = 0.25


class Pauses:
    """The pauses of one reader."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """Note that there was something."""
        self._since = time.monotonic()

    def next(self, longest: float) -> float:
        """Return the next pause, in seconds; ``longest`` is the longest that the reader makes."""
        return min(max(SHORTEST_SECONDS, (time.monotonic() - self._since) * SHARE), longest)
