"""Brokers, as pages ask them: all at once, with kept connections, and never for long.

Each question has a bound at its server (role ``ui`` of `saf.database.bounds`), and a page waits no
longer than `PATIENCE_SECONDS`. A broker that has not answered by then, or that could not be
connected to, is not asked again for `REST_SECONDS`: pages show at once why. What it still owes
an answer to goes on, and nobody waits for it; after that it is in doubt, until it has answered
(`saf.operating.questions`).
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
from saf.fleets import Candidate
from saf.operating.questions import Questions

T = TypeVar("T")
Action = Callable[[psycopg.Connection[Any]], T]

PATIENCE_SECONDS = 1.5
"""How long a page waits for its brokers."""
REST_SECONDS = 5.0
"""How long a broker that did not answer is left alone."""
AT_ONCE = 32
"""How many questions are asked at a time."""
KEPT = 2
"""How many connections to a broker are kept."""
IDLE_SECONDS = 60.0
"""How long a connection is kept without being used."""
ROLE = "ui"


@dataclass(frozen=True, kw_only=True)
class Answers(Generic[T]):
    """What brokers have answered, by name, and why others have not."""

    found: Mapping[str, T]
    errors: Mapping[str, SafError]


class Brokers:
    """All brokers of saf.toml; ``places`` says each time which there are."""

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
        """Return the names of all brokers, those that are only destinations last."""
        return sorted(self._places(), key=lambda name: name in self._last)

    def place(self, name: str) -> Broker | None:
        """Return the broker of a name."""
        return self._places().get(name)

    def ask(
        self, action: Action[T], names: Iterable[str] | None = None, *, seconds: float | None = None
    ) -> Answers[T]:
        """Ask some brokers, by default all; ``seconds`` is the patience. Raises nothing."""
        asked = self._places() if names is None else names
        return self.ask_each(dict.fromkeys(asked, action), seconds=seconds)

    def ask_each(
        self, actions: Mapping[str, Action[T]], *, seconds: float | None = None
    ) -> Answers[T]:
        """Ask brokers, each by its name something of its own; otherwise as `ask`."""
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
                if not job.cancel():  # who has not even been asked is not at fault
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
            except Exception as error:  # psycopg's, and defects: of one broker, not of the page
                errors[name] = Unexpected(f"broker {name!r}", error)
        return Answers(found=found, errors=errors)

    def close(self) -> None:
        """Ask nobody any more."""
        self._questions.close()
        with self._lock:
            kept = [one for some in self._idle.values() for one, _ in some]
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
        for one in old:
            one.close()

    def _resting(self, name: str) -> SafError | None:
        with self._lock:
            error, until = self._down.get(name, (None, 0.0))
        return error if time.monotonic() < until else None

    def _rest(self, name: str, error: SafError) -> None:
        with self._lock:
            self._down[name] = error, time.monotonic() + REST_SECONDS
