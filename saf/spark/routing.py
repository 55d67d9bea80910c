"""Columns of Spark over messages, for what transforms them between `source` and `delivery`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from saf.shards import shard_of
from saf.spark.columns import OPTIONAL

if TYPE_CHECKING:
    from pyspark.sql import Column


def optional(name: str) -> Column:
    """One of `saf.spark.columns.OPTIONAL`, in PostgreSQL's binary form."""
    return F.get("packed", F.lit([*OPTIONAL].index(name)))


def shard(key: Column, shards: int) -> Column:
    """The shard of a key column, the same as in SQL and as `saf.shards.shard_of`."""
    return F.udf(lambda text: shard_of(text, shards), "int")(key)
