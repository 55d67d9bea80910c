"""Expressions: the classifiers in SQL, which Spark itself evaluates.

A run without any has nothing to do with this. With one, what the expressions refer to, of the
messages for routers alone, is read once more, before the task that delivers them and beside it:

    numbers -> read (mapInArrow) -> the expressions -> deliver (mapInArrow)

and the answers stream into the delivery in the order of the ids, as batches never change. All steps
are narrow: partition, task and item of work are one.

An expression sees the columns of a message (`saf.columns`), ``text``, the body as text, and
``json``, the body as a VARIANT, NULL if it is none. It sees them as the message was sent, also if
another router came first. It gives the name of a service, or a struct with the fields service, and
optionally broker and key. Where it fails it gives NULL, because Spark would otherwise fail the task
for one message; an expression that cannot be is a problem of its router.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import TYPE_CHECKING

from saf.columns import EXPRESSED
from saf.engine.work import Work
from saf.routing.matching import SQL
from saf.spark.questions import OF_NONE, PLACE, questions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DERIVED = {"text": "CAST(body AS STRING)", "json": "try_parse_json(CAST(body AS STRING))"}
FIELDS = ("service", "broker", "key")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """An expression that Spark understands."""

    safe: str
    """In UTF-8, and NULL instead of a failure."""
    structured: bool
    """It gives the JSON of a struct, and not just a name."""
    columns: frozenset[str]
    """What it may refer to."""
    number: int = 0

    @property
    def column(self) -> str:
        """Where its answers are."""
        return f"answer_{self.number}"


def compiled_for(
    spark: SparkSession, work: Sequence[Work]
) -> tuple[list[Work], dict[str, Compiled]]:
    """The work, with the problems of its routers in SQL; and by expression what is evaluated."""
    wanted = {
        router.expression for item in work for router in item.routes.routers if router.kind == SQL
    }
    found = {expression: _compiled(spark, expression) for expression in sorted(wanted)}
    usable = {e: one for e, one in found.items() if isinstance(one, Compiled)}
    problems = {e: one for e, one in found.items() if isinstance(one, str)}
    numbered = {e: replace(one, number=n) for n, (e, one) in enumerate(usable.items())}
    return [_with_problems(item, problems) for item in work], numbered


def evaluated(
    numbers: DataFrame, work: Sequence[Work], compiled: Mapping[str, Compiled], max_bytes: int
) -> DataFrame:
    """The answers to the messages of each item of work, a partition each."""
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    columns = frozenset[str]().union(*(one.columns for one in compiled.values()))
    kinds = PLACE | {name: kind for name, kind in EXPRESSED.items() if name in columns}
    schema = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    numbered = {expression: one.number for expression, one in compiled.items()}
    rows = numbers.mapInArrow(questions(work, numbered, kinds, max_bytes), schema)
    if "body" in columns:
        rows = rows.withColumns({name: F.expr(text) for name, text in DERIVED.items()})
    each = [(one.number, one.column, F.expr(one.safe)) for one in compiled.values()]
    if len(each) == 1:
        answers = [answer.alias(column) for _, column, answer in each]
    else:
        asked, nothing = F.col("asked"), F.lit(None).cast("binary")
        own = reduce(lambda o, one: F.when(asked == one[0], one[2]).otherwise(o), each, nothing)
        rows = rows.withColumn("own", own)
        # the others only where a router hands on to another one
        text = F.col("own").cast("string")
        named = F.coalesce(F.get_json_object(text, "$.service"), text)
        handed_on = named.isin(*{one.service for item in work for one in item.routes.routers})
        answers = [
            F.when(asked == number, F.col("own"))
            .when((asked == OF_NONE) | handed_on, answer)
            .alias(column)
            for number, column, answer in each
        ]
    return rows.select("id", "parked_id", *answers)


def _with_problems(item: Work, problems: Mapping[str, str]) -> Work:
    routers = tuple(
        replace(router, problem=f"router {router.service!r}: {problems[router.expression]}")
        if router.kind == SQL and router.expression in problems
        else router
        for router in item.routes.routers
    )
    return replace(item, routes=replace(item.routes, routers=routers)) if problems else item


@lru_cache(maxsize=1024)
def _compiled(spark: SparkSession, expression: str) -> Compiled | str:
    """The expression, or why it is none."""
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
    from pyspark.sql.types import StringType, StructType

    schema = ", ".join(f"{name} {kind}" for name, kind in EXPRESSED.items())
    rows = spark.createDataFrame([], schema)
    rows = rows.withColumns({name: F.expr(text) for name, text in DERIVED.items()})
    try:
        kind = rows.select(F.expr(expression).alias("answer")).schema["answer"].dataType
        if isinstance(kind, StructType) and not {"service"} <= set(kind.names) <= set(FIELDS):
            return f"a struct has the fields {', '.join(FIELDS)}, and not {', '.join(kind.names)}"
        text = expression if isinstance(kind, StringType) else f"CAST(({expression}) AS STRING)"
        text = f"to_json({expression})" if isinstance(kind, StructType) else text
        safe = f"try_to_binary({text}, 'utf-8')"
        plan = rows.select(F.expr(safe))._jdf.queryExecution().analyzed().toString()
    except PySparkException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"Spark does not understand {expression!r}: {lines[0] if lines else error}"
    if re.search(r"^\W*Window ", plan, re.MULTILINE):
        return f"{expression!r} looks at other messages, of which a task has only some"
    words = set(re.findall(r"\w+", expression.lower()))
    columns = set(EXPRESSED) if "*" in expression else words & set(EXPRESSED)
    if words & set(DERIVED):
        columns.add("body")
    return Compiled(
        safe=safe,
        structured=isinstance(kind, StructType),
        columns=frozenset(columns),
    )
