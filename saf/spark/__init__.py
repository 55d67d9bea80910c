"""What imports Spark: sessions, their JVM and workers, the runner, classifiers in SQL, tables.

It needs the extra ``forwarder``. What forwards an item of work is in `saf.engine`, which knows no
Spark.

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

    It also lets Spark hand filters to data sources in Python, which it does not by itself. Over
    Spark Connect, it asks the cluster by a small job which saf it has.

    Raises:
        MissingExtra: pyspark, pyarrow or ADBC is not installed.
        ConfigurationError: the Python of the cluster has another saf, or none.
    """
    from saf.spark.registering import register as registered

    registered(spark)


def to_delta(
    table: str,
    *,
    partition_by: Sequence[str] = (),
    application: str | None = None,
    storage_options: Mapping[str, str] = NO_OPTIONS,
) -> Callable[[DataFrame, int], None]:
    """Return what ``foreachBatch`` takes to append each micro-batch to a Delta table exactly once.

    The table is a folder that all tasks reach, or an address such as ``s3://bucket/table``; it is
    made at the first micro-batch. Each one is a commit, with its number as an application
    transaction of the query's id. Columns that come later are added to the table. Within a
    micro-batch, rows are in no order.

    ``application`` stands in place of the query's id. Over Spark Connect, where that is not known,
    it is needed: a name that no other query and no other checkpoint has used with this table.
    ``storage_options`` are for deltalake's client of an object store; tasks get them, too. Over
    Spark Connect they are refused: there, the environment of the server and of its executors says
    what they would say.

    The query fails if the table lacks micro-batches before, because it was removed or restored.

    Raises:
        MissingExtra: deltalake is not installed.
        ConfigurationError: this is no place for a table.
    """
    from saf.spark.lake import to_delta as into

    return into(
        table, partition_by=partition_by, application=application, storage_options=storage_options
    )
