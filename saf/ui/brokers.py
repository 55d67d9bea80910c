"""Brokers, as pages query them: in parallel, over kept connections, and never for long.

The server bounds each query (role ``ui`` of `saf.database.bounds`), and a page waits at most
`PATIENCE_SECONDS`. A broker that has not answered by then, or could not be connected to, is not
queried again for `REST_SECONDS`: pages immediately show the reason. Its pending query continues,
but nothing waits for it. Afterwards the broker is in doubt until it has answered
(`saf.operating.watch`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Generic, TypeVar

import psycopg

from saf.config import Broker
from saf.database import check_schema, unavailable_if_lost
from saf.errors import SafError, SchemaMissing, Unavailable, Unexpected
from saf.operating.places import Candidate
from saf.operating.watch import Questions

T = TypeVar("T")
Action = Callable[[psycopg.Connection[Any]], T]

PATIENCE_SECONDS = 1.5
"""Longest time that a page waits for its brokers."""
REST_SECONDS = 5.0
"""Pause in queries to a broker that did not answer."""
AT_ONCE = 32
"""Queries that run at a time."""
KEPT = 2
"""Connections to keep per broker."""
IDLE_SECONDS = 60.0
"""Longest time that an unused connection is kept."""
ROLE = "ui"


@dataclass(frozen=True, kw_only=True)
class Answers(Generic[T]):
    """Answers of brokers, by name, and errors of the others."""

    found: Mapping[str, T]
    errors: Mapping[str, SafError]


class Brokers:
    """All brokers of saf.toml; ``places`` returns the current ones on each call."""

    def __init__(
        self, places: Callable[[], Mapping[str, Broker]], last: Collection[str] = ()
    ) -> None:
        self._places = places
        self._last = frozenset(last)
        self._questions = Questions(AT_ONCE, "saf-ui")
        self._lock = Lock()
        self._idle: dict[str, list[tuple[psycopg.Connection[Any], float]]] = defaultdict(list)
        self._down: dict[str, tuple[SafError, float]] = {}

    def names(self) -> list[str]:
        """Return the names of all brokers; brokers that are only destinations come last."""
        return sorted(self._places(), key=lambda name: name in self._last)

    def place(self, name: str) -> Broker | None:
        """Return the broker with this name."""
        return self._places().get(name)

    def ask(
        self, action: Action[T], names: Iterable[str] | None = None, *, seconds: float | None = None
    ) -> Answers[T]:
        """Query some brokers, by default all; ``seconds`` is the longest wait. Raises nothing."""
        brokers = self._places() if names is None else names
        return self.ask_each(dict.fromkeys(brokers, action), seconds=seconds)

    def ask_each(
        self, actions: Mapping[str, Action[T]], *, seconds: float | None = None
    ) -> Answers[T]:
        """Query brokers, by name, with a separate action for each; otherwise like `ask`."""
        places = self._places()
        patience = PATIENCE_SECONDS if seconds is None else seconds
        jobs: dict[str, Future[T]] = {}
        errors: dict[str, SafError] = {}
        for name, action in actions.items():
            if name not in places:
                continue
            if (error := self._resting(name)) is not None:
                errors[name] = error
            else:
                jobs[name] = self._questions.ask(
                    partial(self._one, name, places[name], action), in_doubt=name in self._down
                )
        self._questions.wait(jobs.values(), patience)
        found: dict[str, T] = {}
        for name, job in jobs.items():
            if not job.done():
                late = Unavailable(f"broker {name!r}", f"has not answered for {patience:g} s")
                if not job.cancel():  # a broker that was not queried yet is not at fault
                    self._rest(name, late)
                errors[name] = late
                continue
            try:
                found[name] = job.result()
            except SchemaMissing as error:
                if not isinstance(places[name], Candidate):
                    errors[name] = error
            except SafError as error:
                errors[name] = error
            except Exception as error:  # psycopg's errors and bugs concern one broker, not the page
                errors[name] = Unexpected(f"broker {name!r}", error)
        return Answers(found=found, errors=errors)

    def close(self) -> None:
        """Stop all queries, and close connections."""
        self._questions.close()
        with self._lock:
            kept = [idle for group in self._idle.values() for idle, _ in group]
            self._idle.clear()
        for connection in kept:
            connection.close()

    def _one(self, name: str, broker: Broker, action: Action[T]) -> T:
        with unavailable_if_lost(f"broker {name!r}"):
            try:
                connection = self._take(name, broker)
            except Unavailable as error:
                self._rest(name, error)
                raise
            try:
                found = action(connection)
            finally:
                self._put(name, connection)
        with self._lock:
            self._down.pop(name, None)
        return found

    def _take(self, name: str, broker: Broker) -> psycopg.Connection[Any]:
        with self._lock:
            while self._idle[name]:
                connection, _ = self._idle[name].pop()
                if not connection.closed:
                    return connection
        connection = broker.dsn.connect(role=ROLE, autocommit=True)
        try:
            check_schema(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _put(self, name: str, connection: psycopg.Connection[Any]) -> None:
        now = time.monotonic()
        old: list[psycopg.Connection[Any]] = []
        with self._lock:
            for kept in self._idle.values():
                while kept and now - kept[0][1] > IDLE_SECONDS:
                    old.append(kept.pop(0)[0])
            if not connection.closed and len(self._idle[name]) < KEPT:
                self._idle[name].append((connection, now))
            else:
                old.append(connection)
        for expired in old:
            expired.close()

    def _resting(self, name: str) -> SafError | None:
        with self._lock:
            error, end = self._down.get(name, (None, 0.0))
        return error if time.monotonic() < end else None

    def _rest(self, name: str, error: SafError) -> None:
        with self._lock:
            self._down[name] = error, time.monotonic() + REST_SECONDS
