"""Evaluation: Spark evaluates routers' expressions and `[[transforms]]`, beside the delivery.

Each item of work is a job of one task, which uses several Python workers:

    read the messages to evaluate, by id -> expressions, functions -> deliver

Before the last step, Spark sorts by number any results that are out of order: those of a function
that did not keep the order, and results of several functions, or of functions and expressions.
Otherwise, results stream into the delivery.

The delivery always reads the batch itself. When it comes to a message, it takes the results for
this message (`saf.engine.in_step`).

If the job fails, the driver finds out why (`saf.spark.faults`). It runs the item again from where
the job stopped, without the messages, functions and expressions at fault.
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
"""Maximum number of runs of one item; after a failure, the item runs again."""


def receipts(
    work: Sequence[items.Numbered],
    rules: ForwardingRules,
    group: str,
    meanwhile: Callable[[], list[Receipt]],
) -> list[Receipt]:
    """Forward items that need evaluation; return their receipts and those of ``meanwhile``.

    ``meanwhile`` runs at the same time, and returns the receipts of other items.
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
        return [*meanwhile(), *(receipt for part in evaluated for receipt in part)]


@dataclass(kw_only=True)
class Evaluation:
    """One item of work that needs evaluation, with its delivery."""

    spark: SparkSession
    number: int
    item: Work
    rules: ForwardingRules
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    """The expressions to evaluate."""

    def run(self) -> list[Receipt]:
        """Run the item; report a failed job as a problem of its broker.

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
        """Compile expressions of routers that have no problem; set a problem where this fails."""
        (routes,), self.compiled = compiled_of(self.spark, [self.item.routes])
        self.item = replace(self.item, routes=routes)

    def _job(self, transforms: Transforms) -> list[Receipt]:
        transforms.item = self.item
        usable = transforms.usable()
        evaluated = Evaluated(
            given={service: result.given for service, result in usable.items()},
            problems=transforms.problems,
            faults=transforms.faults,
            parked=frozenset[int]().union(*transforms.parked.values()),
            last=transforms.last,
        )
        frames = [result.frame for result in usable.values()]
        if self.compiled:
            max_bytes, last = self.rules.max_bytes, transforms.last
            frames.append(answers_of(self.spark, self.item, self.compiled, max_bytes, last=last))
        task = deliver(self.number, self.item, self.rules, self.compiled, evaluated)
        (row,) = in_order(self.spark, frames).mapInArrow(task, "said binary").collect()
        receipts, raised = pickle.loads(row.said)  # noqa: S301 - our own bytes  # nosec B301
        explain(self.spark, self.item, raised)
        return list(receipts)

    def _found_fault(self, transforms: Transforms) -> bool:
        """Find the messages for which functions and expressions fail; return whether any do."""
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
        # continue after the messages that the failed job has delivered
        self.item = replace(
            self.item,
            batch=replace(self.item.batch, position=position),
            routes=with_problems(self.item.routes, problems),
        )
        return found or bool(problems)


def in_order(spark: SparkSession, frames: Sequence[DataFrame]) -> DataFrame:
    """Return the results as one partition, ordered by number, and end it with the last row.

    The delivery reads messages in this order. If results are out of order, Spark sorts all of them
    before the delivery starts.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    end = spark.range(0, 1, 1, 1).select(
        F.lit(LAST).alias("id"),
        F.lit(True).alias(ENDED),
    )
    whole = reduce(lambda rows, more: rows.unionByName(more, True), [*frames, end]).coalesce(1)
    streams = not frames or (len(frames) == 1 and keeps_order(frames[0]))
    return whole if streams else whole.sortWithinPartitions("id")


def deliver(
    number: int,
    item: Work,
    rules: ForwardingRules,
    compiled: Mapping[str, Compiled],
    evaluated: Evaluated,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for mapInArrow: results in, receipts out."""

    def task(partition: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from saf.forwarding.runner import bounded

        in_step = InStep(items.unbroken(partition))
        answers = Answers(item.broker, in_step, compiled) if compiled else None
        transforming = Transforming.of(item, rules, evaluated, in_step)
        running = Task(number, item, rules, answers, transforming, partly=evaluated.last < LAST)
        with closing(messages(item, rules.max_bytes)) as rows:
            receipts = bounded(number, item, lambda: running.run(up_to(rows, evaluated.last)))
        data = pickle.dumps((receipts, answers.raised if answers else []))
        yield pa.RecordBatch.from_pydict({"said": [data]})

    return task
