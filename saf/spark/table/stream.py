"""What Spark calls for a stream: where to begin, how far to read, what the tasks do, what is done.

Spark keeps one reader for a running query, in a Python process beside its driver. An offset is a
dict from the names of brokers to what `saf.log.offset.Offset` holds. What Spark asks, and when:

    initialOffset     where a checkpoint without any offset begins; again after a crash before its
                      first micro-batch was complete
    latestOffset      up to where the next micro-batch reads. Spark writes it into its checkpoint
    commit            the end of the micro-batch before, only after that
    partitions        the rows of a micro-batch; after a crash, those in the checkpoint first, which
                      no process of this query may have planned before

So the last micro-batch before a pause is not committed until there is something new. That would
keep its messages from being purged, and look like a stream that hangs. So a pause begins with an
offset that has no new rows but says so (``settled``): Spark makes an empty micro-batch of it, and
commits the one before.

Where a stream has several brokers, one that is unavailable is passed by with a warning, and its
messages come later; if none is available, the query fails. What is wrong with a checkpoint, or was
set back, always fails it.
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
from saf.fleets import Candidate
from saf.log.cuts import NO_LIMIT, Limit
from saf.log.offset import Offset
from saf.logger import Log
from saf.spark.table.options import Options, subscription_of

if TYPE_CHECKING:
    import pyarrow as pa

    from saf.spark.table.followed import Followed

T = TypeVar("T")
Offsets = dict[str, Any]
"""An offset as Spark keeps it: for each broker, what `Offset.as_dict` gives."""

AT_ONCE = 16
"""How many brokers are asked at a time."""

log = Log("saf.stream")


class Stream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The messages of one or many brokers' logs, as they come."""

    def __init__(self, options: Options, asked: StructType, partitions: int) -> None:
        self._options = options
        self._subscription = subscription_of(options)
        self._asked = asked
        self._partitions = partitions
        self._followed: dict[str, Followed] = {}
        self._until: dict[str, str] | None = None
        """Where a run with Trigger.AvailableNow ends, by broker."""
        self._turn = 0

    def initialOffset(self) -> Offsets:  # noqa: N802 - Spark's name
        """Where the subscription is at each broker; it is registered where there is none."""
        found = self._each(self._brokers(), lambda one: one.begin())
        return {name: offset.as_dict() for name, offset in found.items()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """The limit of the options, of which Spark knows one kind at a time."""
        limit = self._options.limit
        if limit.rows != NO_LIMIT:
            return ReadMaxRows(limit.rows)
        return ReadAllAvailable() if limit.bytes == NO_LIMIT else ReadMaxBytes(limit.bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Remember what is complete now: this run reads no further."""
        self._until = self._each(self._brokers(), lambda one: one.now())

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:  # noqa: N802 - Spark's name
        """Open a batch where there is something new, and cut it where a limit asks for that."""
        before, brokers = _read(start), self._brokers()
        self._refuse_others(before, brokers)
        until = self._until
        if until is not None:
            brokers = {name: one for name, one in brokers.items() if name in until}
        served, allowed = self._served(before, brokers, self._limit(limit))
        found = self._each(
            served, lambda one: one.advance(before.get(one.name), self._end(one), allowed)
        )
        # a broker that waits for its turn has something new, or is unavailable
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
            lambda one: one.parts(before.get(one.name), after[one.name], number),
            all_of_them=True,
        )
        return [part for name in news for part in planned[name]]

    def commit(self, end: Offsets) -> None:
        """Move the subscription at each broker."""
        offsets, brokers = _read(end), self._brokers()
        there = {name: brokers[name] for name in offsets if name in brokers}
        self._each(there, lambda one: one.commit(offsets[one.name]))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Give the rows of a partition, in a task."""
        from saf.spark.table import part

        # where there is none, Spark makes an empty one
        if isinstance(partition, part.Part):
            yield from part.read(partition, part.Query(asked=self._asked))

    def _brokers(self) -> dict[str, Followed]:
        """The brokers of now; a fleet may have more than before, or fewer."""
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
        """Refuse a checkpoint of brokers that are not named, unless they have left their fleet."""
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
        """What Spark asks to be kept; where it asks for a limit, those of the options are too."""
        if isinstance(given, ReadMaxRows):
            return Limit(rows=given.max_rows, bytes=self._options.limit.bytes)
        if isinstance(given, ReadMaxBytes):
            return Limit(rows=self._options.limit.rows, bytes=given.max_bytes)
        return Limit()

    def _served(
        self, before: Mapping[str, Offset], brokers: Mapping[str, Followed], limit: Limit
    ) -> tuple[dict[str, Followed], Limit]:
        """Which brokers' messages are read next, and how much of each."""
        if limit.is_none or len(brokers) <= 1:
            return dict(brokers), limit
        news = self._each(brokers, lambda one: one.has_news(before.get(one.name), self._end(one)))
        busy = [name for name, has in news.items() if has]
        most = min(len(busy), limit.rows)
        first, self._turn = self._turn, self._turn + most
        mine = {busy[(first + number) % len(busy)] for number in range(most)}
        quiet = {name for name, has in news.items() if not has}
        return {n: brokers[n] for n in brokers if n in mine | quiet}, limit.share(max(1, most))

    def _end(self, one: Followed) -> str | None:
        return None if self._until is None else self._until[one.name]

    def _each(
        self,
        brokers: Mapping[str, Followed],
        action: Callable[[Followed], T],
        *,
        all_of_them: bool = False,
    ) -> dict[str, T]:
        """Ask several brokers at a time; those that are unavailable are left out, but not all.

        A database that a fleet lists, and that is no broker, is left out too.
        """
        found: dict[str, T] = {}
        failed: list[Unavailable] = []
        with ThreadPoolExecutor(AT_ONCE, "saf stream") as threads:
            asked = {name: threads.submit(action, one) for name, one in brokers.items()}
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
        return {name: Offset.from_dict(one) for name, one in given.items()}
    except (TypeError, ValueError):
        raise NotThisStream(
            f"the checkpoint has an offset that is not one of the format saf, {dict(given)}: "
            "begin with a new checkpoint"
        ) from None


def _same(one: Offset | None, other: Offset) -> bool:
    """Whether two offsets have the same rows."""
    return one is not None and (one.done, one.open, one.position) == (
        *(other.done, other.open),
        other.position,
    )
