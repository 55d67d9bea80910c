"""Evaluation: Spark evaluates routers' expressions and `[[transforms]]`, beside the delivery.

Each item of work has a job of one task, in which several workers of Python are at work:

    read the messages that are evaluated, by id -> expressions, functions -> deliver

Between the last two, Spark sorts by number what is not in this order: the results of a function
that has not kept it, and where there are several functions, or functions and expressions. Otherwise
what is evaluated streams into the delivery.

The delivery reads the batch by itself, as always. It takes what was evaluated of a message when it
comes to the message (`saf.engine.in_step`).

If the job fails, the driver finds out why (`saf.spark.faults`). The item is run again without the
messages, functions and expressions at fault, from where the job has got.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa

from saf.engine.chunks import up_to
from saf.engine.in_step import ENDED, LAST, InStep
from saf.engine.pulse import Pulse
from saf.engine.source import messages
from saf.engine.source_session import SourceSession
from saf.engine.task import BEATS, Task
from saf.engine.transforming import Evaluated, Transforming
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import JobFailed, SafError
from saf.log.cursor import lock_cursors
from saf.spark import items
from saf.spark.answers import Answers
from saf.spark.expressions import Compiled, answers_of, compiled_of, with_problems
from saf.spark.faults import note_faults, of_expressions
from saf.spark.plans import keeps_order
from saf.spark.reasons import explain
from saf.spark.session import first_line
from saf.spark.transforms import Transforms, last_at_once, parked_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROUNDS = 5
"""How often an item is run again because of what has failed in it."""


def receipts(
    work: Sequence[items.Numbered],
    rules: ForwardingRules,
    group: str,
    meanwhile: Callable[[], list[Receipt]],
) -> list[Receipt]:
    """Forward items of which something is evaluated; return their receipts and others'.

    ``meanwhile`` runs beside them, and returns the receipts of other items.
    """
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()

    def run(numbered: items.Numbered) -> list[Receipt]:
        number, item = numbered
        spark.sparkContext.setJobGroup(group, "saf forward", interruptOnCancel=True)
        return Evaluation(spark=spark, number=number, item=item, rules=rules).run()

    at_once = min(len(work), max(1, spark.sparkContext.defaultParallelism))
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        evaluated = pool.map(run, work)
        return [*meanwhile(), *(receipt for some in evaluated for receipt in some)]


@dataclass(kw_only=True)
class Evaluation:
    """One item of work, of which something is evaluated, and which is delivered."""

    spark: SparkSession
    number: int
    item: Work
    rules: ForwardingRules
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    """The expressions that are evaluated."""

    def run(self) -> list[Receipt]:
        """Run the item; if its job fails, that is a problem of its broker.

        Raises:
            Py4JNetworkError: Spark has ended.
        """
        try:
            return self._run()
        except (SafError, psycopg.Error) as error:
            kind = type(error) if isinstance(error, SafError) else JobFailed
            text = str(error) if isinstance(error, SafError) else self.item.dsn.redact(str(error))
            return [
                Receipt(work=self.number, destination=None, error_kind=kind.__name__, error=text)
            ]

    def _run(self) -> list[Receipt]:
        from py4j.protocol import Py4JError, Py4JNetworkError
        from pyspark.errors import PySparkException

        transforms = Transforms(
            spark=self.spark,
            item=self.item,
            rules=self.rules,
            parked=parked_of(self.item, self.rules) if self.rules.transforms else {},
            last=last_at_once(self.item, self.rules) if self.rules.transforms else LAST,
        )
        for attempt in range(ROUNDS):
            try:
                self._compile()
                return self._job(transforms)
            except Py4JNetworkError:
                raise  # Spark has ended
            except (Py4JError, PySparkException) as error:
                if attempt == ROUNDS - 1 or not self._found_fault(transforms):
                    raise JobFailed(first_line(error)) from error
        raise AssertionError

    def _compile(self) -> None:
        """Compile the expressions of the routers that have no problem; the others get one."""
        (routes,), self.compiled = compiled_of(self.spark, [self.item.routes])
        self.item = replace(self.item, routes=routes)

    def _job(self, transforms: Transforms) -> list[Receipt]:
        transforms.item = self.item
        usable = transforms.usable()
        evaluated = Evaluated(
            given={service: one.given for service, one in usable.items()},
            problems=transforms.problems,
            faults=transforms.faults,
            parked=frozenset[int]().union(*transforms.parked.values()),
            last=transforms.last,
        )
        frames = [one.frame for one in usable.values()]
        if self.compiled:
            max_bytes, last = self.rules.max_bytes, transforms.last
            frames.append(answers_of(self.spark, self.item, self.compiled, max_bytes, last=last))
        task = deliver(self.number, self.item, self.rules, self.compiled, evaluated)
        (row,) = in_order(self.spark, frames).mapInArrow(task, "said binary").collect()
        receipts, raised = pickle.loads(row.said)  # noqa: S301 - our own bytes  # nosec B301
        explain(self.spark, self.item, raised)
        return list(receipts)

    def _found_fault(self, transforms: Transforms) -> bool:
        """Find out for what functions and expressions fail; return whether they do."""
        session = SourceSession(self.item, self.rules.attempts)
        patience = self.item.dsn.bounds.chunk_seconds
        try:
            session(lambda source: source.execute("SELECT"))
            with Pulse(session.beat, self.item.lease_seconds / BEATS, patience):
                found = note_faults(transforms)
                problems = of_expressions(
                    self.spark, self.item, self.compiled, self.rules.max_bytes
                )
            position = session(lambda source: lock_cursors(source, self.item.batch))
        finally:
            session.close()
        # it goes on after what the job that has failed has delivered
        self.item = replace(
            self.item,
            batch=replace(self.item.batch, position=position),
            routes=with_problems(self.item.routes, problems),
        )
        return found or bool(problems)


def in_order(spark: SparkSession, frames: Sequence[DataFrame]) -> DataFrame:
    """Return what is evaluated as one partition, in the order of the numbers, with its last row.

    Messages are read in this order. Spark sorts what has not kept it, before anything goes on.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    end = spark.range(0, 1, 1, 1).select(
        F.lit(LAST).alias("id"),
        F.lit(True).alias(ENDED),
    )
    whole = reduce(lambda some, more: some.unionByName(more, True), [*frames, end]).coalesce(1)
    streams = not frames or (len(frames) == 1 and keeps_order(frames[0]))
    return whole if streams else whole.sortWithinPartitions("id")


def deliver(
    number: int,
    item: Work,
    rules: ForwardingRules,
    compiled: Mapping[str, Compiled],
    evaluated: Evaluated,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for mapInArrow: what is evaluated in, receipts out."""

    def task(partition: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from saf.forwarding.runner import bounded

        in_step = InStep(items.unbroken(partition))
        answers = Answers(item.broker, in_step, compiled) if compiled else None
        transforming = Transforming.of(item, rules, evaluated, in_step)
        running = Task(number, item, rules, answers, transforming, partly=evaluated.last < LAST)
        with closing(messages(item, rules.max_bytes)) as rows:
            receipts = bounded(number, item, lambda: running.run(up_to(rows, evaluated.last)))
        said = pickle.dumps((receipts, answers.raised if answers else []))
        yield pa.RecordBatch.from_pydict({"said": [said]})

    return task
