"""Everything that imports Spark: sessions, runner, SQL classifiers, tables.

The package needs the extra ``forwarder``. The code that forwards an item of work is in
`saf.engine`, which does not import Spark.

    saf.spark.register(spark)
    messages = spark.read.format("saf").option("broker", "shop").option("log", "outbox").load()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["register", "to_delta"]

NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


def register(spark: SparkSession) -> None:
    """Let a session read outboxes and inboxes by the format ``saf``; see docs/spark.md.

    Also allow Spark to pass filters to data sources in Python, which is off by default. Over Spark
    Connect, run a small job to ask the cluster for its version of saf.

    Raises:
        MissingExtra: pyspark, pyarrow or ADBC is not installed.
        ConfigurationError: the Python of the cluster has another version of saf, or lacks saf.
    """
    from saf.spark.session import require_packages

    require_packages()
    from pyspark.errors import PySparkException

    from saf.spark.remote import slots as asked
    from saf.spark.table.source import with_slots

    try:
        slots = spark.sparkContext.defaultParallelism
    except (PySparkException, AttributeError):  # a session of Spark Connect has no context
        slots = asked(spark)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(with_slots(slots))


def to_delta(
    table: str,
    *,
    partition_by: Sequence[str] = (),
    application: str | None = None,
    storage_options: Mapping[str, str] = NO_OPTIONS,
) -> Callable[[DataFrame, int], None]:
    """Return a ``foreachBatch`` function that appends micro-batches to a Delta table exactly once.

    The table is a folder that all tasks can reach, or an address such as ``s3://bucket/table``. The
    first micro-batch creates it. Each micro-batch is one commit, which stores the micro-batch's
    number as an application transaction under the query's id. New columns are added to the table.
    Rows within a micro-batch have no order.

    ``application`` replaces the query's id. It is required over Spark Connect, where that id is
    unknown: a name that no other query and no other checkpoint has used with this table.
    ``storage_options`` configure deltalake's client of an object store; tasks get them, too. They
    are rejected over Spark Connect: set the same values in the environment of the server and its
    executors.

    The query fails if earlier micro-batches are missing from the table (removed or restored).

    Raises:
        MissingExtra: deltalake is not installed.
        ConfigurationError: the address cannot hold a table.
    """
    from saf.spark.lake import ToDelta

    return ToDelta.of(table, dict(storage_options), tuple(partition_by), application)
