"""The source session: a task's writes at its source, one transaction per step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from saf.database import connections, unavailable_if_lost
from saf.database.bounds import while_unavailable
from saf.engine import kept_results, pulse, seats
from saf.engine.work import Work
from saf.errors import Unavailable
from saf.failpoints import fail_point
from saf.log.cursor import learn_set_aside, lock_cursors
from saf.routing.resolved import Resolved, keep, resolved
from saf.routing.route_choices import Asker, choose
from saf.setaside import in_hand

T = TypeVar("T")


class SourceSession:
    """Writes at the source, each write in its own transaction; a lost one is retried.

    So a write must be able to run twice. Connects at the first write.
    """

    def __init__(self, work: Work, attempts: int) -> None:
        self._work = work
        self._attempts = attempts
        self._connection: psycopg.Connection[Any] | None = None
        self._in_hand: str | None = None
        """The destination whose parked messages are in hand."""
        self._let_slip = False
        self._seat: seats.Seat | None = None

    def __call__(self, write: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Commit ``write`` and return its result.

        Raises:
            Unavailable: the source does not answer; the write may have been committed.
        """

        def transaction() -> T:
            with self._connected() as connection, connection.transaction():
                return write(connection)

        return while_unavailable(self._attempts, transaction)

    def find(self, ask: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Return the result of ``ask``, which only reads, each statement in its own transaction.

        Raises:
            Unavailable: the source does not answer.
        """

        def asked() -> T:
            with self._connected() as connection:
                return ask(connection)

        return while_unavailable(self._attempts, asked)

    @contextmanager
    def in_hand(self, destination: str) -> Iterator[None]:
        """Hold a destination's parked messages in hand during a block; no operator has them."""
        self(lambda source: self._share(source, destination))
        self._in_hand, self._let_slip = destination, False
        try:
            yield
        finally:
            self._in_hand = None
            if self._connection is not None and not self._connection.closed:
                subscription_id = self._work.batch.subscription_id
                try:
                    in_hand.let_go(self._connection, subscription_id, destination)
                except psycopg.Error:
                    self._connection.close()  # a closed session has nothing in hand

    def has_let_slip(self) -> bool:
        """Whether the messages in hand were out of hand since they were read: the session was
        lost."""
        self(lambda source: source.execute("SELECT"))
        return self._let_slip

    def has_seat(self, destination: str, concurrency: int) -> bool:
        """Return whether the task has a seat of a destination; take a seat if it has none.

        A seat is lost with its session. Free the seat of another destination first.
        """
        number, idle = self._work.batch.subscription_id, self._work.lease_seconds

        def seat(source: psycopg.Connection[Any]) -> seats.Seat | None:
            if self._seat is not None and self._seat.session is source:
                source.execute("SELECT")
                return self._seat
            return seats.take(source, number, destination, concurrency, idle)

        self._seat = self.find(seat)
        return self._seat is not None

    def free_seat(self) -> None:
        """Free the task's seat, if it has a seat."""
        seat, self._seat = self._seat, None
        if seat is not None and not seat.session.closed:
            try:
                seat.free()
            except psycopg.Error:
                seat.session.close()  # a closed session has no seat

    def choose(self, among: Mapping[Asker, Sequence[str]]) -> Mapping[Asker, str]:
        """Choose destinations for keys among routes that share, committed."""
        return self._remember("chosen", lambda source: choose(source, among))

    def resolved(self, router: str, keys: Collection[str]) -> Mapping[str, Resolved]:
        """Return a router's earlier resolutions; see `saf.routing.resolved`."""
        return self.find(lambda source: resolved(source, router, keys))

    def keep(self, router: str, new: Mapping[str, Resolved]) -> Mapping[str, Resolved]:
        """Keep a router's resolutions, committed; return those to use for these keys."""
        return self._remember("resolved", lambda source: keep(source, router, new))

    def kept_results(self, messages: Mapping[str, Sequence[int]]) -> list[tuple[Any, ...]]:
        """Return the kept results of messages; see `saf.engine.kept_results`."""
        return self(lambda source: kept_results.kept(source, self._work.batch, messages))

    def keep_results(self, results: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Keep transforms' results, committed; return those to use for these messages."""
        batch = self._work.batch
        return self._remember(
            "transformed", lambda source: kept_results.keep(source, batch, results)
        )

    def sent_to(
        self, messages: Mapping[str, Sequence[int]], services: Collection[str]
    ) -> dict[int, str]:
        """Map messages to those of ``services`` that they were sent to, as the outbox has it."""
        return self(lambda source: kept_results.sent_to(source, messages, services))

    def _remember(self, point: str, write: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Commit values that must be the same whenever the batch is read again, before any sending.

        If two tasks have the same batch, the second finds the values that the first has written.
        """

        def remember(source: psycopg.Connection[Any]) -> T:
            lock_cursors(source, self._work.batch)
            return write(source)

        remembered = self(remember)
        fail_point(point)
        return remembered

    def beat(self) -> None:
        """Give a sign of life, from any thread; a lost session gives none."""
        connection = self._connection
        if connection is not None:
            with suppress(psycopg.Error):
                connection.execute("SELECT 1")

    def close(self) -> None:
        """Close the connection, or keep it for the next task."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        keep = self._work.keep and connection.info.transaction_status == TransactionStatus.IDLE
        if keep and self._work.among_others:
            # the driver must not mistake an ended task for a silent one; if the job ends with the
            # task, the lock may stay until another task takes the session
            try:
                connection.execute(pulse.END)
            except psycopg.Error:
                keep = False
        connections.put(keep, "mark", self._work.dsn, connection)

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        with unavailable_if_lost(f"broker {self._work.broker!r}"):
            if self._connection is None or self._connection.closed:
                self._connection = self._reconnect()
            yield self._connection

    def _reconnect(self) -> psycopg.Connection[Any]:
        connection = self._connect()
        if self._in_hand is not None:
            self._let_slip = True
            try:
                self._share(connection, self._in_hand)
            except BaseException:
                connection.close()
                raise
        return connection

    def _share(self, connection: psycopg.Connection[Any], destination: str) -> None:
        in_hand.share(connection, self._work.batch.subscription_id, destination)
        learn_set_aside(connection, self._work.batch)  # operators' decisions since it was read

    def _connect(self) -> psycopg.Connection[Any]:
        return connections.take(
            "mark",
            self._work.dsn,
            self._open,
            lambda connection: connection.execute(pulse.BEGIN, {"life": self._work.life}),
        )

    def _open(self) -> psycopg.Connection[Any]:
        try:
            return self._work.dsn.connect(role="mark", autocommit=True)
        except Unavailable as error:
            raise error.of(f"broker {self._work.broker!r}") from None
