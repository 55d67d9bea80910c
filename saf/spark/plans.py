"""DataFrames of messages: how Spark reads the messages, and what its plans reveal of the results.

`messages_of` gives Spark messages to evaluate in step with the delivery. One task of a job reads
them when they are needed: by COPY into Arrow, and from there into Spark. The item of work, with the
password of its source, is in this task's function. A job is about one item, so no other task gets
it; and Spark shows nothing of a function but its name.

Spark's plan of a DataFrame shows what the function that built it does: which columns it reads
(`columns_read`), whether it keeps the order of the messages (`keeps_order`), and whether its result
changes with each evaluation (`changing`). None of these evaluates the DataFrame. If a plan hides
what it was built from, `columns_read` returns None, and `keeps_order` returns False.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from psycopg import sql

from saf.columns import EXPRESSED
from saf.database import pinned
from saf.engine.source import read
from saf.engine.work import Work
from saf.limits import KEPT
from saf.log.columns import OF_SPARK, bounded

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

READER = "MapInArrow"
"""Step of Spark's plan that reads messages."""
IN_ORDER = {READER, "Range", "Project", "Filter", "Generate", "ArrowEvalPython", "BatchEvalPython"}
"""Steps that work row by row."""
HIDING = {"InMemoryRelation", "LogicalRDD"}
"""Steps that hide what they were built from."""

CLOCK = re.compile(r"^(Current(Date|Time|Timestamp)|Now|LocalTimestamp)(Like)?$")


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


def columns_read(frame: DataFrame) -> frozenset[str] | None:
    """Return the message columns that a result depends on; None if that is hard to tell."""
    found: set[int] = set()
    read: dict[int, str] = {}
    for node in nodes(_of(frame).optimizedPlan()):
        kind = kind_of(node)
        if kind in HIDING or node.subqueries().size():
            return None
        if kind == READER and kind_of(node.child()) == "Range":
            read |= {
                attribute.exprId().id(): str(attribute.name()) for attribute in items(node.output())
            }
        else:
            found |= {attribute.exprId().id() for attribute in items(node.references().toSeq())}
    return frozenset(name for number, name in read.items() if number in found)


def keeps_order(frame: DataFrame) -> bool:
    """Return whether a result is in the order of its messages: all steps work row by row."""
    kinds = [kind_of(node) for node in nodes(_of(frame).optimizedPlan())]
    return kinds.count(READER) == 1 and {*kinds} <= IN_ORDER


def changing(frame: DataFrame) -> str | None:
    """Return the part of a DataFrame that changes with each evaluation; None if nothing does."""
    plan = _of(frame).analyzed()
    if not plan.deterministic():
        return "has a random number, or another value that Spark calls not deterministic"
    left = [plan]
    while left:
        node = left.pop()
        if CLOCK.match(kind := kind_of(node)):
            return f"asks for the time ({kind})"
        left += items(node.children())
        if ".expressions." not in str(node.getClass().getName()):  # a plan
            left += items(node.expressions())
    return None


def nodes(tree: Any) -> Iterator[Any]:
    """Yield a plan, or an expression, and all of its parts."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        left += items(node.children())


def items(of_scala: Any) -> Iterator[Any]:
    """Yield the items of a Scala sequence."""
    return (of_scala.apply(place) for place in range(of_scala.size()))


def kind_of(node: Any) -> str:
    """Return the class of a part of a plan or an expression, without its package."""
    return str(node.getClass().getName()).rpartition(".")[2]


def _of(frame: DataFrame) -> Any:
    return pinned.jvm_frame(frame).queryExecution()
