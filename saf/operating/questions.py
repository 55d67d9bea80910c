"""Questions: threads that query many brokers in parallel; a hanging one does not block others.

A limited number of questions run in parallel, and the others wait for their turn. A question
without an answer after `HANGS_SECONDS` is considered to hang, and another one gets its turn.
Questions for brokers in doubt, which did not answer the last time, wait in a separate line, so they
do not delay the others.

The end of the process waits for no thread, because a broker may not answer for a long time.
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
"""Time after which a question no longer blocks others."""
MOST_TIMES = 4
"""Maximum number of threads, including those that hang, as a multiple of ``at_once``."""


class Questions:
    """Queries brokers, ``at_once`` in parallel. Thread-safe."""

    def __init__(self, at_once: int, name: str) -> None:
        self._trusted = _Line(at_once, name)
        self._in_doubt = _Line(at_once, name)
        self._over = False

    def ask(self, action: Callable[[], T], *, in_doubt: bool = False) -> Future[T]:
        """Run ``action`` when its turn comes; the future gets its result or error.

        Until then, the future can be cancelled.
        """
        future: Future[T] = Future()
        if self._over:
            future.cancel()
            return future
        (self._in_doubt if in_doubt else self._trusted).add(future, action)
        return future

    def wait(self, futures: Iterable[Future[Any]], seconds: float) -> None:
        """Wait until all are done, for at most ``seconds``, and not after `close`.

        Hanging questions give their turn to others only during this wait.
        """
        until = time.monotonic() + seconds
        while not self._over and (left := until - time.monotonic()) > 0:
            if not wait(futures, timeout=min(left, HANGS_SECONDS)).not_done:
                return
            self._trusted.go_on()
            self._in_doubt.go_on()

    def close(self) -> None:
        """Run no more questions."""
        self._over = True
        self._trusted.cancel()
        self._in_doubt.cancel()


class _Line:
    """Questions that wait for their turn, and the threads that run others."""

    def __init__(self, at_once: int, name: str) -> None:
        self._at_once = at_once
        self._name = name
        self._lock = Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._since: dict[Thread, float] = {}
        """Start time of each thread's current question."""

    def add(self, future: Future[Any], action: Callable[[], Any]) -> None:
        with self._lock:
            self._waiting.append((future, action))
        self.go_on()

    def go_on(self) -> None:
        """Start a thread for each question whose turn has come."""
        with self._lock:
            free = min(self._at_once - self._busy(), MOST_TIMES * self._at_once - len(self._since))
            for _ in range(min(free, len(self._waiting))):
                thread = Thread(target=self._run, name=self._name, daemon=True)
                self._since[thread] = time.monotonic()
                thread.start()

    def cancel(self) -> None:
        """Drop all waiting questions."""
        with self._lock:
            left = [*self._waiting]
            self._waiting.clear()
        for future, _ in left:
            future.cancel()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            fulfil(*found)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Return this thread's next question; None if the thread ends."""
        with self._lock:
            self._since.pop(current_thread(), None)
            if not self._waiting or self._busy() >= self._at_once:
                return None
            self._since[current_thread()] = time.monotonic()
            return self._waiting.popleft()

    def _busy(self) -> int:
        now = time.monotonic()
        return sum(now - since < HANGS_SECONDS for since in self._since.values())
