"""Stopping: the time limit for a receiver that was told to stop.

The first SIGTERM or SIGINT, or a call of `Loop.stop`, makes each thread finish the message in hand.
Its work is committed, and the other messages of its delivery are put back. A thread that has not
ended after ``stop_timeout`` seconds is abandoned: its connection is cut, so that its delivery is
rolled back whatever it does afterwards, and `StopTimeout` is raised.

The delivery is repeated as after a kill: the first message of a shard alone, with this attempt
counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from saf.database.bounds import shut
from saf.errors import StopTimeout
from saf.received import Received
from saf.signals import stop_on_signals

STOP_SECONDS = 25.0
"""Default time limit; Kubernetes, for example, kills a service after 30 seconds by default."""

CANCEL_SECONDS = 1.0
"""Time limit for the server to cancel the statements of connections that are cut."""


class Stopping:
    """State of a receiver's stop: whether it was told, its deadline, and the messages in hand."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.told = threading.Event()
        self._until: float | None = None
        self._open: set[psycopg.Connection[Any]] = set()
        self.in_hand: dict[int, Sequence[Received]] = {}
        """Messages in hand, by thread: more than one if handlers are async."""

    def tell(self) -> None:
        """Tell the receiver to stop; the first call counts. From any thread or signal handler."""
        if self._until is None:
            self._until = time.monotonic() + self.seconds
        self.told.set()

    def hurry(self, seconds: float) -> None:
        """Limit the time for the messages in hand to ``seconds`` from now."""
        deadline = time.monotonic() + seconds
        self._until = deadline if self._until is None else min(self._until, deadline)

    def begin_anew(self) -> None:
        """Forget the stop request."""
        self._until = None
        self.told.clear()

    @contextmanager
    def using(self, connection: psycopg.Connection[Any]) -> Iterator[None]:
        """Note that a block uses this connection, which is cut if the block takes too long."""
        self._open.add(connection)
        try:
            yield
        finally:
            self._open.discard(connection)
            self.in_hand.pop(threading.get_ident(), None)

    def run(self, threads: Iterable[threading.Thread]) -> None:
        """Start threads and wait until they end; SIGTERM and SIGINT tell them to stop.

        Raises:
            StopTimeout: the threads were told to stop, and have not ended in time.
        """
        threads = list(threads)
        with stop_on_signals(self.tell):
            for thread in threads:
                thread.start()
            for thread in threads:
                # in short steps, because Python notices no signal while it waits for a thread
                while thread.is_alive():
                    thread.join(0.2)
                    if self._until is not None and time.monotonic() > self._until:
                        raise self._given_up()
        self.begin_anew()

    def _given_up(self) -> StopTimeout:
        """Cut the connections; the server rolls back as soon as it notices."""
        in_hand = [str(message) for group in list(self.in_hand.values()) for message in group]
        error = StopTimeout(self.seconds, in_hand)
        cut = list(self._open)
        for connection in cut:
            with suppress(psycopg.Error, OSError):
                shut([connection.fileno()])
        # no commit can follow; a statement still running would hold its locks to its end
        deadline = time.monotonic() + CANCEL_SECONDS
        for connection in cut:
            with suppress(psycopg.Error, OSError):
                connection.cancel_safe(timeout=max(0.1, deadline - time.monotonic()))
        return error
