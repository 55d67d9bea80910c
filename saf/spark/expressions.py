"""Expressions: the classifiers in SQL, which Spark itself evaluates.

A run without such classifiers skips all of this. With them, an extra step reads the messages for
routers once more, with only the columns that the expressions use. It runs ahead of the delivering
task, in parallel:

    read (mapInArrow) -> the expressions -> deliver (mapInArrow)

The answers stream into the delivery in the order of the ids, because batches never change. Answers
about parked messages come first (`saf.engine.in_step`).

An expression sees the columns of a message (`saf.columns`); ``text``, the body as text; and
``json``, the body as a VARIANT, or NULL if the body is not valid JSON. The values are those of the
message as sent, even if another router came first. The expression returns the name of a service, or
a struct with the field service, and optionally broker and key. `saf.spark.rowwise` defines which
expressions are allowed. A forbidden expression, or one that Spark does not understand, is a problem
of its router, and the router's messages wait.

If an expression raised for one message, Spark would fail the task for all. So Spark evaluates a
safe form of the expression: it returns NULL where the expression raises, and an empty text where
the expression returns nothing. Spark keeps no reason for the NULL; `saf.spark.reasons` finds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

from psycopg import sql

from saf.columns import EXPRESSED
from saf.engine.in_step import ENDED, LAST
from saf.engine.work import Work
from saf.routing.matching import SQL, Router, Routes
from saf.setaside import parking
from saf.spark.reading import as_spark_sees, messages_of
from saf.spark.rowwise import refusal, refusal_of_analyzed
from saf.spark.session import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DERIVED = {"text": "CAST(body AS STRING)", "json": "try_parse_json(CAST(body AS STRING))"}
OF_NONE = -1
"""Number for routers without an expression."""
FIELDS = ("service", "broker", "key")
QUOTED = 500
"""Maximum length, in characters, of an expression quoted in an error."""
REFUSED = "{expression} is refused: {why}. Say another one by `saf router add`, or disable it"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """An expression that Spark understands."""

    text: str
    """SQL text that returns the expression's answer, or raises."""
    safe: str
    """SQL text that returns the answer in UTF-8: empty if the expression returns nothing, NULL if
    it raises.
    """
    structured: bool
    """True if the answer is the JSON of a struct, False if it is just a name."""
    columns: frozenset[str]
    """The columns that the expression may refer to."""
    number: int = 0

    @property
    def column(self) -> str:
        """Name of the column with the expression's answers."""
        return f"answer_{self.number}"


def compiled_of(
    spark: SparkSession, all_routes: Sequence[Routes]
) -> tuple[list[Routes], dict[str, Compiled]]:
    """Compile the expressions of routes.

    Return the routes, with problems set on their routers in SQL, and the compiled expressions by
    text.
    """
    wanted = {
        router.expression
        for routes in all_routes
        for router in routes.in_sql
        if router.problem is None
    }
    found = {expression: _compiled(spark, expression) for expression in sorted(wanted)}
    usable = {e: one for e, one in found.items() if isinstance(one, Compiled)}
    problems = {e: one for e, one in found.items() if isinstance(one, str)}
    numbered = {e: replace(one, number=n) for n, (e, one) in enumerate(usable.items())}
    return [with_problems(routes, problems) for routes in all_routes], numbered


def answers_of(
    spark: SparkSession,
    item: Work,
    compiled: Mapping[str, Compiled],
    max_bytes: int,
    *,
    last: int = LAST,
    only: str | None = None,
) -> DataFrame:
    """Return the answers for messages to an item's routers, with the messages' numbers.

    Messages with ids after ``last`` get no answers. With ``only``, answer only for messages to
    routers with this expression.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    routers = [entry for entry in item.routes.routers if only in (None, entry.expression)]
    columns = frozenset[str]().union(*(entry.columns for entry in compiled.values()))
    kinds = {"id": "long"} | {name: kind for name, kind in EXPRESSED.items() if name in columns}
    asked = []
    if len(compiled) > 1:
        kinds["asked"] = "int"
        asked.append(_asked(routers, compiled))
    selected = columns | {"to_service"}
    condition = f"to_service = ANY ({sql.Literal([r.service for r in routers]).as_string(None)})"
    queries = [
        f"SELECT {', '.join(kinds)} FROM ({messages}) AS m "
        f"WHERE {condition} AND id <= {last} ORDER BY id"
        for messages in (
            *_parked(item, [*as_spark_sees(selected, max_bytes), *asked]),
            item.batch.rows(["id", *as_spark_sees(selected, max_bytes, item.batch.log), *asked]),
        )
    ]
    rows = messages_of(spark, item, kinds, queries)
    if "body" in columns:
        rows = with_derived(rows)
    answer_columns = [
        (entry.number, entry.column, F.expr(entry.safe)) for entry in compiled.values()
    ]
    if len(answer_columns) == 1:
        answers = [answer.alias(column) for _, column, answer in answer_columns]
    else:
        own = reduce(
            lambda o, entry: F.when(F.col("asked") == entry[0], entry[2]).otherwise(o),
            answer_columns,
            F.lit(None).cast("binary"),
        )
        rows = rows.withColumn("own", own)
        # the other columns are needed only if a router passes a message on to another router
        text = F.col("own").cast("string")
        named = F.coalesce(F.get_json_object(text, "$.service"), text)
        handed_on = named.isin(*{entry.service for entry in item.routes.routers})
        answers = [
            F.when(F.col("asked") == number, F.col("own"))
            .when((F.col("asked") == OF_NONE) | handed_on, answer)
            .alias(column)
            for number, column, answer in answer_columns
        ]
    return rows.select("id", F.lit(None).cast("boolean").alias(ENDED), *answers)


def _asked(routers: Sequence[Router], compiled: Mapping[str, Compiled]) -> sql.Composable:
    """Return the column with the number of the expression of each message's router."""
    of = [compiled[r.expression].number if r.expression in compiled else OF_NONE for r in routers]
    return sql.SQL("({}::int[])[array_position({}::text[], to_service)] AS asked").format(
        sql.Literal(of), sql.Literal([router.service for router in routers])
    )


