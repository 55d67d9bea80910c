"""The watch: collects the figures of all brokers in saf.toml, each time they are requested.

Each broker is queried in a thread (`saf.operating.questions`) over a kept connection. A broker that
does not answer, or not in time, is down (``saf_up`` is 0) and has no other figures. It is queried
again at the next request, or once its overdue answer has arrived. The others are as quick as ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import psycopg

from saf.config import Broker
from saf.database import check_schema, unavailable_if_lost
from saf.errors import SafError, SchemaMissing, Unexpected
from saf.fleets import Candidate
from saf.logger import Log
from saf.metrics.declared import READ_SECONDS, UP
from saf.metrics.process import Sample
from saf.operating.figures import Ask
from saf.operating.questions import Questions

AT_ONCE = 16
"""Number of brokers queried in parallel."""
PATIENCE_SECONDS = 8.0
"""Maximum wait of a page for its brokers: Prometheus itself waits for 10 s by default."""
FRESH_SECONDS = 1.0
"""How long a page stays valid: two simultaneous requests get the same page."""

log = Log("saf.metrics")


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
