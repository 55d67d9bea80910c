"""Background: threads for what may hang, such as a call into a JVM that is stopped.

The end of the process does not wait for them. It does for those of a ThreadPoolExecutor, for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


class Background:
    """A number of threads that run actions, one after the other.

    They stay the same, because to PySpark each thread is another client of its JVM.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = threads
        for _ in range(threads):
            Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Run ``action`` when a thread is free; its result, or what it raises, is the future's."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:  # it is raised where it is asked for
                future.set_exception(error)

        self._todo.put(run)
        return future

    def dismiss(self) -> None:
        """Let the threads end after what they have in hand."""
        for _ in range(self._threads):
            self._todo.put(None)

    def _run(self) -> None:
        while (run := self._todo.get()) is not None:
            run()
