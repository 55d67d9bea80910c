"""Transforms: Spark evaluates the functions of `[[transforms]]`, beside the delivery.

Each item of work has a job of one task, in which two workers of Python are at work:

    read the messages of services with a transform -> the functions -> sort by id -> deliver

The delivery reads the batch by itself, as always. It takes what the functions have made of a
message when it sends the message (`saf.engine.transforming`).

If the job fails, the driver finds out why, by evaluating without a delivery. A message that a
function raises for is found by halving; it becomes a dead letter. If the function raises for none,
or for too many, its service's messages wait.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
from psycopg import sql

from saf.database import fetch
from saf.engine.chunks import up_to
from saf.engine.pulse import Pulse
from saf.engine.source import messages
from saf.engine.source_session import SourceSession
from saf.engine.task import BEATS, Task
from saf.engine.transforming import Evaluated, Transforming
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import ConfigurationError, JobFailed, SafError
from saf.routing.matching import SQL
from saf.setaside import parking
from saf.spark import items
from saf.spark.expressions import without_sql
from saf.spark.results import LAST, Asked, Usable, in_order, messages_of, transformed
from saf.spark.session import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MOST = 20
"""For so many messages a function may raise before it is the function's own fault."""
ROUNDS = 5
"""How often an item is run again because of messages that functions raise for."""
PARKED = 10_000
"""How many parked messages are transformed at a time."""
AT_ONCE = 500_000
"""How many messages of a deep backlog are transformed in one job: nothing is delivered before Spark
has sorted what functions make of them, and a driver does not wait for ever."""
BESIDE = (
    "classifiers in SQL are not evaluated where saf.toml has [[transforms]]: write an arrow or "
    "python one"
)


