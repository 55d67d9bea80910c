"""What Spark runs: one job a cycle, and in it one task for each item of work.

The driver imports this and no Arrow, which takes longer than most runs have work; Spark SQL, with a
session, is for runs with routers in SQL alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from saf.spark.work import Policy, Receipt, Work
from saf.ways import SQL

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext

    from saf.spark.answers import Answers
    from saf.spark.expressions import Compiled


def forward(spark: SparkContext, work: Sequence[Work], policy: Policy) -> list[Receipt]:
    """Forward all items of work, each by a task; all that comes back is receipts."""
    if any(router.kind == SQL for item in work for router in item.routes.routers):
        return _beside_answers(work, policy)
    numbers = spark.parallelize(range(len(work)), len(work))
    return numbers.mapPartitions(_by_number(work, policy)).collect()


def _beside_answers(work: Sequence[Work], policy: Policy) -> list[Receipt]:
    from pyspark.sql import SparkSession

    from saf.spark.expressions import compiled_for, evaluated
    from saf.spark.receipts import RECEIPT_SCHEMA

    session = SparkSession.builder.getOrCreate()  # on the context that there is
    work, compiled = compiled_for(session, work)
    answers = session.range(0, len(work), 1, len(work))
    if compiled:
        answers = evaluated(answers, work, compiled, policy.max_bytes)
    receipts = answers.mapInArrow(_by_answers(work, policy, compiled), RECEIPT_SCHEMA)
    return [Receipt(**row.asDict()) for row in receipts.collect()]


def _by_number(
    work: Sequence[Work], policy: Policy
) -> Callable[[Iterable[int]], Iterator[Receipt]]:
    """The function for mapPartitions: numbers of items of work in, receipts out.

    The items travel inside the function, because they hold passwords and Spark shows its plans;
    each pickled by itself, because a task needs only its own of what may be thousands.
    """
    pickled = [pickle.dumps(item) for item in work]

    def task(numbers: Iterable[int]) -> Iterator[Receipt]:
        for number in numbers:
            yield from _deliver(number, pickled[number], policy)

    return task


def _by_answers(
    work: Sequence[Work], policy: Policy, compiled: Mapping[str, Compiled]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for mapInArrow: answers of routers in SQL in, receipts out."""
    pickled = [pickle.dumps(item) for item in work]
    asked = [any(router.expression in compiled for router in one.routes.routers) for one in work]
    brokers = [item.broker for item in work]

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext  # exists inside a task only

        from saf.spark.answers import Answers
        from saf.spark.receipts import as_arrow

        context = TaskContext.get()
        assert context is not None  # noqa: S101 - for the type checker
        # the pipeline is narrow, so the partition's number is that of the item
        number = context.partitionId()
        answers = Answers(brokers[number], batches, compiled) if asked[number] else None
        yield as_arrow(_deliver(number, pickled[number], policy, answers))

    return task


def _deliver(
    number: int, pickled: bytes, policy: Policy, answers: Answers | None = None
) -> list[Receipt]:
    from saf.spark.delivery import Delivery
    from saf.spark.source import messages

    item: Work = pickle.loads(pickled)  # noqa: S301 - our own bytes
    return Delivery(number, item, policy, answers).run(messages(item, policy.max_bytes))
