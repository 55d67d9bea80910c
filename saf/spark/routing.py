"""Routing as DataFrame transformations: DataFrame in, DataFrame out, in parallel at the source."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING
from uuid import UUID

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from saf.shards import shard_of
from saf.spark.columns import OPTIONAL
from saf.ways import Named, Routes, Way

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from saf.spark.work import Work


def route(messages: DataFrame, work: Sequence[Work], ways: Sequence[Way]) -> DataFrame:
    """Add the column ``route``: which of ``ways`` the message goes, or NULL.

    Each batch follows the routes that it was opened with. Where all share the same, as most
    runs do, no row is asked which batch it is from.
    """
    index = {way: number for number, way in enumerate(ways)}
    by_routes: dict[Routes, list[int]] = {}
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


def _first_match(routes: Routes, index: dict[Way, int]) -> Column:
    """A CASE over what routes name, the most specific first; the first that matches ends it."""
    choice = F.lit(None).cast("int")
    for named in sorted(routes.ways, key=_specificity):
        number = F.lit(index[routes.ways[named]])
        condition = _condition(named)
        choice = number if condition is None else F.when(condition, number).otherwise(choice)
    return choice


def _specificity(named: Named) -> tuple[bool, bool]:
    service, broker = named
    return service is not None, broker is not None


def _condition(named: Named) -> Column | None:
    service, broker = named
    conditions = []
    if service is not None:
        conditions.append(F.col("to_service") == F.lit(service))
    if broker is not None:
        conditions.append(optional("to_broker") == F.lit(UUID(broker).bytes))
    return reduce(lambda one, other: one & other, conditions) if conditions else None


def optional(name: str) -> Column:
    """One of `saf.spark.columns.OPTIONAL`, in PostgreSQL's binary form."""
    return F.get("packed", F.lit([*OPTIONAL].index(name)))


def shard(key: Column, shards: int) -> Column:
    """The shard of a key column, the same as in SQL and as `saf.shards.shard_of`."""
    return F.udf(lambda text: shard_of(text, shards), "int")(key)