def receipts(work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:
    """Forward items of work whose messages are transformed; return the tasks' receipts."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()

    def run(numbered: tuple[int, Work]) -> list[Receipt]:
        spark.sparkContext.setJobGroup(group, "saf forward", interruptOnCancel=True)
        return Evaluation(spark, *numbered, rules).run()

    at_once = min(len(work), max(1, spark.sparkContext.defaultParallelism))
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return [receipt for some in pool.map(run, enumerate(work)) for receipt in some]


@dataclass
class Evaluation:
    """One item of work, whose messages are transformed and delivered."""

    spark: SparkSession
    number: int
    item: Work
    rules: ForwardingRules
    problems: dict[str, str] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    parked: frozenset[int] = frozenset()
    last: int = LAST
    """The greatest id that this job goes on to."""

    def run(self) -> list[Receipt]:
        """Run the item; if its job fails, that is a problem of its broker.

        Raises:
            Py4JNetworkError: Spark has ended.
        """
        from py4j.protocol import Py4JError, Py4JNetworkError
        from pyspark.errors import PySparkException

        if any(router.kind == SQL for router in self.item.routes.routers):
            self.item = without_sql(self.item, BESIDE)
        try:
            self.parked = self._parked()
            self.last = self._last() if self.item.deep else LAST
            for attempt in range(ROUNDS):
                try:
                    return self._job()
                except Py4JNetworkError:
                    raise  # Spark has ended
                except (Py4JError, PySparkException) as error:
                    if attempt == ROUNDS - 1 or not self._found_fault():
                        raise JobFailed(first_line(error)) from error
        except (SafError, psycopg.Error) as error:
            kind = type(error) if isinstance(error, SafError) else JobFailed
            text = str(error) if isinstance(error, SafError) else self.item.dsn.redact(str(error))
            return [
                Receipt(work=self.number, destination=None, error_kind=kind.__name__, error=text)
            ]
        raise AssertionError

    def _parked(self) -> frozenset[int]:
        """Return which parked messages may go on now: the first of each lane, as many as fit."""
        by_destination: dict[str, list[parking.Backoff]] = {}
        for lane in self.item.waiting:
            if lane.due:
                by_destination.setdefault(lane.destination, []).append(lane)
        if not by_destination:
            return frozenset()
        found: set[int] = set()
        size = 0
        columns: list[str | sql.Composable] = [
            "id",
            "to_service",
            sql.SQL("octet_length(body) AS size"),
        ]
        with self.item.dsn.connect(role="forward", autocommit=True) as source:
            for destination, lanes in by_destination.items():
                for is_found in (False, True):
                    some = [lane for lane in lanes if lane.found is is_found]
                    if not some:
                        continue
                    query = parking.in_lanes(
                        self.item.batch, destination, some, columns, found=is_found
                    )
                    services = sql.Literal([*self.rules.transforms]).as_string(None)
                    of_services = (
                        f"SELECT id, size FROM ({query}) AS p WHERE to_service = ANY ({services}) "
                        f"LIMIT {PARKED - len(found) + 1}"
                    )
                    for id_, bytes_ in fetch(source, of_services.replace("%", "%%"), {}):
                        if found and (len(found) >= PARKED or size > self.rules.chunk_bytes):
                            return frozenset(found)
                        found.add(id_)
                        size += bytes_ or 0
        return frozenset(found)

    def _last(self) -> int:
        """Return the id up to which there are `AT_ONCE` messages with transforms."""
        rows = self.item.batch.rows(["id", "to_service"])
        services = sql.Literal([*self.rules.transforms]).as_string(None)
        query = (
            f"SELECT id FROM ({rows}) AS m WHERE to_service = ANY ({services}) "
            f"ORDER BY id OFFSET {AT_ONCE - 1} LIMIT 1"
        )
        with self.item.dsn.connect(role="forward", autocommit=True) as source:
            return next((int(id_) for (id_,) in fetch(source, query.replace("%", "%%"), {})), LAST)

    def _job(self) -> list[Receipt]:
        usable = self._usable()
        evaluated = Evaluated(
            given={service: one.given for service, one in usable.items()},
            problems=self.problems,
            faults=self.faults,
            parked=self.parked,
        )
        rows = in_order(self.spark, [one.frame for one in usable.values()])
        done = rows.mapInArrow(
            deliver(self.number, self.item, self.rules, evaluated, self.last), "said binary"
        ).collect()
        return [receipt for row in done for receipt in pickle.loads(row.said)]  # noqa: S301 - ours  # nosec B301

    def _usable(self) -> dict[str, Usable]:
        """The services whose function can be used; the others have a problem from now on."""
        found = {}
        for service in self.rules.transforms:
            if service not in self.problems:
                try:
                    found[service] = self._of(service)
                except ConfigurationError as error:
                    self.problems[service] = str(error)
        return found

    def _of(self, service: str, within: tuple[int, int] | None = None) -> Usable:
        asked = Asked(
            item=self.item,
            services=(service,),
            max_bytes=self.rules.max_bytes,
            parked=self.parked,
            but=frozenset(self.faults),
            within=within or (0, self.last),
        )
        whose = f"transform of {service!r}"
        return transformed(messages_of(self.spark, asked), whose, self.rules.transforms[service])

    def _found_fault(self) -> bool:
        """Find out for what functions fail; return whether they do."""
        session = SourceSession(self.item, self.rules.attempts)
        patience = self.item.dsn.bounds.chunk_seconds
        before = len(self.problems) + len(self.faults)
        try:
            session(lambda source: source.execute("SELECT"))
            with Pulse(session.beat, self.item.lease_seconds / BEATS, patience):
                for service in self._usable():
                    self._look_at(service)
        finally:
            session.close()
        return len(self.problems) + len(self.faults) > before

    def _look_at(self, service: str) -> None:
        """Note what a function raises for which messages; or that it fails itself."""
        if self._raised(self._of(service).frame) is None:
            return
        if why := self._raised(self._of(service, within=(LAST, LAST)).frame):
            self.problems[service] = f"its function fails: {why}"
            return
        asked = Asked(
            item=self.item,
            services=(service,),
            max_bytes=self.rules.max_bytes,
            parked=self.parked,
            but=frozenset(self.faults),
            within=(0, self.last),
        )
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

        ends = messages_of(self.spark, asked).select(F.min("id"), F.max("id")).first()
        if ends is None or ends[0] is None:
            return
        found: dict[int, str] = {}
        left = [(int(ends[0]), int(ends[1]))]
        while left and len(found) <= MOST:
            low, high = left.pop()
            why = self._raised(self._of(service, within=(low, high)).frame)
            if why is None:
                continue
            if low == high:
                found[low] = f"its function raises {why}"
                continue
            half = (low + high) // 2
            left += [(half + 1, high), (low, half)]
        if len(found) > MOST:
            why = next(iter(found.values()))
            self.problems[service] = f"its function fails for more than {MOST} messages: {why}"
        else:
            self.faults |= found

    def _raised(self, frame: DataFrame) -> str | None:
        """Return what the evaluation of a DataFrame raises."""
        from py4j.protocol import Py4JError, Py4JNetworkError
        from pyspark.errors import PySparkException
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

        columns = [F.max(F.xxhash64(name)) for name in frame.columns]  # so that all are computed
        try:
            frame.select(*columns).collect()
        except Py4JNetworkError:
            raise  # Spark has ended
        except (Py4JError, PySparkException) as error:
            return first_line(error)
        return None


def deliver(
    number: int, item: Work, rules: ForwardingRules, evaluated: Evaluated, last: int = LAST
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for mapInArrow: results in, receipts out."""

    def task(partition: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from saf.forwarding.runner import bounded

        transforming = Transforming(
            rules.transforms, evaluated, items.unbroken(partition), max_bytes=rules.max_bytes
        )
        running = Task(number, item, rules, transforming=transforming, partly=last < LAST)
        with closing(messages(item, rules.max_bytes)) as rows:
            receipts = bounded(number, item, lambda: running.run(up_to(rows, last)))
        yield pa.RecordBatch.from_pydict({"said": [pickle.dumps(receipts)]})

    return task
