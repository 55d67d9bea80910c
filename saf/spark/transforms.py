"""Transforms: Spark evaluates the functions of `[[transforms]]`, beside the delivery.

Each item of work has a job of one task, in which two workers of Python are at work:

    read the messages of services with a transform, by id -> the functions -> deliver

Between the last two, Spark sorts by id what a function has not kept in this order.

The delivery reads the batch by itself, as always. It takes what the functions have made of a
message when it sends the message (`saf.engine.transforming`).

If the job fails, the driver finds out why, by evaluating without a delivery. A message that a
function raises for is found by halving; it becomes a dead letter. If the function raises for none,
or for too many, its service's messages wait.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
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
from saf.log.cursor import lock_cursors
from saf.routing.matching import SQL
from saf.setaside import parking
from saf.spark import items
from saf.spark.expressions import without_sql
from saf.spark.results import LAST, Asked, Usable, in_order, messages_of, needed, transformed
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
"""How many messages of a deep backlog are transformed in one job: where Spark has to sort what
functions make of them, nothing is delivered before, and a driver does not wait for ever."""
BESIDE = (
    "classifiers in SQL are not evaluated where saf.toml has [[transforms]]: write an arrow or "
    "python one"
)


OF_SERVICES = """
SELECT * FROM (
    SELECT p.id, size, coalesce((SELECT o.to_service FROM saf.outbox o
                                 WHERE o.shard = p.shard AND o.id = p.id
                                   AND o.to_service = ANY ({routers})), p.to_service) AS service
    FROM ({in_lanes}) AS p) AS parked
WHERE service = ANY ({services}) LIMIT {most}
"""


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
    parked: dict[str, frozenset[int]] = field(default_factory=dict)
    """For each service, the parked messages that may go on now."""
    last: int = LAST
    """The greatest id that this job goes on to."""
    columns: dict[str, frozenset[str]] = field(default_factory=dict)
    """For each service, the columns of messages that its function needs."""

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
                    self._go_on()
        except (SafError, psycopg.Error) as error:
            kind = type(error) if isinstance(error, SafError) else JobFailed
            text = str(error) if isinstance(error, SafError) else self.item.dsn.redact(str(error))
            return [
                Receipt(work=self.number, destination=None, error_kind=kind.__name__, error=text)
            ]
        raise AssertionError

    def _parked(self) -> dict[str, frozenset[int]]:
        """Return which parked messages may go on now, by service: the first of each lane.

        As many as fit. A message that a router has led on counts for the router, if it was sent to
        one with a transform, and the outbox still has it.
        """
        by_destination: dict[str, list[parking.Backoff]] = {}
        for lane in self.item.waiting:
            if lane.due:
                by_destination.setdefault(lane.destination, []).append(lane)
        if not by_destination:
            return {}
        found: dict[int, str] = {}
        size = 0
        columns: list[str | sql.Composable] = [
            "id",
            "shard",
            "to_service",
            sql.SQL("octet_length(body) AS size"),
        ]
        names = {
            "services": [*self.rules.transforms],
            "routers": [*self._routers],
        }
        given = {name: sql.Literal(some) for name, some in names.items()}
        with self.item.dsn.connect(role="forward", autocommit=True) as source:
            for destination, lanes in by_destination.items():
                for is_found in (False, True):
                    some = [lane for lane in lanes if lane.found is is_found]
                    if not some:
                        continue
                    in_lanes = parking.in_lanes(
                        self.item.batch, destination, some, columns, found=is_found
                    )
                    query = sql.SQL(OF_SERVICES).format(
                        in_lanes=sql.SQL(in_lanes), most=PARKED - len(found) + 1, **given
                    )
                    for id_, bytes_, service in fetch(source, query):
                        if found and (len(found) >= PARKED or size > self.rules.chunk_bytes):
                            return _by_service(found)
                        found[id_] = service
                        size += bytes_ or 0
        return _by_service(found)

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

    def _go_on(self) -> None:
        """Go on after what the job that has failed has delivered."""
        batch = self.item.batch
        with self.item.dsn.connect(role="forward", autocommit=True) as source, source.transaction():
            position = lock_cursors(source, batch)
        self.item = replace(self.item, batch=replace(batch, position=position))

    def _job(self) -> list[Receipt]:
        usable = self._usable()
        evaluated = Evaluated(
            given={service: one.given for service, one in usable.items()},
            problems=self.problems,
            faults=self.faults,
            parked=frozenset[int]().union(*self.parked.values()),
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
        asked = self._asked(service, within)
        if service not in self.columns:
            self.columns[service] = needed(self._made_of(asked).frame)
        return self._made_of(replace(asked, columns=self.columns[service]))

    def _made_of(self, asked: Asked) -> Usable:
        return transformed(
            messages_of(self.spark, asked),
            f"transform of {asked.service!r}",
            self.rules.transforms[asked.service],
            deterministic=asked.service not in self.rules.not_deterministic,
        )

    @property
    def _routers(self) -> frozenset[str]:
        """The routers that have a transform."""
        return frozenset(one.service for one in self.item.routes.routers) & {*self.rules.transforms}

    def _asked(self, service: str, within: tuple[int, int] | None = None) -> Asked:
        return Asked(
            item=self.item,
            service=service,
            max_bytes=self.rules.max_bytes,
            parked=self.parked.get(service, frozenset()),
            all_parked=frozenset[int]().union(*self.parked.values()),
            but=frozenset(self.faults),
            kept=service in self.rules.not_deterministic | self._routers,
            within=within or (0, self.last),
        )

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
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

        ends = (
            messages_of(self.spark, self._asked(service)).select(F.min("id"), F.max("id")).first()
        )
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


def _by_service(found: Mapping[int, str]) -> dict[str, frozenset[int]]:
    services = set(found.values())
    return {one: frozenset(i for i, service in found.items() if service == one) for one in services}


def deliver(
    number: int, item: Work, rules: ForwardingRules, evaluated: Evaluated, last: int = LAST
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for mapInArrow: results in, receipts out."""

    def task(partition: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from saf.forwarding.runner import bounded

        transforming = Transforming.of(item, rules, evaluated, items.unbroken(partition))
        running = Task(number, item, rules, transforming=transforming, partly=last < LAST)
        with closing(messages(item, rules.max_bytes)) as rows:
            receipts = bounded(number, item, lambda: running.run(up_to(rows, last)))
        yield pa.RecordBatch.from_pydict({"said": [pickle.dumps(receipts)]})

    return task
