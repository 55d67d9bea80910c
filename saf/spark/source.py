"""The data source ``saf``: open batches of any number of brokers as one DataFrame.

One Spark partition is one batch of one broker (a group of its shards), read by COPY into Arrow
and handed on as Arrow: no Python runs per message. `read` connects inside, claims nothing and
changes nothing, so a task may run twice; the batch gives the same rows each time.

Columns: ``work`` (which of the run's `Work` items the row is from), ``id`` and ``shard`` at the
source, and the message's. Those that most messages leave empty are fields of one struct,
``optional``, which is NULL where all of them are: Spark then copies one null instead of seven.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import adbc_driver_manager.dbapi as adbc
import adbc_driver_postgresql.dbapi
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from saf.spark.work import Work

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

# Tasks are the parallelism: workers of PostgreSQL's own would hand each row from one to the other,
# and compiling the query takes longer than most batches.
ALONE = "SELECT set_config('max_parallel_workers_per_gather', '0', false), \
set_config('jit', 'off', false)"

FAILED = -1
"""The id of a last row that says, in its body, why the batch could not be read to its end. An
exception instead would abort the job, and with it the other brokers' tasks."""


def messages(spark: SparkSession, work: Sequence[Work]) -> DataFrame:
    """The messages of all ``work``, one partition per item: partition n is item n.

    The items travel pickled inside the data source and not as options, because they hold
    passwords and Spark shows options in plans. The classes are local, so that they travel by value
    too: the processes in which Spark only plans then import nothing of saf, nor Arrow.
    """
    pickled, count = pickle.dumps(list(work)), len(work)

    class SafReader(DataSourceReader):
        def partitions(self) -> Sequence[InputPartition]:
            return [InputPartition(number) for number in range(count)]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            from saf.spark.source import read_item

            return read_item(pickled, partition.value)

    class SafDataSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "saf"

        def schema(self) -> str:
            return SCHEMA

        def reader(self, schema: Any) -> DataSourceReader:  # noqa: ARG002 - Spark's signature
            return SafReader()

    spark.dataSource.register(SafDataSource)
    return spark.read.format("saf").load()


def read_item(pickled: bytes, number: int) -> Iterator[pa.RecordBatch]:
    """The messages of one item of a pickled list of work."""
    return record_batches(number, pickle.loads(pickled)[number])  # noqa: S301 - our own bytes


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
            cursor.execute(ALONE)
            cursor.execute(work.batch.select([*PLAIN, *OPTIONAL]))
            for rows in cursor.fetch_record_batch():
                yield _as_spark(number, rows)
    except adbc.Error as error:
        yield _failure(number, work.dsn.redact(str(error)))


def _failure(number: int, reason: str) -> pa.RecordBatch:
    row = {name: pa.nulls(1, arrow_type(kind)) for name, kind in (PLAIN | OPTIONAL).items()}
    row["id"] = pa.array([FAILED])
    row["body"] = pa.array([reason.encode()])
    return _as_spark(number, pa.RecordBatch.from_pydict(row))


def arrow_type(kind: str) -> pa.DataType:
    """Arrow's name for one of Spark's types.

    >>> arrow_type("long")
    DataType(int64)
    """
    return {
        "int": pa.int32(),
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
