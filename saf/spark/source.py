"""The source of the pipeline: open batches of any number of brokers as one DataFrame.

One Spark partition is one batch of one broker (a group of its shards), read by COPY into Arrow
and handed on as Arrow: no Python runs per message. It connects inside the task, claims nothing and
changes nothing, so a task may run twice; the batch gives the same rows each time.

The columns are those of `saf.spark.columns`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import adbc_driver_manager.dbapi as adbc
import adbc_driver_postgresql.dbapi
import pyarrow as pa

from saf.errors import Unavailable
from saf.spark.columns import COLUMNS, SCHEMA, arrow_type, as_spark, selected
from saf.spark.work import BYTES_AT_ONCE, ROWS_AT_ONCE, Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ARROW_BATCH_BYTES = 4 * 1024 * 1024

# Tasks are the parallelism: workers of PostgreSQL's own would hand each row from one to the other,
# and compiling the query takes longer than most batches.
ALONE = "SELECT set_config('max_parallel_workers_per_gather', '0', false), \
set_config('jit', 'off', false)"

"""Two jobs may be started side by side, and the name is the same for both."""

FAILED = -1
"""The id of a last row that says, in its body, why the batch could not be read to its end. An
exception instead would abort the job, and with it the other brokers' tasks."""


def messages(spark: SparkSession, work: Sequence[Work], max_bytes: int) -> DataFrame:
    """The messages of all ``work``, one partition per item: partition n is item n.

    The items travel inside the function and not as options, because they hold passwords and Spark
    shows options in plans; each pickled by itself, because a task needs only its own of what may be
    thousands. For the same rows, Spark's Python data sources would start two more processes, in
    which it only plans: a sixth of a short run's time.
    """
    pickled = [pickle.dumps(item) for item in work]

    def read_items(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                item = pickle.loads(pickled[number])  # noqa: S301 - our own bytes
                yield from record_batches(item, max_bytes)

    return spark.range(0, len(work), 1, len(work)).mapInArrow(read_items, SCHEMA)


def record_batches(work: Work, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """The remaining messages of one item of work, in `saf.spark.columns`."""
    try:
        for rows in read(work, work.batch.select(selected(max_bytes))):
            yield rows
            if missing := padding(rows.num_rows, rows.nbytes):
                yield _nothing(missing)
    except Unavailable as error:
        yield _failure(error.reason)


def read(work: Work, query: str) -> Iterator[pa.RecordBatch]:
    """What a query gives at the source, about 4 MiB at a time, in types that Spark knows.

    Raises:
        Unavailable: the source does not answer, or not to the end.
    """
    try:
        with (
            adbc_driver_postgresql.dbapi.connect(work.dsn.for_role("read")) as connection,
            connection.cursor() as cursor,
        ):
            cursor.adbc_statement.set_options(
                **{"adbc.postgresql.batch_size_hint_bytes": str(ARROW_BATCH_BYTES)}
            )
            cursor.execute(ALONE)
            cursor.execute(query)
            for rows in cursor.fetch_record_batch():
                yield as_spark(rows)
    # of a stream that breaks off Arrow itself says so
    except (adbc.Error, OSError) as error:
        reason = work.dsn.redact(str(error))
        raise Unavailable(f"broker {work.broker!r}", reason) from None


def padding(rows: int, size: int) -> int:
    """How many empty rows make so many rows and bytes count for what they are.

    Spark counts what it holds in rows. Empty ones after large messages bring it to hand these on
    before they are too many; delivery skips rows without an id.

    >>> padding(10_000, 2_000_000), padding(4, 4_000_000), padding(1, 64_000_000)
    (0, 2380, 9999)
    """
    worth = min(size * ROWS_AT_ONCE // BYTES_AT_ONCE, ROWS_AT_ONCE)
    return max(worth - rows, 0)


def _nothing(rows: int) -> pa.RecordBatch:
    nulls = {name: pa.nulls(rows, arrow_type(kind)) for name, kind in COLUMNS.items()}
    return pa.RecordBatch.from_pydict(nulls)


def _failure(reason: str) -> pa.RecordBatch:
    """One row like the others; see `FAILED`."""
    columns = dict(zip(COLUMNS, _nothing(1).columns, strict=True))
    columns |= {"id": pa.array([FAILED]), "body": pa.array([reason.encode()])}
    return pa.RecordBatch.from_pydict(columns)
