"""Garbage: the collector runs less often while many objects are made, none of which is garbage.

The collector runs whenever some hundreds more objects were made than removed, and looks through
those that are new. A chunk in Python has tens of thousands, so it would look through them again and
again: that takes up to a third of the time to read a queue.
"""

from __future__ import annotations

import gc
from contextlib import ContextDecorator
from threading import Lock

MANY = 100_000
"""Objects that the collector is to wait for: more than a chunk usually has."""


class _Patience(ContextDecorator):
    """The blocks of all threads, because the collector is the process's."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._blocks = 0
        self._before = gc.get_threshold()

    def __enter__(self) -> None:
        with self._turn:
            if not self._blocks:
                self._before = gc.get_threshold()
                first, *others = self._before
                if 0 < first < MANY:  # 0: the application has disabled it
                    gc.set_threshold(MANY, *others)
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._blocks -= 1
            if not self._blocks:
                gc.set_threshold(*self._before)


rarely_collected = _Patience()
"""Block, or function, in which the garbage collector waits for `MANY` objects."""
