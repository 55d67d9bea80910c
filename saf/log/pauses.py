"""Pauses: how long a reader that finds nothing in a log waits until it asks again.

A pause is a share of the time since the reader last found something. So messages that follow soon
do not wait, and a quiet log is asked rarely.
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
        """Note that the reader has found something."""
        self._since = time.monotonic()

    def next(self, longest: float) -> float:
        """Return the next pause, at most ``longest``, in seconds."""
        return min(max(SHORTEST_SECONDS, (time.monotonic() - self._since) * SHARE), longest)
