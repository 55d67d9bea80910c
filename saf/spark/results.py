"""Results: what transforms make of messages, as DataFrames.

A function sees the messages of its service in one DataFrame: ``id``, which tells them apart, the
columns that expressions see (`saf.columns.EXPRESSED`), and ``text``, the body as text. It returns a
DataFrame with ``id`` and ``body``, and what else it changes of `GIVEN`; what it does not give stays
as it was. If it makes several rows of a message, it numbers them in the column ``part``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from psycopg import sql

from saf.columns import EXPRESSED
from saf.engine.source import read
from saf.engine.transforming import GIVEN, RESULT
from saf.engine.work import Work
from saf.errors import ConfigurationError
from saf.log.arrow import OF_SPARK
from saf.routing.routers import imported
from saf.spark.questions import as_text
from saf.spark.session import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SEEN = {"id": "long", **EXPRESSED}
"""The columns of messages that a function sees, besides ``text``, with their types in Spark."""
LAST = (1 << 63) - 1
"""Greater than the id of any message."""
CLOCK = re.compile(r"^(Current(Date|Time|Timestamp)|Now|LocalTimestamp)(Like)?$")
READER = "MapInArrow"
"""The step of a plan that reads messages, unless a function has such a step itself."""
IN_ORDER = {READER, "Range", "Project", "Filter", "Generate", "ArrowEvalPython", "BatchEvalPython"}
"""Steps that go row by row."""
HIDING = {"InMemoryRelation", "LogicalRDD"}
"""Steps that do not say what they were made of."""
KINDS = dict(zip(RESULT.names, ("long", "int", *["string"] * 3, "binary", "boolean"), strict=True))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Messages of one item of work that a transform is evaluated for."""

    item: Work
    service: str
    max_bytes: int
    """Larger bodies are left out."""
    parked: frozenset[int] = frozenset()
    """Parked messages, by their ids in the outbox, whomever they are addressed to by now."""
    all_parked: frozenset[int] = frozenset()
    """The parked messages of all services: they are not read with the batch."""
    but: frozenset[int] = frozenset()
    """Messages that are left out."""
    kept: bool = False
    """Whether results are kept: messages that have some are left out."""
    within: tuple[int, int] = (0, LAST)
    """The lowest and the highest id."""
    columns: frozenset[str] = frozenset(SEEN)
    """Those of `SEEN` that are read; the others are NULL."""


@dataclass(frozen=True, kw_only=True)
class Usable:
    """What a function has made of messages, in the columns of `RESULT`."""

    frame: DataFrame
    given: frozenset[str]
    """Which of `GIVEN` the function gives."""


def transformed(
    messages: DataFrame, whose: str, name: str, *, deterministic: bool = True
) -> Usable:
    """Call the function of a transform.

    Raises:
        ConfigurationError: it cannot be imported, raises, or returns what cannot be used.
    """
    from pyspark.errors import PySparkException

    function = imported(whose, name)
    try:
        said = function(messages)
    except Exception as error:
        said = f"raises {type(error).__name__}: {first_line(error)}"
        raise ConfigurationError(f"{whose}: {name} {said}") from error
    try:
        usable = _usable(said, whose, name)
    except PySparkException as error:  # such as two columns of one name
        raise ConfigurationError(
            f"{whose}: what {name} returns cannot be used: {first_line(error)}"
        ) from error
    if deterministic and (why := _changing(said)):
        raise ConfigurationError(
            f"{whose}: {name} {why}, which is another one when a batch is read again: say "
            "`deterministic = false` in saf.toml, and what it makes is kept before it is sent"
        )
    return usable


def _usable(said: Any, whose: str, name: str) -> Usable:
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
    from pyspark.sql.types import BinaryType, IntegralType, MapType, StringType

    if not isinstance(said, DataFrame):
        raise ConfigurationError(
            f"{whose}: {name} returns a {type(said).__name__}, and no DataFrame"
        )
    kinds = {field.name: field.dataType for field in said.schema}
    allowed: dict[str, tuple[type, ...]] = {
        "id": (IntegralType,),
        "part": (IntegralType,),
        "headers": (StringType, MapType),
        "body": (BinaryType, StringType),
    }
    for column in ("id", "body"):
        if column not in kinds:
            raise ConfigurationError(
                f"{whose}: {name} gives no column {column}, only {', '.join(kinds) or 'none'}"
            )
    for column in {"part", *GIVEN, "id"} & kinds.keys():
        if not isinstance(kinds[column], allowed.get(column, (StringType,))):
            raise ConfigurationError(
                f"{whose}: {name} gives a column {column} of the type "
                f"{kinds[column].simpleString()}"
            )
    if isinstance(kinds.get("headers"), MapType):
        said = said.withColumn("headers", F.to_json("headers"))
    columns = [
        (F.col(column) if column in kinds else F.lit(None)).cast(KINDS[column]).alias(column)
        for column in RESULT.names
        if column != "ended"
    ]
    frame = said.select(*columns, F.lit(False).alias("ended"))
    return Usable(frame=frame, given=frozenset({*GIVEN} & kinds.keys()))


