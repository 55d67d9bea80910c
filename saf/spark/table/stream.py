"""The class that Spark calls for a stream: start, next offset, partitions and commits.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from saf.errors import NotThisStream, SchemaMissing, Unavailable
from saf.log.offset import NO_LIMIT, Limit, Offset
from saf.operating.places import Candidate
from saf.spark.table.options import Options, subscription_of
from saf.telemetry.logger import Log

if TYPE_CHECKING:
    import pyarrow as pa

    from saf.spark.table.followed import Followed

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
        from saf.spark.table import part

        # without partitions, Spark creates an empty one
        if isinstance(partition, part.Part):
            yield from part.read(partition, part.Query(asked=self._asked))

    def _brokers(self) -> dict[str, Followed]:
        """Return the current brokers; a fleet may grow or shrink."""
        from saf.spark.table.followed import Followed

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
