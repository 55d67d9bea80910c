"""Questions: threads that ask many brokers at a time, of which those that hang hold up no other.

So many questions are asked at a time, and the others wait for their turn. A question that has not
been answered for `HANGS_SECONDS` is taken to hang, and another one has its turn. Those for brokers
in doubt, which have not answered the last time, wait in a line of their own: the others are asked
as if those were not there.

The end of the process waits for no thread, because what it asks may not answer for long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from threading import Lock, Thread, current_thread
from typing import Any, TypeVar

from saf.database.background import fulfil

T = TypeVar("T")

HANGS_SECONDS = 0.5
"""After so long, a question holds up no other one."""
MOST_TIMES = 4
"""How many times as many threads as ask at a time there are at most, with those that hang."""


class Questions:
    """Asks brokers, ``at_once`` at a time. Safe to use from several threads."""

    def __init__(self, at_once: int, name: str) -> None:
        self._trusted = _Line(at_once, name)
        self._in_doubt = _Line(at_once, name)
        self._over = False

    def ask(self, action: Callable[[], T], *, in_doubt: bool = False) -> Future[T]:
        """Run ``action`` when it has its turn; its result, or what it raises, is the future's.

        Until then, the future can be cancelled.
        """
        future: Future[T] = Future()
        if self._over:
            future.cancel()
            return future
        (self._in_doubt if in_doubt else self._trusted).add(future, action)
        return future

    def wait(self, futures: Iterable[Future[Any]], seconds: float) -> None:
        """Wait until all are done, for no longer than that, and not after the end.

        Questions that hang give their turn to others only while somebody waits.
        """
        until = time.monotonic() + seconds
        while not self._over and (left := until - time.monotonic()) > 0:
            if not wait(futures, timeout=min(left, HANGS_SECONDS)).not_done:
                return
            self._trusted.go_on()
            self._in_doubt.go_on()

    def close(self) -> None:
        """Ask nobody any more."""
        self._over = True
        self._trusted.cancel()
        self._in_doubt.cancel()


class _Line:
    """Questions that wait for their turn, and the threads that ask others."""

    def __init__(self, at_once: int, name: str) -> None:
        self._at_once = at_once
        self._name = name
        self._lock = Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._since: dict[Thread, float] = {}
        """When each thread has begun with what it asks."""

    def add(self, future: Future[Any], action: Callable[[], Any]) -> None:
        with self._lock:
            self._waiting.append((future, action))
        self.go_on()

    def go_on(self) -> None:
        """Start a thread for each question that has its turn."""
        with self._lock:
            free = min(self._at_once - self._busy(), MOST_TIMES * self._at_once - len(self._since))
            for _ in range(min(free, len(self._waiting))):
                thread = Thread(target=self._run, name=self._name, daemon=True)
                self._since[thread] = time.monotonic()
                thread.start()

    def cancel(self) -> None:
        """Leave everything that waits."""
        with self._lock:
            left = [*self._waiting]
            self._waiting.clear()
        for future, _ in left:
            future.cancel()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            fulfil(*found)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Return what this thread asks next; None: it ends."""
        with self._lock:
            self._since.pop(current_thread(), None)
            if not self._waiting or self._busy() >= self._at_once:
                return None
            self._since[current_thread()] = time.monotonic()
            return self._waiting.popleft()

    def _busy(self) -> int:
        now = time.monotonic()
        return sum(now - since < HANGS_SECONDS for since in self._since.values())
