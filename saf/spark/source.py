"""The data source ``saf``: open batches of any number of brokers as one DataFrame.

One Spark partition is one batch of one broker (a group of its shards), read by COPY into Arrow
and handed on as Arrow: no Python runs per message. `read` connects inside, claims nothing and
changes nothing, so a task may run twice; the batch gives the same rows each time.

Columns: ``work`` (which of the run's `Work` items the row is from), ``id`` and ``shard`` at the
source, and the message's. Those that most messages leave empty are fields of one struct,
``optional``, which is NULL where all of them are: Spark then copies one null instead of seven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import adbc_driver_manager.dbapi as adbc
import adbc_driver_postgresql.dbapi
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from saf.cursor import Batch
from saf.database import Dsn
from saf.routes import Route

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PLAIN = {
    "id": "long",
    "shard": "short",
    "message_id": "binary",
    "to_service": "string",
    "key": "string",
    "message_type": "string",
    "headers": "string",
    "body": "binary",
    "created_at": "timestamp",
}
OPTIONAL = {
    "from_service": "string",
    "to_broker": "binary",
    "conversation_id": "binary",
    "from_initiator": "boolean",
    "sequence": "long",
    "deliver_at": "timestamp",
    "expires_at": "timestamp",
}
SCHEMA = ", ".join(
    [
        "work int",
        *(f"{name} {kind}" for name, kind in PLAIN.items()),
        "optional struct<" + ", ".join(f"{n}: {kind}" for n, kind in OPTIONAL.items()) + ">",
    ]
)

ARROW_BATCH_BYTES = 4 * 1024 * 1024

FAILED = -1
"""The id of a last row that says, in its body, why the batch could not be read to its end. An
exception instead would abort the job, and with it the other brokers' tasks."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one task does: forward one batch of one broker."""

    broker: str
    """The source's name, for people."""
    source: UUID
    """The source's broker_id, for watermarks."""
    dsn: Dsn
    batch: Batch
    routes: tuple[Route, ...]
    """Frozen with the batch, in order of precedence."""


class BatchPartition(InputPartition):
    """One partition: the number of a `Work` item, and the item."""

    def __init__(self, number: int, work: Work) -> None:
        super().__init__(number)
        self.work = work


class SafReader(DataSourceReader):
    """Reads each partition's batch; stateless."""

    def __init__(self, work: Sequence[Work]) -> None:
        self.work = work

    def partitions(self) -> Sequence[InputPartition]:
        """One per `Work` item, in order: partition n of every stage is item n."""
        return [BatchPartition(number, work) for number, work in enumerate(self.work)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Record batches of about 4 MiB, in the order of the ids."""
        assert isinstance(partition, BatchPartition)  # noqa: S101 - for the type checker
        yield from record_batches(partition.value, partition.work)


def messages(spark: SparkSession, work: Sequence[Work]) -> DataFrame:
    """The messages of all ``work``, one partition per item.

    The items travel inside the pickled data source and not as options, because they hold
    passwords and Spark shows options in plans.
    """

    class SafDataSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "saf"

        def schema(self) -> str:
            return SCHEMA

        def reader(self, schema: Any) -> DataSourceReader:  # noqa: ARG002 - Spark's signature
            return SafReader(work)

    spark.dataSource.register(SafDataSource)
    return spark.read.format("saf").load()


def record_batches(number: int, work: Work) -> Iterator[pa.RecordBatch]:
    """The remaining messages of one item of work, in `SCHEMA`'s columns, about 4 MiB a batch."""
    try:
        with (
            adbc_driver_postgresql.dbapi.connect(work.dsn.for_role("read")) as connection,
            connection.cursor() as cursor,
        ):
            cursor.adbc_statement.set_options(
                **{"adbc.postgresql.batch_size_hint_bytes": str(ARROW_BATCH_BYTES)}
            )
            cursor.execute(work.batch.select([*PLAIN, *OPTIONAL]))
            for rows in cursor.fetch_record_batch():
                yield _as_spark(number, rows)
    except adbc.Error as error:
        yield _failure(number, work.dsn.redact(str(error)))


def _failure(number: int, reason: str) -> pa.RecordBatch:
    row = {name: pa.nulls(1, _arrow_type(kind)) for name, kind in (PLAIN | OPTIONAL).items()}
    row["id"] = pa.array([FAILED])
    row["body"] = pa.array([reason.encode()])
    return _as_spark(number, pa.RecordBatch.from_pydict(row))


def _arrow_type(kind: str) -> pa.DataType:
    return {
        "long": pa.int64(),
        "short": pa.int16(),
        "binary": pa.binary(),
        "string": pa.string(),
        "boolean": pa.bool_(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }[kind]


def _as_spark(number: int, rows: pa.RecordBatch) -> pa.RecordBatch:
    columns = {name: _storage(rows.column(name)) for name in (*PLAIN, *OPTIONAL)}
    optional = [columns.pop(name) for name in OPTIONAL]
    fields = [pa.field(name, column.type) for name, column in zip(OPTIONAL, optional, strict=True)]
    if all(column.null_count == len(column) for column in optional):
        struct = pa.nulls(rows.num_rows, pa.struct(fields))
    else:
        struct = pa.StructArray.from_arrays(optional, fields=fields)
    work = pa.repeat(pa.scalar(number, pa.int32()), rows.num_rows)
    return pa.RecordBatch.from_arrays(
        [work, *columns.values(), struct], names=["work", *columns, "optional"]
    )


def _storage(column: pa.Array) -> pa.Array:
    """The column in types that Spark knows: uuid as binary, jsonb as text."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    return column
