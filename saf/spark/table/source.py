"""What Spark calls: the format ``saf``, and the reader of one scan.

Streams are in `stream`, and writers in `sink`.

Spark does so in Python processes of its own: one that makes the data source and asks for its
schema, one that plans a scan, and those of the tasks. Each of them gets a pickled copy. What is in
it is no secret: only a partition holds a dsn, and Spark hands each to its task alone.

A scan is planned once for each run of a query, when its first action comes; its tasks may then
be tried again as often as Spark likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from saf.errors import ConfigurationError
from saf.spark.table import fields, outgoing
from saf.spark.table.filters import Condition, condition, shards_of
from saf.spark.table.options import (
    Options,
    for_sink,
    options_of,
    refuse_for_batch,
    refuse_for_stream,
)
from saf.spark.table.sink import Batch, Epochs, Outgoing
from saf.spark.table.stream import Stream

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

FORMAT = "saf"
SLOTS = 8
"""How many partitions a read has where nobody knows how many tasks run at a time."""


class Messages(DataSource):
    """The messages of a broker's outbox or inbox."""

    slots = SLOTS
    """How many partitions a read has by default."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """All columns of the log."""
        options = options_of(self.options)
        return fields.schema_of(options.log, several=options.several)

    def reader(self, schema: StructType) -> Scan:
        """Return the reader of a scan."""
        options = options_of(self.options)
        refuse_for_batch(options)
        fields.check_schema(options.log, schema)
        return Scan(options, schema, options.partitions or self.slots)

    def streamReader(self, schema: StructType) -> Stream:  # noqa: N802 - Spark's name
        """Return the reader of a stream."""
        options = options_of(self.options)
        refuse_for_stream(options)
        fields.check_schema(options.log, schema)
        return Stream(options, schema, options.partitions or self.slots)

    def writer(self, schema: StructType, overwrite: bool) -> Batch:
        """Return the writer of a DataFrame that is sent."""
        options = for_sink(self.options, stream=False)
        outgoing.check_columns(schema)
        if overwrite:
            raise ConfigurationError(
                'an outbox is append-only: nothing in it can be overwritten, use mode("append")'
            )
        to = Outgoing(what=options.what, dsn=options.dsn())
        return Batch(to, options.application, options.version)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Epochs:  # noqa: N802 - Spark's
        """Return the writer of a stream that is sent."""
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
        """Keep the filters that the database applies; return the others."""
        asked = [(given, condition(given)) for given in filters]
        self._conditions = tuple(one for _, one in asked if one is not None)
        return [given for given, one in asked if one is None]

    def partitions(self) -> Sequence[InputPartition]:
        """Take the snapshot, and divide the shards evenly; and the files of an archive."""
        from saf.spark.table import snapshot
        from saf.spark.table.archived import Log, plan
        from saf.spark.table.archived_rows import Archived
        from saf.spark.table.part import Part

        options = self._options
        dsn = options.dsn()
        broker = options.broker or f"${options.dsn_from}"
        left: list[Archived] = []

        def look(connection: psycopg.Connection[Any]) -> None:
            if options.archive is not None:
                log = Log.of(connection, options.log)
                left.extend(plan(options.archive, broker, log, self._conditions, self._partitions))

        now = snapshot.take(options.what, dsn, options.log, look)
        shards = shards_of(self._conditions, now.shards)
        there = [
            Part(
                what=options.what,
                broker=broker,
                dsn=dsn,
                batch=batch,
                kept=now.kept,
                files=now.files,
                # few shards of many are found by the index
                deep=now.deep and len(shards) == now.shards,
            )
            for batch in now.batch(shards).split(self._partitions)
        ]
        return [*there, *left]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Give the rows of a partition, in a task."""
        from saf.spark.table import archived_rows, part

        query = part.Query(asked=self._asked, conditions=self._conditions)
        # where no shard can hold a row, there is no partition, and Spark makes an empty one
        if isinstance(partition, part.Part):
            yield from part.read(partition, query)
        elif isinstance(partition, archived_rows.Archived):
            yield from archived_rows.read(partition, query)


def with_slots(number: int) -> type[Any]:
    """Return the data source with so many partitions by default.

    It is a class of its own because Spark makes the instances, in processes that do not know how
    many tasks run at a time. It is in no module that these could import, so it travels as a whole.
    """
    return type("Messages", (Messages,), {"slots": number, "__module__": "__main__"})
