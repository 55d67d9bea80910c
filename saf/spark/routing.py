"""Routing as DataFrame transformations: DataFrame in, DataFrame out, in parallel at the source."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING
from uuid import UUID

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from saf.routes import Route
from saf.shards import shard_of
from saf.spark.columns import OPTIONAL

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from saf.spark.work import Work


def distinct_routes(work: Sequence[Work]) -> list[Route]:
    """All routes of the run, each once: the column ``route`` holds an index into it."""
    return list(dict.fromkeys(route for item in work for route in item.routes))


def route(messages: DataFrame, work: Sequence[Work], routes: Sequence[Route]) -> DataFrame:
    """Add the column ``route``: which of ``routes`` the message takes, or NULL.

    Each batch follows the routes that it was opened with. Where all share the same, as most
    runs do, no row is asked which batch it is from.
    """
    index = {route: number for number, route in enumerate(routes)}
    by_routes: dict[tuple[Route, ...], list[int]] = {}
    for number, item in enumerate(work):
        by_routes.setdefault(item.routes, []).append(number)
    if len(by_routes) == 1:
        choice = _first_match(next(iter(by_routes)), index)
    else:
        choice = F.coalesce(
            *(
                F.when(F.spark_partition_id().isin(numbers), _first_match(frozen, index))
                for frozen, numbers in by_routes.items()
            )
        )
    return messages.withColumn("route", choice)


def _first_match(routes: Sequence[Route], index: dict[Route, int]) -> Column:
    """A CASE over routes in order of precedence; the first that matches everything ends it."""
    choice = F.lit(None).cast("int")
    for item in reversed(routes):
        number = F.lit(index[item])
        condition = _condition(item)
        choice = number if condition is None else F.when(condition, number).otherwise(choice)
    return choice


def _condition(item: Route) -> Column | None:
    conditions = []
    if item.service is not None:
        conditions.append(F.col("to_service") == F.lit(item.service))
    if item.broker is not None:
        conditions.append(optional("to_broker") == F.lit(UUID(item.broker).bytes))
    return reduce(lambda one, other: one & other, conditions) if conditions else None


def optional(name: str) -> Column:
    """One of `saf.spark.columns.OPTIONAL`, in PostgreSQL's binary form."""
    return F.get("packed", F.lit([*OPTIONAL].index(name)))


def shard(key: Column, shards: int) -> Column:
    """The shard of a key column, the same as in SQL and as `saf.shards.shard_of`."""
    return F.udf(lambda text: shard_of(text, shards), "int")(key)
