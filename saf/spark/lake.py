"""Streaming into a table of Delta Lake, exactly once, without Delta's jars.

    (messages.writeStream.foreachBatch(saf.spark.to_delta("/data/lake/outbox"))
     .option("checkpointLocation", "/data/lake/checkpoint").start())

Tasks write Parquet files, which no reader sees yet, and report their names. Then the driver adds
all of the files to the table in one commit, which also records the query and the number of the
micro-batch (see `saf.destinations.delta.micro_batches`). A repeated micro-batch is already in the
table. Tasks that run again, or die, leave unused files, which a vacuum of the table removes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pickle import PickleError
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from saf.destinations.delta import Delta
from saf.errors import ConfigurationError, MissingExtra
from saf.telemetry.logger import Log

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

QUERY = "sql.streaming.queryId"

log = Log("saf.lake")


class NotOverConnect(ConfigurationError, PickleError):
    """Options with secrets would go into a plan, which a server of Spark Connect may log.

    A `PickleError`, too, because PySpark replaces other errors raised while it pickles a function.
    """

    def __init__(self) -> None:
        super().__init__(
            "to_delta takes no storage_options over Spark Connect, whose server may write plans "
            "with them to its log: leave them out, and set the client's variables, such as "
            "AWS_ACCESS_KEY_ID, in the environment of the server and of its executors"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class ToDelta:
    """The function that a query calls for each of its micro-batches."""

    settings: Delta
    by: tuple[str, ...]
    application: str | None

    @classmethod
    def of(
        cls, table: str, options: dict[str, str], by: tuple[str, ...], application: str | None
    ) -> ToDelta:
        """Return the function for a table; see `saf.spark.to_delta`."""
        try:
            import deltalake  # noqa: F401 - fail before the query starts if it is missing
        except ImportError:
            raise MissingExtra("delta", "streaming into a Delta table") from None
        try:
            settings = Delta.model_validate({"table": table, "storage_options": options})
        except ValidationError as error:
            raise ConfigurationError(f"to_delta: {error.errors()[0]['msg']}") from None
        return cls(settings=settings, by=by, application=application)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle into a plan, which happens only over Spark Connect.

        Raises:
            NotOverConnect: `storage_options` are set.
        """
        if self.settings.storage_options:
            raise NotOverConnect
        return self.__dict__

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Append a micro-batch, unless it was appended before; see `saf.spark.to_delta`."""
        from pyspark.sql.classic.dataframe import DataFrame as Classic
        from pyspark.sql.pandas.types import to_arrow_schema

        if self.settings.storage_options and not isinstance(batch, Classic):
            raise NotOverConnect  # a function around this one created it at the server

        from saf.destinations.delta.micro_batches import WRITTEN, MicroBatches, heard

        application = self.application or _query(batch)
        table = MicroBatches(self.settings, self.by)
        rows = table.begin(application, number, to_arrow_schema(batch.schema, timezone="UTC"))
        details = {"table": self.settings.table, "query": application, "batch": number}
        if rows is None:
            log.info("appended_already", **details)
            return

        def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return rows.write(batches)

        written = heard(batch.mapInArrow(write, WRITTEN).collect())
        table.commit(application, number, written)


def _query(batch: DataFrame) -> str:
    """Return the id of a micro-batch's query, which the query's checkpoint keeps."""
    from pyspark.errors import PySparkException

    try:
        query = batch.sparkSession.sparkContext.getLocalProperty(QUERY)
    except (PySparkException, AttributeError):  # a session of Spark Connect has no context
        query = None
    if query is None:
        raise ConfigurationError(
            "Spark does not identify the query, as over Spark Connect: give to_delta an "
            "application, a different name for each checkpoint"
        )
    return query