def _parked(item: Work, columns: Sequence[str | sql.Composable]) -> Iterator[str]:
    """Yield the query for parked messages that are due, by number; nothing if none are due."""
    lanes = [lane for lane in item.waiting if lane.due and not lane.destination]
    if lanes:
        yield parking.in_lanes(item.batch, "", lanes, [sql.SQL("-parked_id AS id"), *columns])


def without_sql(item: Work, problem: str) -> Work:
    """Return the item with this problem set on all of its routers in SQL."""
    problems = {router.expression: problem for router in item.routes.in_sql}
    return replace(item, routes=with_problems(item.routes, problems))


def with_problems(routes: Routes, problems: Mapping[str, str]) -> Routes:
    """Return the routes, with problems set on routers in SQL, looked up by expression."""
    if not problems:
        return routes
    routers = tuple(
        replace(router, problem=f"router {router.service!r}: {problems[router.expression]}")
        if router.kind == SQL and not router.problem and router.expression in problems
        else router
        for router in routes.routers
    )
    return replace(routes, routers=routers)


def with_derived(rows: DataFrame) -> DataFrame:
    """Add the columns that expressions see besides those of a message."""
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    return rows.withColumns({name: F.expr(text) for name, text in DERIVED.items()})


@lru_cache(maxsize=1024)
def _compiled(spark: SparkSession, expression: str) -> Compiled | str:
    """Compile an expression; return the reason if that fails."""
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        return _understood(spark, expression)
    except Py4JNetworkError:
        raise  # Spark has ended
    except (PySparkException, Py4JError) as error:
        return f"Spark does not understand {quoted(expression)}: {first_line(error)}"


def quoted(expression: str) -> str:
    """Return an expression, shortened if necessary, for an error."""
    return f"{expression!r:.{QUOTED}}"


def _understood(spark: SparkSession, expression: str) -> Compiled | str:
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
    from pyspark.sql.types import StringType, StructType

    if why := refusal(spark, expression, {*EXPRESSED, *DERIVED}):
        return REFUSED.format(expression=quoted(expression), why=why)
    schema = ", ".join(f"{name} {kind}" for name, kind in EXPRESSED.items())
    rows = with_derived(spark.createDataFrame([], schema))
    answers = rows.select(F.expr(expression).alias("answer"))
    if why := refusal_of_analyzed(_analyzed(answers), _analyzed(rows)):
        return REFUSED.format(expression=quoted(expression), why=why)
    kind = answers.schema["answer"].dataType
    if isinstance(kind, StructType) and not {"service"} <= set(kind.names) <= set(FIELDS):
        return f"a struct has the fields {', '.join(FIELDS)}, and not {', '.join(kind.names)}"
    text = f"(\n{expression}\n)"  # it may end with a comment
    if isinstance(kind, StructType):
        text = f"to_json{text}"
    elif not isinstance(kind, StringType):
        text = f"CAST({text} AS STRING)"
    safe = f"try_to_binary(coalesce({text}, ''), 'utf-8')"
    rows.select(F.expr(safe))
    words = set(re.findall(r"\w+", expression.lower()))
    columns = set(EXPRESSED) if "*" in expression else words & set(EXPRESSED)
    if words & set(DERIVED):
        columns.add("body")
    return Compiled(
        text=text,
        safe=safe,
        structured=isinstance(kind, StructType),
        columns=frozenset(columns),
    )


def _analyzed(rows: DataFrame) -> Any:
    jvm: Any = rows._jdf
    return jvm.queryExecution().analyzed()