def messages_of(spark: SparkSession, asked: Asked) -> DataFrame:
    """Return messages as a function sees them. A task reads them, when they are asked for.

    The item, with the password of its source, is in the function of this one task: a job is about
    one item, and nobody else gets it.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    kinds = _kinds(asked)
    schema = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    rows = spark.range(0, 1, 1, 1).mapInArrow(_reader(asked), schema)
    rows = rows.select(
        *(
            (F.col(name) if name in kinds else F.lit(None).cast(kind)).alias(name)
            for name, kind in SEEN.items()
        )
    )
    return rows.withColumn("text", F.col("body").cast("string"))


def in_order(spark: SparkSession, frames: Sequence[DataFrame]) -> DataFrame:
    """Return results as one partition, in the order of the ids, and that they have ended.

    Messages are read in this order. Spark sorts what has not kept it, before anything goes on.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    last = {"id": F.lit(LAST), "ended": F.lit(True)}
    end = spark.range(0, 1, 1, 1).select(
        *(last.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in KINDS.items())
    )
    whole: DataFrame = reduce(lambda some, more: some.union(more), [*frames, end])
    whole = whole.coalesce(1)
    return (
        whole if len(frames) == 1 and keeps_order(frames[0]) else whole.sortWithinPartitions("id")
    )


def _reader(asked: Asked) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    schema = pa.schema([(name, OF_SPARK[kind]) for name, kind in _kinds(asked).items()])

    def task(partition: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in partition:
            pass
        for query in _queries(asked):
            for rows in read(asked.item, query):
                columns = dict(zip(rows.schema.names, rows.columns, strict=True))
                yield pa.RecordBatch.from_arrays(
                    [columns[field.name].cast(field.type) for field in schema], schema=schema
                )

    return task


def _queries(asked: Asked) -> Iterator[str]:
    """Give the queries for parked messages, and for those of the batch."""
    batch = asked.item.batch
    names = {*asked.columns, "conversation_id", "to_service", "body"}  # rows are chosen by these
    columns = ["id", *(as_text(name, asked.max_bytes) for name in EXPRESSED if name in names)]
    select = sql.SQL("SELECT {} FROM ").format(
        sql.SQL(", ").join(map(sql.Identifier, _kinds(asked)))
    )
    low, high = asked.within
    some = sql.SQL(
        ") AS m WHERE conversation_id IS NULL AND body IS NOT NULL"
        " AND id BETWEEN {low} AND {high} AND id <> ALL ({but}::bigint[])"
    ).format(low=sql.Literal(low), high=sql.Literal(high), but=sql.Literal(sorted(asked.but)))
    if asked.kept:
        some += sql.SQL(
            " AND NOT EXISTS (SELECT FROM saf.kept_result k"
            " WHERE k.subscription_id = {} AND k.id = m.id)"
        ).format(sql.Literal(batch.subscription_id))
    if asked.parked:
        parked = sql.SQL(
            "(SELECT DISTINCT ON (id) {columns} FROM saf.parked"
            " WHERE subscription_id = {subscription_id} AND id = ANY ({ids}::bigint[])"
        ).format(
            columns=sql.SQL(", ").join(
                sql.Identifier(one) if isinstance(one, str) else one for one in columns
            ),
            subscription_id=sql.Literal(batch.subscription_id),
            ids=sql.Literal(sorted(asked.parked)),
        )
        yield (select + parked + some + sql.SQL(" ORDER BY id")).as_string(None)
    new = sql.SQL(
        " AND to_service = {service} AND id <> ALL ({parked}::bigint[]) ORDER BY id"
    ).format(service=sql.Literal(asked.service), parked=sql.Literal(sorted(asked.all_parked)))
    yield (select + sql.SQL(f"({batch.rows(columns)}") + some + new).as_string(None)


def _kinds(asked: Asked) -> dict[str, str]:
    return {name: kind for name, kind in SEEN.items() if name in asked.columns}


def needed(frame: DataFrame) -> frozenset[str]:
    """Return which columns of messages a result depends on; all of them if that is hard to tell."""
    jvm: Any = frame._jdf
    found: set[int] = set()
    read: dict[int, str] = {}
    for node in _nodes(jvm.queryExecution().optimizedPlan()):
        kind = _kind(node)
        if kind in HIDING or node.subqueries().size():
            return frozenset(SEEN)
        if kind == READER and _kind(node.child()) == "Range":
            read |= {one.exprId().id(): str(one.name()) for one in _items(node.output())}
        else:
            found |= {one.exprId().id() for one in _items(node.references().toSeq())}
    return frozenset(name for number, name in read.items() if number in found) | {"id"}


def keeps_order(frame: DataFrame) -> bool:
    """Whether a result is in the order in which its messages are read: all steps are row by row."""
    jvm: Any = frame._jdf
    kinds = [_kind(node) for node in _nodes(jvm.queryExecution().optimizedPlan())]
    return kinds.count(READER) == 1 and {*kinds} <= IN_ORDER


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    for child in _items(plan.children()):
        yield from _nodes(child)


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _items(of_scala: Any) -> Iterator[Any]:
    return (of_scala.apply(place) for place in range(of_scala.size()))


def _changing(frame: DataFrame) -> str | None:
    """Return what a DataFrame has that is another one whenever it is asked; None if nothing."""
    jvm: Any = frame._jdf
    plan = jvm.queryExecution().analyzed()
    if not plan.deterministic():
        return "has a random number, or another value that Spark calls not deterministic"
    left = [plan]
    while left:
        node = left.pop()
        kind = str(node.getClass().getSimpleName())
        if CLOCK.match(kind):
            return f"asks for the time ({kind})"
        left += [node.children().apply(place) for place in range(node.children().size())]
        if _is_plan(node):
            found = node.expressions()
            left += [found.apply(place) for place in range(found.size())]
    return None


def _is_plan(node: Any) -> bool:
    """Whether a node of a plan has expressions: it is a plan, and no expression itself."""
    return ".expressions." not in str(node.getClass().getName())
