"""Routing in Spark's own columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from saf.shards import shard_of

if TYPE_CHECKING:
    from pyspark.sql import Column


def shard(key: Column, shards: int) -> Column:
    """The shard of a key column, the same as in SQL and as `saf.shards.shard_of`."""
    return F.udf(lambda text: shard_of(text, shards), "int")(key)
