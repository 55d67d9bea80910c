"""Broker threads: each deals with one database, so that none holds up another.

There is one thing at a time for each. Whoever takes longer than all others is not waited for: a
database that does not answer takes ``connect_timeout`` of its own thread and of nobody else. What
it says in the end is heard later.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

from saf.errors import SafError, Unexpected

T = TypeVar("T")

PATIENCE_SECONDS = 1.0
"""How long nothing may come back before the slow ones are left to themselves."""


class BrokerThreads:
    """So many threads, and what they are at."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="saf-broker")
        self._jobs: dict[Future[Any], tuple[str, Callable[[Any], None], Callable[[Any], None]]] = {}
        self.busy: set[str] = set()
        """Those that have not answered yet."""

    @property
    def full(self) -> bool:
        """Everybody is at something."""
        return len(self.busy) >= self.threads

    def start(
        self,
        name: str,
        action: Callable[[], T],
        heard: Callable[[T], None],
        failed: Callable[[SafError], None],
    ) -> None:
        """Do it in a thread; `hear` hands the result, or the error, to the one it is for."""
        self.busy.add(name)
        self._jobs[self._pool.submit(action)] = (name, heard, failed)

    def hear(self, timeout: float = PATIENCE_SECONDS) -> bool:
        """Take what has come, or comes first; False if nothing does in time."""
        done, _ = wait(self._jobs, timeout=timeout, return_when=FIRST_COMPLETED)
        for job in done:
            name, heard, failed = self._jobs.pop(job)
            self.busy.discard(name)
            try:
                result = job.result()
            except SafError as error:
                failed(error)
            except Exception as error:  # whatever it is, it is one database's
                failed(Unexpected(name, error))
            else:
                heard(result)
        return bool(done)

    def finish(self, names: set[str]) -> bool:
        """Hear all of these; False if some are left to themselves."""
        while self.busy & names:
            if not self.hear():
                return False
        return True

    def dismiss(self, last: Callable[[str], None]) -> None:
        """No more work; who is still at something does ``last`` after it."""
        for job, (name, *_) in self._jobs.items():
            job.add_done_callback(partial(_afterwards, last, name))
        self._pool.shutdown(wait=False, cancel_futures=True)


def _afterwards(last: Callable[[str], None], name: str, _: Future[Any]) -> None:
    last(name)
