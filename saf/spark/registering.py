"""Registering the data source ``saf`` with a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saf.spark.session import require_packages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession) -> None:
    """Register the data source; see `saf.spark.register`."""
    require_packages()
    from pyspark.errors import PySparkException

    from saf.spark.remote import slots as asked
    from saf.spark.table.source import with_slots

    try:
        slots = spark.sparkContext.defaultParallelism
    except (PySparkException, AttributeError):  # a session of Spark Connect has no context
        slots = asked(spark)
    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(with_slots(slots))
