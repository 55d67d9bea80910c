"""Background: threads for calls that may hang, such as a call into a JVM that is stopped.

The process can end while they hang; with a ThreadPoolExecutor's threads it would wait without end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def fulfil(future: Future[T], action: Callable[[], T]) -> None:
    """Run ``action`` unless its future was cancelled; put the result or exception into the
    future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as error:  # raised to the caller that asks for the result
        future.set_exception(error)


class Background:
    """Up to a number of threads that run actions, one after the other.

    The threads stay the same, because to PySpark each thread is another client of its JVM.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = threads
        self._name = name
        self._started = 0

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Run ``action`` when a thread is free; the future gets its result or exception.

        Until then, the future can be cancelled. Call only from one thread.
        """
        future: Future[T] = Future()

        self._todo.put(partial(fulfil, future, action))
        if self._started < self._threads:
            self._started += 1
            Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def dismiss(self) -> None:
        """Let the threads end after their current actions."""
        for _ in range(self._started):
            self._todo.put(None)

    def _run(self) -> None:
        while (run := self._todo.get()) is not None:
            run()
