"""Results: what transforms make of messages, as DataFrames.

A function sees the messages of its service in one DataFrame: ``id``, which tells them apart, the
columns that expressions see (`saf.columns.EXPRESSED`), and ``text``, the body as text. It returns a
DataFrame with ``id`` and ``body``, and what else it changes of `GIVEN`; what it does not give stays
as it was. If it makes several rows of a message, it numbers them in the column ``part``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.columns import EXPRESSED
from saf.engine.source import messages, read
from saf.engine.transforming import GIVEN, RESULT
from saf.engine.work import Work
from saf.errors import ConfigurationError
from saf.log.arrow import OF_SPARK
from saf.routing.routers import imported
from saf.spark.questions import as_seen, as_text
from saf.spark.session import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SEEN = {"id": "long", **EXPRESSED}
"""The columns of messages that a function sees, besides ``text``, with their types in Spark."""
LAST = (1 << 63) - 1
"""Greater than the id of any message."""
CLOCK = re.compile(r"^(Current(Date|Time|Timestamp)|Now|LocalTimestamp)(Like)?$")
SCHEMA = pa.schema([(name, OF_SPARK[kind]) for name, kind in SEEN.items()])
ROW_BY_ROW = ("Project", "Filter", "BatchEvalPython", "ArrowEvalPython")
"""Spark's names for steps that make at most one row of a row, in the same order."""
KINDS = dict(zip(RESULT.names, ("long", "int", *["string"] * 3, "binary", "boolean"), strict=True))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Messages of one item of work that a transform is evaluated for."""

    item: Work
    services: tuple[str, ...]
    max_bytes: int
    """Larger bodies are left out."""
    parked: frozenset[int] = frozenset()
    """Parked messages, by their ids in the outbox."""
    but: frozenset[int] = frozenset()
    """Messages that are left out."""
    within: tuple[int, int] = (0, LAST)
    """The lowest and the highest id."""


@dataclass(frozen=True, kw_only=True)
class Usable:
    """What a function has made of messages, in the columns of `RESULT`."""

    frame: DataFrame
    given: frozenset[str]
    """Which of `GIVEN` the function gives."""
    by_id: bool
    """Whether its rows come in the order of the ids, because the messages do."""


def transformed(messages: DataFrame, whose: str, name: str) -> Usable:
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
        return _usable(said, whose, name)
    except PySparkException as error:  # such as two columns of one name
        raise ConfigurationError(
            f"{whose}: what {name} returns cannot be used: {first_line(error)}"
        ) from error


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
    if why := _changing(said):
        raise ConfigurationError(
            f"{whose}: {name} {why}, which is another one when a batch is read again"
        )
    if isinstance(kinds.get("headers"), MapType):
        said = said.withColumn("headers", F.to_json("headers"))
    columns = [
        (F.col(column) if column in kinds else F.lit(None)).cast(KINDS[column]).alias(column)
        for column in RESULT.names
        if column != "ended"
    ]
    frame = said.select(*columns, F.lit(False).alias("ended"))
    return Usable(
        frame=frame,
        given=frozenset({*GIVEN} & kinds.keys()),
        by_id="part" not in kinds and _row_by_row(frame),
    )


def messages_of(spark: SparkSession, asked: Asked) -> DataFrame:
    """Return messages as a function sees them. A task reads them, when they are asked for.

    The item, with the password of its source, is in the function of this one task: a job is about
    one item, and nobody else gets it.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    schema = ", ".join(f"{name} {kind}" for name, kind in SEEN.items())
    rows = spark.range(0, 1, 1, 1).mapInArrow(_reader(asked), schema)
    return rows.withColumn("text", F.col("body").cast("string"))


def in_order(spark: SparkSession, results: Sequence[Usable], *, at_once: bool) -> DataFrame:
    """Return results as one partition, in the order of ids and parts, and that they have ended.

    ``at_once``: the first ones may come before the last ones are evaluated.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    last = {"id": F.lit(LAST), "ended": F.lit(True)}
    end = spark.range(0, 1, 1, 1).select(
        *(last.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in KINDS.items())
    )
    frames = [one.frame for one in results]
    whole: DataFrame = reduce(lambda some, more: some.union(more), [*frames, end]).coalesce(1)
    if at_once and len(results) == 1 and results[0].by_id:
        return whole
    return whole.sortWithinPartitions("id", "part")


def _reader(asked: Asked) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def task(partition: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in partition:
            pass
        if asked.parked:
            for rows in read(asked.item, _parked(asked)):
                yield as_seen(rows, SCHEMA)
        some = _some(asked, asked.parked | asked.but)
        with closing(messages(asked.item, asked.max_bytes, condition=some)) as batch:
            for rows in batch:
                sent = pc.and_(rows["conversation_id"].is_null(), rows["body"].is_valid())
                yield as_seen(rows.filter(sent), SCHEMA)

    return task


def _some(asked: Asked, but: Collection[int]) -> str:
    """Return the condition for messages that a function is asked about."""
    low, high = asked.within
    return (
        sql.SQL(
            "to_service = ANY ({services}) AND id BETWEEN {low} AND {high} "
            "AND id <> ALL ({but}::bigint[])"
        )
        .format(
            services=sql.Literal([*asked.services]),
            low=sql.Literal(low),
            high=sql.Literal(high),
            but=sql.Literal(sorted(but)),
        )
        .as_string(None)
    )


def _parked(asked: Asked) -> str:
    """Return the query for parked messages."""
    batch = asked.item.batch
    columns = ["id", *(as_text(name, asked.max_bytes) for name in EXPRESSED)]
    parked = sql.SQL(
        "SELECT DISTINCT ON (id) {columns} FROM saf.parked"
        " WHERE subscription_id = {subscription_id} AND id = ANY ({ids}::bigint[])"
    ).format(
        columns=sql.SQL(", ").join(
            sql.Identifier(one) if isinstance(one, str) else one for one in columns
        ),
        subscription_id=sql.Literal(batch.subscription_id),
        ids=sql.Literal(sorted(asked.parked)),
    )
    seen = f"conversation_id IS NULL AND body IS NOT NULL AND {_some(asked, asked.but)}"
    return f"SELECT * FROM ({parked.as_string(None)}) AS m WHERE {seen}"


def _row_by_row(frame: DataFrame) -> bool:
    """Whether Spark makes each row of one row, or drops it, and so keeps the order of messages."""
    jvm: Any = frame._jdf
    node = jvm.queryExecution().optimizedPlan()
    while str(node.getClass().getSimpleName()) in ROW_BY_ROW:
        node = node.children().apply(0)
    names = [str(node.getClass().getSimpleName())]
    names += [
        str(node.children().apply(place).getClass().getSimpleName())
        for place in range(node.children().size())
    ]
    return names == ["MapInArrow", "Range"]  # the messages, as `messages_of` has them


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
