"""Streams: the class that Spark calls, and the stream's progress at each of its brokers.

Spark keeps one reader for a running query, in a Python process beside its driver. An offset is a
dict from the names of brokers to the content of `saf.log.offset.Offset`. Spark calls:

    initialOffset     the start of a checkpoint without any offset; again after a crash before its
                      first micro-batch was complete
    latestOffset      the end of the next micro-batch. Spark writes it into its checkpoint
    commit            the end of the previous micro-batch, only after that
    partitions        the rows of a micro-batch; after a crash, those in the checkpoint first, which
                      perhaps no process of this query has planned before

So the last micro-batch before a pause would not be committed until new messages arrive. Its
messages could not be purged, and the stream would seem to hang. So a pause begins with an offset
without new rows that is marked as such (``settled``): Spark runs an empty micro-batch for it, and
commits the previous one.

If a stream has several brokers, an unavailable broker is skipped with a warning, and its messages
come later; if no broker is available, the query fails. An invalid checkpoint, and anything set
back, always fail the query.

`Followed` is the stream at one broker. Each call connects to the database again, and first checks
that Spark's checkpoint and the database's state match (`saf.log.stream.check`). Everything it
remembers between calls may be forgotten: the epoch that keeps older queries from writing, and the
counts that cut batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from saf.database import Dsn, fetch, unavailable_if_lost
from saf.errors import ConfigurationError, NotThisStream, SchemaMissing, Unavailable
from saf.log import stream
from saf.log.cursor import has_more_than
from saf.log.offset import NO_LIMIT, Counted, Limit, Offset, between, shows_all_of
from saf.log.read import BY_INDEX
from saf.log.stream import Start, State
from saf.operating.places import Candidate
from saf.spark.table import part
from saf.spark.table.options import Options, subscription_of
from saf.spark.table.part import Part
from saf.spark.table.query import Query
from saf.telemetry.logger import Log

if TYPE_CHECKING:
    import pyarrow as pa

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
                    storage=storage,
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


T = TypeVar("T")
Offsets = dict[str, Any]
"""An offset as Spark stores it: for each broker, the result of `Offset.as_dict`."""

AT_ONCE = 16
"""Number of brokers queried in parallel."""

log = Log("saf.stream")


class Stream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The messages of the logs of one or many brokers, as they arrive."""

    def __init__(self, options: Options, asked: StructType, partitions: int) -> None:
        self._options = options
        self._subscription = subscription_of(options)
        self._asked = asked
        self._partitions = partitions
        self._followed: dict[str, Followed] = {}
        self._until: dict[str, str] | None = None
        """The end of a run with Trigger.AvailableNow, by broker."""
        self._turn = 0

    def initialOffset(self) -> Offsets:  # noqa: N802 - Spark's name
        """Return the subscription's place at each broker; register missing subscriptions."""
        found = self._each(self._brokers(), lambda broker: broker.begin())
        return {name: offset.as_dict() for name, offset in found.items()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit from the options; Spark supports one kind at a time."""
        limit = self._options.limit
        if limit.rows != NO_LIMIT:
            return ReadMaxRows(limit.rows)
        return ReadAllAvailable() if limit.bytes == NO_LIMIT else ReadMaxBytes(limit.bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Remember the current snapshots: this run reads no further."""
        self._until = self._each(self._brokers(), lambda broker: broker.now())

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:  # noqa: N802 - Spark's name
        """Open batches at brokers with new messages, and cut them at the limit."""
        before, brokers = _read(start), self._brokers()
        self._refuse_others(before, brokers)
        until = self._until
        if until is not None:
            brokers = {name: broker for name, broker in brokers.items() if name in until}
        served, allowed = self._served(before, brokers, self._limit(limit))
        found = self._each(
            served,
            lambda broker: broker.advance(before.get(broker.name), self._end(broker), allowed),
        )
        # a broker that waits for its turn has new messages, or is unavailable
        result = {name: offset.as_dict() for name, offset in {**before, **found}.items()}
        return start if result == start else result

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        """Plan the tasks of a micro-batch."""
        before, after = _read(start), _read(end)
        brokers = self._brokers()
        self._refuse_others(after, brokers)
        news = [name for name, offset in after.items() if not _same(before.get(name), offset)]
        if gone := [name for name in news if name not in brokers]:
            raise NotThisStream(
                f"the next micro-batch has messages of {', '.join(map(repr, gone))}, which the "
                "fleet no longer lists: add it again, or begin with a new checkpoint"
            )
        number = max(1, self._partitions // max(1, len(news)))
        planned = self._each(
            {name: brokers[name] for name in news},
            lambda broker: broker.parts(before.get(broker.name), after[broker.name], number),
            all_of_them=True,
        )
        return [part for name in news for part in planned[name]]

    def commit(self, end: Offsets) -> None:
        """Commit the offsets to the subscription at each broker."""
        offsets, brokers = _read(end), self._brokers()
        followed = {name: brokers[name] for name in offsets if name in brokers}
        self._each(followed, lambda broker: broker.commit(offsets[broker.name]))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition, in a task."""
        # without partitions, Spark creates an empty one
        if isinstance(partition, Part):
            yield from part.read(partition, Query(asked=self._asked))

    def _brokers(self) -> dict[str, Followed]:
        """Return the current brokers; a fleet may grow or shrink."""
        options = self._options
        places = options.brokers()
        for name, broker in places.items():
            known = self._followed.get(name)
            if known is None or known.dsn != broker.dsn:
                self._followed[name] = Followed(
                    name=name,
                    what=f"broker {name!r}" if options.broker else options.what,
                    dsn=broker.dsn,
                    log=options.log,
                    subscription=self._subscription,
                    start=options.start,
                    certain=not isinstance(broker, Candidate),
                )
        return {name: self._followed[name] for name in places}

    def _refuse_others(
        self, offsets: Mapping[str, Offset], brokers: Mapping[str, Followed]
    ) -> None:
        """Reject a checkpoint with unnamed brokers, unless they have left their fleet."""
        fleets = {name.partition("/")[0] for name in brokers if "/" in name}
        fleets |= set(self._options.names)
        missing = [
            name
            for name in offsets
            if name not in brokers and not ("/" in name and name.partition("/")[0] in fleets)
        ]
        if missing:
            raise NotThisStream(
                f"the checkpoint has broker {', '.join(map(repr, missing))}, which the option "
                f"broker does not name, only {', '.join(brokers)}: name all, by their former "
                "names, or begin with a new checkpoint"
            )

    def _limit(self, given: ReadLimit) -> Limit:
        """Return Spark's limit; if Spark asks for a limit, the options' limits apply, too."""
        if isinstance(given, ReadMaxRows):
            return Limit(rows=given.max_rows, bytes=self._options.limit.bytes)
        if isinstance(given, ReadMaxBytes):
            return Limit(rows=self._options.limit.rows, bytes=given.max_bytes)
        return Limit()

    def _served(
        self, before: Mapping[str, Offset], brokers: Mapping[str, Followed], limit: Limit
    ) -> tuple[dict[str, Followed], Limit]:
        """Return the brokers to read next, and the limit for each."""
        if limit.is_none or len(brokers) <= 1:
            return dict(brokers), limit
        news = self._each(
            brokers, lambda broker: broker.has_news(before.get(broker.name), self._end(broker))
        )
        busy = [name for name, has in news.items() if has]
        most = min(len(busy), limit.rows)
        first, self._turn = self._turn, self._turn + most
        turn = {busy[(first + number) % len(busy)] for number in range(most)}
        idle = {name for name, has in news.items() if not has}
        return {n: brokers[n] for n in brokers if n in turn | idle}, limit.share(max(1, most))

    def _end(self, broker: Followed) -> str | None:
        return None if self._until is None else self._until[broker.name]

    def _each(
        self,
        brokers: Mapping[str, Followed],
        action: Callable[[Followed], T],
        *,
        all_of_them: bool = False,
    ) -> dict[str, T]:
        """Call an action at several brokers in parallel; skip unavailable ones, unless all are.

        Skip a database that a fleet lists but that is not a broker, too.
        """
        found: dict[str, T] = {}
        failed: list[Unavailable] = []
        with ThreadPoolExecutor(AT_ONCE, "saf stream") as threads:
            asked = {name: threads.submit(action, broker) for name, broker in brokers.items()}
        for name, answer in asked.items():
            try:
                found[name] = answer.result()
            except Unavailable as error:
                failed.append(error)
                if all_of_them:
                    raise
                log.warning("broker_passed_by", broker=name, error=str(error))
            except SchemaMissing:
                if brokers[name].certain:
                    raise
        if failed and not found:
            raise failed[0]
        return found


def _read(given: Mapping[str, Any]) -> dict[str, Offset]:
    try:
        return {name: Offset.from_dict(offset) for name, offset in given.items()}
    except (TypeError, ValueError):
        raise NotThisStream(
            f"the checkpoint has an offset that is not one of the format saf, {dict(given)}: "
            "begin with a new checkpoint"
        ) from None


def _same(first: Offset | None, other: Offset) -> bool:
    """Return whether two offsets have the same rows."""
    return first is not None and (first.done, first.open, first.position) == (
        *(other.done, other.open),
        other.position,
    )
