"""Garbage: the collector runs less often while many objects are made, none of which is garbage.

The collector runs whenever some hundreds more objects were made than removed, and looks through
those that are new. A chunk in Python has tens of thousands, so it would look through them again and
again: that takes up to a third of the time to read a queue.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

MANY = 100_000
"""Objects that the collector is to wait for: more than a chunk usually has."""


class _Patience:
    """The blocks of all threads, because the collector is the process's."""

    def __init__(self) -> None:
        self.turn = Lock()
        self.blocks = 0
        self.before = gc.get_threshold()

    def begin(self) -> None:
        with self.turn:
            if not self.blocks:
                self.before = gc.get_threshold()
                first, *others = self.before
                if 0 < first < MANY:  # 0: the application has disabled it
                    gc.set_threshold(MANY, *others)
            self.blocks += 1

    def end(self) -> None:
        with self.turn:
            self.blocks -= 1
            if not self.blocks:
                gc.set_threshold(*self.before)


_patience = _Patience()


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Let the garbage collector wait for `MANY` objects in a block.

    >>> with rarely_collected():
    ...     gc.get_threshold()[0]
    100000
    """
    _patience.begin()
    try:
        yield
    finally:
        _patience.end()
