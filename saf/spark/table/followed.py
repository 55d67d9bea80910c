"""One broker of a stream: the stream's progress there, its next rows, and how to read them.

The process in which Spark plans a query calls this once for each micro-batch. Each call connects to
the database again, and first checks that Spark's checkpoint and the database's state match
(`saf.log.stream.check`). Everything it remembers between calls may be forgotten: the epoch that
keeps older queries from writing, and the counts that cut batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from saf.database import Dsn, fetch, unavailable_if_lost
from saf.errors import ConfigurationError, NotThisStream
from saf.log import stream
from saf.log.cursor import has_more_than
from saf.log.offset import Counted, Limit, Offset, between, shows_all_of
from saf.log.read import BY_INDEX
from saf.log.stream import Start, State
from saf.spark.table import part
from saf.spark.table.part import Part

DEEP = 300_000
"""Row count above which rows are read in windows, not sorted at the source."""


@dataclass(kw_only=True)
class Followed:
    """A stream at one broker. It can be pickled; it holds no connection."""

    name: str
    """The broker's name in saf.toml."""
    what: str
    """The broker, for error messages."""
    dsn: Dsn
    log: str
    subscription: str
    start: Start
    certain: bool = True
    """True if the database must be a broker; a fleet's pattern may match other databases, too."""
    _met: bool = False
    """True if the log was checked and is healthy."""
    _epoch: int | None = None
    _counted: tuple[str, Counted] | None = None
    """Counts of the batch that ends at this snapshot."""
    _cut: tuple[Offset, Offset, tuple[int, int]] | None = None
    """Bounds of the last cut, and the transactions that wrote its rows."""

    def begin(self) -> Offset:
        """Return the start of a new checkpoint; register the subscription if it is missing."""
        with self._contact() as connection:
            return self._state(connection, create=True).committed

    def now(self) -> str:
        """Return the current snapshot."""
        with self._contact() as connection:
            return stream.now(connection)

    def has_news(self, start: Offset | None, until: str | None) -> bool:
        """Return whether `advance` would find new rows."""
        with self._contact() as connection:
            known = self._state(connection, create=start is None)
            start = self._checked(start, known)
            if start.open or known.opened_after(start):
                return True
            return self._any(connection, start, until or known.now, known)

    def advance(self, start: Offset | None, until: str | None, limit: Limit) -> Offset:
        """Return the end offset of the next micro-batch, or ``start`` if nothing is new.

        Args:
            start: None: the broker is new in the stream.
            until: Snapshot at which reading stops.
            limit: Maximum size of the micro-batch.
        """
        with self._contact() as connection:
            known = self._state(connection, create=start is None)
            start = self._checked(start, known)
            epoch = self._mine(connection, known)
            rest, end = start.rest, until or known.now
            # the query may have written a batch that its checkpoint lacks: return the same batch
            opened = known.opened_after(start)
            whole = opened or (rest if start.open else None)
            # cursors that begin within a batch would forget it if a newer one were opened
            leap = limit.is_none and not known.begins_at(start)
            may_open = opened is None and (not start.open or leap)
            if may_open and self._any(connection, rest, end, known):
                whole = stream.open_batch(connection, known, epoch, end)
            if whole is None:
                return replace(start, settled=True)
            if limit.is_none:
                return whole
            return self._up_to(connection, start, whole, limit, known)

    def parts(self, start: Offset | None, end: Offset, number: int) -> list[Part]:
        """Divide the rows between two offsets among tasks. Only the offsets define the rows."""
        with self._contact() as connection, connection.transaction():
            # rows that exist now stay until the subscription commits them
            storage = part.storage(connection, self.log)
            known = self._state(connection)
            start = self._checked(start, known)
            self._checked(end, known)
            cut = self._cut
            written_by = cut[2] if cut is not None and cut[:2] == (start, end) else None
            rows = between(self.log, start, end, range(known.shards), written_by)
            deep = written_by is None and has_more_than(connection, rows, DEEP)
            return [
                Part(
                    what=self.what,
                    broker=self.name,
                    dsn=self.dsn,
                    batch=batch,
                    kept=storage.kept,
                    files=storage.files,
                    deep=deep,
                )
                for batch in rows.split(number)
            ]

    def commit(self, end: Offset) -> None:
        """Allow purges up to an offset: Spark will not ask for these rows again."""
        with self._contact() as connection:
            known = self._state(connection)
            self._checked(end, known)
            last = known.committed
            if (end.done, end.open, end.position) == (last.done, last.open, last.position):
                return
            epoch = self._mine(connection, known)
            stream.commit(connection, known, epoch, end)

    def _up_to(
        self,
        connection: psycopg.Connection[Any],
        start: Offset,
        whole: Offset,
        limit: Limit,
        known: State,
    ) -> Offset:
        if self._counted is None or self._counted[0] != whole.end:
            rows = between(self.log, start, whole, range(known.shards))
            # this role may count a whole backlog
            with self.dsn.connect(role="count", autocommit=True) as patient:
                self._counted = whole.end, Counted(patient, rows)
        cut = self._counted[1].next(connection, start.position, limit)
        if cut is None or cut.position is None:
            end = whole
        else:
            end = replace(whole, done=start.done, open=whole.done, position=cut.position)
        self._cut = (start, end, cut.written_by) if cut is not None else None
        return end

    def _any(
        self, connection: psycopg.Connection[Any], start: Offset, end: str, known: State
    ) -> bool:
        """Return whether any row lies between the end of a batch and a snapshot."""
        if shows_all_of(start.done, end):
            return False
        rows = between(self.log, start, replace(start, done=end), range(known.shards))
        with connection.transaction():
            connection.execute(BY_INDEX)
            return bool(fetch(connection, f"{rows.rows(['id'])} LIMIT 1"))

    def _state(self, connection: psycopg.Connection[Any], *, create: bool = False) -> State:
        found = stream.find(connection, self.what, self.log, self.subscription)
        if found is None and create:
            self._create(connection)
            found = stream.find(connection, self.what, self.log, self.subscription)
        if found is None:
            raise NotThisStream(
                f"{self.what}: the stream {self.subscription!r} was dropped, "
                "and messages that it had not committed may be purged. Begin with a new checkpoint"
            )
        return stream.state(connection, self.what, self.subscription, found)

    def _create(self, connection: psycopg.Connection[Any]) -> None:
        try:
            stream.create(connection, self.what, self.log, self.subscription, self.start)
        except psycopg.errors.InsufficientPrivilege:
            raise ConfigurationError(
                f"{self.what}: no stream {self.subscription!r}, and user "
                f"{connection.info.user!r} may not register it: an operator can, with saf "
                f"subscription create {self.subscription} --stream {self.log}"
            ) from None

    def _checked(self, offset: Offset | None, known: State) -> Offset:
        if offset is None:
            return known.committed
        stream.check(offset, known)
        return offset

    def _mine(self, connection: psycopg.Connection[Any], known: State) -> int:
        """Return this query's epoch; the query takes the subscription over at its first write."""
        if self._epoch is None:
            self._epoch = stream.take_over(connection, known)
        return self._epoch

    @contextmanager
    def _contact(self) -> Iterator[psycopg.Connection[Any]]:
        with (
            unavailable_if_lost(self.what),
            self.dsn.connect(role="stream", autocommit=True) as connection,
        ):
            part.check(connection, None if self._met else self.log)
            self._met = True
            yield connection
