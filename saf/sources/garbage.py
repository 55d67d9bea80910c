"""Garbage: the collector rests while many objects are made, none of which is garbage.

The collector runs whenever some hundred more objects were made than removed, and looks through
those that are new. A chunk in Python has ten thousands, so it would look through them again and
again: that takes a third of the time to read a queue.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

LONGEST_SECONDS = 10.0
"""Time after which garbage is collected although another thread is inside a block."""


class _Rest:
    """The blocks of all threads, because the collector is the process's."""

    def __init__(self) -> None:
        self.turn = Lock()
        self.blocks = 0
        self.was_enabled = False
        self.since = 0.0

    def begin(self) -> None:
        with self.turn:
            if not self.blocks:
                self.was_enabled, self.since = gc.isenabled(), time.monotonic()
                gc.disable()
            self.blocks += 1

    def end(self) -> None:
        with self.turn:
            self.blocks -= 1
            if not self.was_enabled:
                return
            if not self.blocks:
                gc.enable()
            elif time.monotonic() - self.since > LONGEST_SECONDS:
                self.since = time.monotonic()
                gc.collect()


_rest = _Rest()


@contextmanager
def uncollected() -> Iterator[None]:
    """Let the garbage collector rest in a block; use it for the work of a chunk.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    _rest.begin()
    try:
        yield
    finally:
        _rest.end()
