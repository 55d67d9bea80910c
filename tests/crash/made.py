"""Transforms of rounds: what they make of a message ``account count token rest``, by Spark.

Each row that they make is ``account count token part of draw rest``. `tests.crash.transforms` says
in plain Python what has to come of that. Spark's workers import this, so it imports little.

- Of each seventh count nothing is made, unless it is poison, which has to be rejected.
- Of each fifth count two rows are made, and one of the others.
- What is drawn, ``draw``, is by chance, and says how many rows there are: so it has to be the same
  in all of them, and whenever the message is stored again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as f

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

NOT_DRAWN = "-"
TWICE_FROM = "8"
"""A draw is a hexadecimal number; of one that begins with this or more, two rows are made."""


def computed(messages: DataFrame) -> DataFrame:
    """The same whenever it is asked."""
    twice = f.split("text", " ")[1].cast("int") % 5 == 0
    return _rows(_kept(messages), f.lit(NOT_DRAWN), twice)


def drawn(messages: DataFrame) -> DataFrame:
    """Another one each time."""
    with_draw = _kept(messages).withColumn("draw", f.expr("uuid()"))
    return _rows(with_draw, f.col("draw"), f.col("draw") >= TWICE_FROM)


def joined(messages: DataFrame) -> DataFrame:
    """What is computed, by way of a join, which keeps no order: so Spark sorts."""
    ids = messages.select(f.col("id").alias("other"))
    both = messages.join(ids, f.col("id") == f.col("other"))
    return computed(both)


def _kept(messages: DataFrame) -> DataFrame:
    seventh = f.split("text", " ")[1].cast("int") % 7 == 0
    return messages.where(~seventh | f.col("text").contains("poison"))


def _rows(messages: DataFrame, draw: Column, twice: Column) -> DataFrame:
    words = f.split("text", " ", 4)
    parts = f.when(twice, f.array(f.lit(0), f.lit(1))).otherwise(f.array(f.lit(0)))
    exploded = messages.withColumn("of", f.size(parts)).withColumn("part", f.explode(parts))
    return exploded.select(
        "id",
        "part",
        f.concat_ws(
            " ", words[0], words[1], words[2], f.col("part"), f.col("of"), draw, words[3]
        ).alias("body"),
    )
