"""Broker threads: each serves one database, so that no database delays another.

Each database has one action at a time. No one waits for a database that takes longer than all
others: a database that does not answer uses ``connect_timeout`` of its own thread, and of nothing
else. Its late answer is taken later.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from saf.errors import SafError, Unexpected

T = TypeVar("T")

PATIENCE_SECONDS = 1.0
"""Seconds without any result after which slow databases are no longer waited for."""


class BrokerThreads:
    """A number of threads, and the databases that they serve."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="saf-broker")
        self._jobs: dict[Future[Any], tuple[str, Callable[[Any], None], Callable[[Any], None]]] = {}
        self._done: SimpleQueue[Future[Any]] = SimpleQueue()
        self.busy: set[str] = set()
        """The databases that have not answered yet."""

    @property
    def full(self) -> bool:
        """Whether every thread is busy."""
        return len(self.busy) >= self.threads

    def start(
        self,
        name: str,
        action: Callable[[], T],
        on_result: Callable[[T], None],
        on_failure: Callable[[SafError], None],
    ) -> None:
        """Run ``action`` in a thread; `take_results` calls ``on_result`` or ``on_failure``."""
        self.busy.add(name)
        job = self._pool.submit(action)
        self._jobs[job] = (name, on_result, on_failure)
        job.add_done_callback(self._done.put)

    def take_results(self, timeout: float = PATIENCE_SECONDS) -> bool:
        """Take all results so far, or wait for the first; return False if none comes in time."""
        done = []
        try:
            done.append(self._done.get(timeout=timeout if self._jobs else 0))
            while True:
                done.append(self._done.get_nowait())
        except Empty:
            pass
        for job in done:
            name, on_result, on_failure = self._jobs.pop(job)
            self.busy.discard(name)
            try:
                result = job.result()
            except SafError as error:
                on_failure(error)
            except Exception as error:  # any error concerns one database only
                on_failure(Unexpected(name, error))
            else:
                on_result(result)
        return bool(done)

    def finish(self, names: set[str]) -> bool:
        """Take the results of all these; return False if some databases are no longer waited
        for."""
        while self.busy & names:
            if not self.take_results():
                return False
        return True

    def dismiss(self, last: Callable[[str], None]) -> None:
        """Take no more work; a thread that is still busy runs ``last`` afterwards."""
        for job, (name, *_) in self._jobs.items():
            job.add_done_callback(partial(_afterwards, last, name))
        self._pool.shutdown(wait=False, cancel_futures=True)


def _afterwards(last: Callable[[str], None], name: str, _: Future[Any]) -> None:
    last(name)
