"""The classes that Spark calls: the format ``saf``, and the reader of one scan.

Streams are in `stream`, and writers in `sink`.

Spark calls them in its own Python processes: one that creates the data source and asks for its
schema, one that plans a scan, and those of the tasks. Each gets a pickled copy, which contains no
secrets: only a partition has a dsn, and Spark passes a partition to its own task only.

Spark plans a scan once for each run of a query, at its first action; the scan's tasks may then be
retried as often as Spark likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from saf.errors import ConfigurationError
from saf.spark.table import outgoing
from saf.spark.table.options import (
    Options,
    for_sink,
    options_of,
    refuse_for_batch,
    refuse_for_stream,
)
from saf.spark.table.query import Condition, Query, check_schema, condition, schema_of, shards_of

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

    from saf.spark.table.sink import Batch, Epochs
    from saf.spark.table.stream import Stream

FORMAT = "saf"
SLOTS = 8
"""Default number of partitions if the number of parallel tasks is unknown."""


class Messages(DataSource):
    """The messages of a broker's outbox or inbox."""

    slots = SLOTS
    """Default number of partitions of a read."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return all columns of the log."""
        options = options_of(self.options)
        return schema_of(options.log, several=options.several)

    def reader(self, schema: StructType) -> Scan:
        """Return the reader of a scan."""
        options = options_of(self.options)
        refuse_for_batch(options)
        check_schema(options.log, schema)
        return Scan(options, schema, options.partitions or self.slots)

    def streamReader(self, schema: StructType) -> Stream:  # noqa: N802 - Spark's name
        """Return the reader of a stream."""
        from saf.spark.table.stream import Stream

        options = options_of(self.options)
        refuse_for_stream(options)
        check_schema(options.log, schema)
        return Stream(options, schema, options.partitions or self.slots)

    def writer(self, schema: StructType, overwrite: bool) -> Batch:
        """Return the writer of a DataFrame."""
        from saf.spark.table.sink import Batch, Outgoing

        options = for_sink(self.options, stream=False)
        outgoing.check_columns(schema)
        if overwrite:
            raise ConfigurationError(
                'an outbox is append-only: nothing in it can be overwritten, use mode("append")'
            )
        to = Outgoing(what=options.what, dsn=options.dsn())
        return Batch(to, options.application, options.version)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Epochs:  # noqa: N802 - Spark's
        """Return the writer of a stream."""
        from saf.spark.table.sink import Epochs, Outgoing

        options = for_sink(self.options, stream=True)
        outgoing.check_columns(schema)
        if overwrite:
            raise ConfigurationError('an outbox is append-only: use outputMode("append")')
        return Epochs(Outgoing(what=options.what, dsn=options.dsn()), options.application)


class Scan(DataSourceReader):
    """One scan of a log, in one snapshot."""

    def __init__(self, options: Options, asked: StructType, partitions: int) -> None:
        self._options = options
        self._asked = asked
        self._partitions = partitions
        self._conditions: tuple[Condition, ...] = ()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Store filters that the database can apply; return the others."""
        asked = [(given, condition(given)) for given in filters]
        self._conditions = tuple(pushed for _, pushed in asked if pushed is not None)
        return [given for given, pushed in asked if pushed is None]

    def partitions(self) -> Sequence[InputPartition]:
        """Take the snapshot, and divide the shards and the files of an archive evenly."""
        from saf.spark.table.archived import Archived, Log, plan
        from saf.spark.table.part import Part, take

        options = self._options
        dsn = options.dsn()
        broker = options.broker or f"${options.dsn_from}"
        left: list[Archived] = []

        def look(connection: psycopg.Connection[Any]) -> None:
            if options.archive is not None:
                log = Log.of(connection, options.log)
                left.extend(plan(options.archive, broker, log, self._conditions, self._partitions))

        now = take(options.what, dsn, options.log, look)
        shards = shards_of(self._conditions, now.shards)
        parts = [
            Part(
                what=options.what,
                broker=broker,
                dsn=dsn,
                batch=batch,
                storage=now.storage,
                # a few shards of many are found by the index
                deep=now.deep and len(shards) == now.shards,
            )
            for batch in now.batch(shards).split(self._partitions)
        ]
        return [*parts, *left]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition, in a task."""
        from saf.spark.table import archived, part

        query = Query(asked=self._asked, conditions=self._conditions)
        # if no shard can have rows, there are no partitions, and Spark creates an empty one
        if isinstance(partition, part.Part):
            yield from part.read(partition, query)
        elif isinstance(partition, archived.Archived):
            yield from archived.read(partition, query)


def with_slots(number: int) -> type[Any]:
    """Return the data source with ``number`` partitions by default.

    It is a separate class because Spark creates the instances, in processes that do not know how
    many tasks run in parallel. No importable module contains it, so pickle copies the whole class.
    """
    return type("Messages", (Messages,), {"slots": number, "__module__": "__main__"})
