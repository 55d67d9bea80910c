"""Reading: messages as a DataFrame, for Spark to evaluate in step with the delivery.

One task of a job reads the messages when they are needed: by COPY into Arrow, and from there into
Spark. The item of work, with the password of its source, is in this task's function. A job is about
one item, so no other task gets it; and Spark shows nothing of a function but its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
from psycopg import sql

from saf.columns import EXPRESSED
from saf.engine.source import read
from saf.engine.work import Work
from saf.limits import KEPT
from saf.log.arrow import OF_SPARK
from saf.log.columns import bounded

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

READER = "MapInArrow"
"""Step of Spark's plan that reads messages."""


def messages_of(
    spark: SparkSession, item: Work, kinds: Mapping[str, str], queries: Iterable[str]
) -> DataFrame:
    """Return the rows of queries at an item's source, one query after the other, in one partition.

    ``kinds`` are the Spark types of the columns, by name.
    """
    schema = pa.schema([(name, OF_SPARK[kind]) for name, kind in kinds.items()])
    queries = [*queries]

    def reader(partition: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in partition:
            pass
        for query in queries:
            for rows in read(item, query):
                columns = dict(zip(rows.schema.names, rows.columns, strict=True))
                yield pa.RecordBatch.from_arrays(
                    [columns[field.name].cast(field.type) for field in schema], schema=schema
                )

    given = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    return spark.range(0, 1, 1, 1).mapInArrow(reader, given)


def as_spark_sees(
    names: Iterable[str], max_bytes: int, log: str | None = None
) -> list[str | sql.Composable]:
    """Return the select list for columns of `EXPRESSED`: ids and JSON as text, no large body.

    The columns come from a ``log``, or from elsewhere, such as parked messages.
    """
    kept = KEPT.format(log=log) if log else "false"
    return [_as_text(name, max_bytes, kept) for name in EXPRESSED if name in names]


def _as_text(name: str, max_bytes: int, kept: str) -> str | sql.Composable:
    if (column := bounded(name, max_bytes, kept)) != name:
        return column
    if EXPRESSED[name] == "string":
        return sql.SQL("{0}::text AS {0}").format(sql.Identifier(name))
    return name
