"""The source: the open batch of a broker (a group of its shards), inside the Spark task.

Read by COPY into Arrow: no Python runs per message. Reading claims nothing and changes nothing, so
a task may run twice; the batch gives the same rows each time.

The columns are those of `saf.spark.columns`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import adbc_driver_manager.dbapi as adbc
import adbc_driver_postgresql.dbapi
import pyarrow as pa

from saf import connections
from saf.errors import Unavailable
from saf.spark.columns import plain, selected
from saf.spark.work import Work

ARROW_BATCH_BYTES = 4 * 1024 * 1024

# Tasks are the parallelism: workers of PostgreSQL's own would hand each row from one to the other,
# and compiling the query takes longer than most batches.
ALONE = "SELECT set_config('max_parallel_workers_per_gather', '0', false), \
set_config('jit', 'off', false)"


def messages(work: Work, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """The remaining messages of one item of work, in `saf.spark.columns`; raises as `read` does."""
    return read(work, work.batch.select(selected(max_bytes)))


def read(work: Work, query: str) -> Iterator[pa.RecordBatch]:
    """What a query gives at the source, about 4 MiB at a time, in types that Arrow computes with.

    Raises:
        Unavailable: the source does not answer, or not to the end.
    """
    try:
        with _connected(work) as connection, connection.cursor() as cursor:
            cursor.adbc_statement.set_options(
                **{"adbc.postgresql.batch_size_hint_bytes": str(ARROW_BATCH_BYTES)}
            )
            cursor.execute(query)
            for rows in cursor.fetch_record_batch():
                yield plain(rows)
    # of a stream that breaks off Arrow itself says so
    except (adbc.Error, OSError) as error:
        reason = work.dsn.redact(str(error))
        raise Unavailable(f"broker {work.broker!r}", reason) from None


@contextmanager
def _connected(work: Work) -> Iterator[adbc.Connection]:
    """A connection that is kept only if what it was for came to its end."""
    dsn = work.dsn
    connection = connections.take(
        "read", dsn, lambda: adbc_driver_postgresql.dbapi.connect(dsn.for_role("read")), _alone
    )
    try:
        yield connection
        connection.rollback()  # not to hold on to its snapshot
    except BaseException:  # also a reader that is left before the end
        connections.drop(connection)
        raise
    connections.put(work.keep, "read", dsn, connection)


def _alone(connection: adbc.Connection) -> None:
    with connection.cursor() as cursor:
        cursor.execute(ALONE)
