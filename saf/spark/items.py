"""Items of work on their way to the tasks of a job, each to its own only.

They hold the passwords of their sources. So they are neither in a plan, which Spark shows, nor in a
function, which goes to every task: an item is what is in its task's own partition.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from saf.engine.work import Work

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

ITEM = "item"
"""The column that an item is in: of a partition's first row, and of no other."""

Numbered = tuple[int, Work]
"""An item, and the number that its receipts call it by."""


def partitions(numbered: Sequence[Numbered]) -> list[bytes]:
    """What is in the partition of each item."""
    return [pickle.dumps(one) for one in numbered]


def opened(handed: bytes) -> Numbered:
    """What `partitions` has packed."""
    number, item = pickle.loads(handed)  # noqa: S301 - our own bytes
    return number, item


def rows(spark: SparkSession, numbered: Sequence[Numbered]) -> DataFrame:
    """A partition for each item, with one row."""
    packed = spark.sparkContext.parallelize(partitions(numbered), len(numbered))
    return spark.createDataFrame(packed.map(lambda one: (bytearray(one),)), f"{ITEM} binary")


def taken(batches: Iterator[pa.RecordBatch]) -> tuple[bytes, Iterator[pa.RecordBatch]]:
    """The packed item of a partition, and what else is in it."""
    first = next(batches)

    def rest() -> Iterator[pa.RecordBatch]:
        if first.num_rows > 1:
            yield first.slice(1)
        yield from batches

    return first[ITEM][0].as_py(), rest()
