"""What imports Spark: sessions, their JVM and workers, the runner, classifiers in SQL, tables.

It needs the extra ``forwarder``. What forwards an item of work is in `saf.engine`, which knows no
Spark.

    saf.spark.register(spark)
    messages = spark.read.format("saf").option("broker", "shop").option("log", "outbox").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Let a session read outboxes and inboxes by the format ``saf``; see docs/spark.md.

    It also lets Spark hand filters to data sources in Python, which it does not by itself.

    Raises:
        MissingExtra: pyspark, pyarrow or ADBC is not installed.
    """
    from saf.spark.registering import register as registered

    registered(spark)
