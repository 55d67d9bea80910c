"""The watch: collects the figures of all brokers in saf.toml, each time they are requested.

`Watch` queries each broker in a thread, over a kept connection. A broker that does not answer, or
not in time, is down (``saf_up`` is 0) and has no other figures. It is queried again at the next
request, or once its overdue answer has arrived. The other brokers are as quick as ever.

`Questions` runs these threads, and those of `saf.ui.brokers`. A limited number of questions run in
parallel, and the others wait for their turn. A question without an answer after `HANGS_SECONDS` is
considered to hang, and another question gets its turn, so a hanging broker does not block others.
Questions for brokers in doubt, which did not answer the last time, wait in a separate line, so they
do not delay the others.

A hanging question is not cancelled. The end of the process waits for no thread, because a broker
may not answer for a long time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from threading import Lock, Thread, current_thread
from typing import Any, TypeVar

import psycopg

from saf.config import Broker
from saf.database import check_schema, unavailable_if_lost
from saf.database.background import fulfil
from saf.errors import SafError, SchemaMissing, Unexpected
from saf.operating.figures import Ask
from saf.operating.places import Candidate
from saf.telemetry.logger import Log
from saf.telemetry.metrics import READ_SECONDS, UP, Sample

AT_ONCE = 16
"""Number of brokers queried in parallel."""
PATIENCE_SECONDS = 8.0
"""Maximum wait of a page for its brokers: Prometheus itself waits for 10 s by default."""
FRESH_SECONDS = 1.0
"""How long a page stays valid: two simultaneous requests get the same page."""
HANGS_SECONDS = 0.5
"""Time after which a question no longer blocks others."""
MOST_TIMES = 4
"""Maximum number of threads, including those that hang, as a multiple of ``at_once``."""

log = Log("saf.metrics")

T = TypeVar("T")


class Watch:
    """Collects the figures of brokers; ``places`` returns the current brokers each time."""

    def __init__(
        self,
        places: Callable[[], Mapping[str, Broker]],
        ask: Ask,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._places = places
        self._ask = ask
        self._patience = patience_seconds
        self._questions = Questions(AT_ONCE, "saf-metrics")
        self._connections: dict[str, psycopg.Connection[Any]] = {}
        self._asked: dict[str, Future[list[Sample]]] = {}
        self._down: dict[str, str] = {}
        self._turn = threading.Lock()
        self._page: list[Sample] = []
        self._taken_at = float("-inf")

    def take(self) -> list[Sample]:
        """Return the figures of all brokers, as of now."""
        with self._turn:
            if time.monotonic() - self._taken_at > FRESH_SECONDS:
                self._page = self._take()
                self._taken_at = time.monotonic()
            return self._page

    @property
    def down(self) -> Mapping[str, str]:
        """The brokers that did not answer the last time, with reasons."""
        return self._down

    def close(self) -> None:
        """Stop all queries."""
        self._questions.close()
        for connection in [*self._connections.values()]:
            connection.close()

    def _take(self) -> list[Sample]:
        places = self._places()
        for name, broker in places.items():
            if name not in self._asked:
                self._asked[name] = self._questions.ask(
                    partial(self._one, name, broker), in_doubt=name in self._down
                )
        self._questions.wait(self._asked.values(), self._patience)
        page: list[Sample] = []
        for name in [*self._asked]:
            job = self._asked[name]
            if job.done():
                del self._asked[name]
                if name in places and not job.cancelled():
                    page += job.result()
            elif name in places:
                self._note(name, f"has not answered for {self._patience:g} s")
                page.append(Sample(metric=UP, labels=(name,), value=0.0))
        for name in self._connections.keys() - places.keys() - self._asked.keys():
            self._connections.pop(name).close()
        for name in self._down.keys() - places.keys():
            self._down.pop(name, None)
        return page

    def _one(self, name: str, broker: Broker) -> list[Sample]:
        """Query one broker; raise nothing."""
        began = time.monotonic()
        try:
            with unavailable_if_lost(f"broker {name!r}"):
                connection = self._connections.get(name)
                if connection is None or connection.closed:
                    connection = broker.dsn.connect(role="metrics", autocommit=True)
                    self._connections[name] = connection
                    check_schema(connection)
                found = self._ask(connection, name)
        except Exception as error:
            if (lost := self._connections.pop(name, None)) is not None:
                lost.close()
            if isinstance(error, SchemaMissing) and isinstance(broker, Candidate):
                return []  # the pattern matches this database, which is not a broker
            self._note(name, str(error if isinstance(error, SafError) else Unexpected(name, error)))
            return [Sample(metric=UP, labels=(name,), value=0.0)]
        self._down.pop(name, None)
        seconds = time.monotonic() - began
        return [
            Sample(metric=UP, labels=(name,), value=1.0),
            Sample(metric=READ_SECONDS, labels=(name,), value=seconds),
            *found,
        ]

    def _note(self, name: str, why: str) -> None:
        if self._down.get(name) != why:
            log.warning("not_answered", broker=name, error=why)
        self._down[name] = why


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
