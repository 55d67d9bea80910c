"""Transforms, as an application would have them in a module of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

import saf


def masked(messages: DataFrame) -> DataFrame:
    """The body without the last digits of a card; everything else stays."""
    hidden = f.regexp_replace("text", '"card":"([0-9]{4})[0-9]*"', '"card":"$1…"')
    return messages.select("id", hidden.alias("body"))


def enriched(messages: DataFrame) -> DataFrame:
    """With the name of the customer, from a table; the key and the headers are others."""
    customers = messages.sparkSession.read.parquet(os.environ["CUSTOMERS"])
    joined = messages.withColumn("customer", f.get_json_object("text", "$.customer"))
    joined = joined.join(customers, "customer", "left")
    return joined.select(
        "id",
        f.to_json(f.struct("customer", "name")).alias("body"),
        f.col("customer").alias("key"),
        f.create_map(f.lit("from"), f.lit("a join")).alias("headers"),
    )


def to_audit(message: saf.Received) -> str:
    """A classifier: the service that the first line names, or audit."""
    first = message.text().partition("\n")[0]
    return first if first == "else" else "audit"


def even(messages: DataFrame) -> DataFrame:
    """Those with an even number."""
    return messages.where("CAST(text AS INT) % 2 = 0")


def split(messages: DataFrame) -> DataFrame:
    """A message for each line of one."""
    return messages.select("*", f.posexplode(f.split("text", "\n")).alias("part", "line")).select(
        "id", "part", f.col("line").alias("body")
    )


def unnumbered(messages: DataFrame) -> DataFrame:
    """The same, without numbers."""
    return split(messages).drop("part")


def number(messages: DataFrame) -> DataFrame:
    """The number that a body is, plus one; raises for a text."""
    return messages.withColumn("body", (f.col("text").cast("int") + 1).cast("string"))


def labelled(messages: DataFrame) -> DataFrame:
    """The body as the headers, too."""
    return messages.select("id", "body", f.col("text").alias("headers"))


def turned(messages: DataFrame) -> DataFrame:
    """All as they are, the last one first: by a step that Spark cannot look into."""

    def turn(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from reversed([one.take(pa.array(range(len(one))[::-1])) for one in batches])

    return messages.select("id", "key", "body").mapInArrow(turn, "id long, key string, body binary")


def told_of(messages: DataFrame) -> DataFrame:
    """What a message says of itself, in a column of another name, beside a list of all keys."""
    both = f.concat_ws(
        " ", f.col("message_type"), f.get_json_object("headers", "$.a"), f.col("text")
    )
    return messages.withColumn("said", both).select("id", f.col("said").alias("body"))


def in_twos(messages: DataFrame) -> DataFrame:
    """Each with its key, by a join with itself."""
    keys = messages.select(f.col("id").alias("other"), f.col("key").alias("of"))
    joined = messages.join(keys, f.col("id") == f.col("other"))
    return joined.select("id", f.concat("of", "text").alias("body"))


def nothing(messages: DataFrame) -> DataFrame:
    return messages.where("false")


def drawn(messages: DataFrame) -> DataFrame:
    return messages.withColumn("body", f.rand().cast("string"))


def coin(messages: DataFrame) -> DataFrame:
    """Every other one, by chance, with a number and a key that nobody knows before."""
    drawn = messages.withColumn("key", f.rand().cast("string"))
    return drawn.where("rand() < 0.5").select("id", "key", f.rand().cast("string").alias("body"))


def dated(messages: DataFrame) -> DataFrame:
    return messages.withColumn("body", f.current_timestamp().cast("string"))


def raises(messages: DataFrame) -> DataFrame:  # noqa: ARG001 - whatever it is given
    raise ValueError("no such table")


def no_id(messages: DataFrame) -> DataFrame:
    return messages.select("body")


def two_ids(messages: DataFrame) -> DataFrame:
    return messages.alias("one").join(messages.alias("two"), f.expr("one.id = two.id"))


def told(messages: DataFrame) -> DataFrame:
    """As `number`, once the environment says so."""
    if os.environ.get("TOLD") != "yes":
        raise ValueError("not told yet")
    return number(messages)
