"""Appending to a table: files that no reader knows, and then one commit that makes them rows.

The commit also sets the numbers of application transactions: both, or neither. It is a new file of
the table's log, whose name another process may have taken. deltalake then checks the other commit,
and takes the next name; if both set the number of the same transaction, it gives up instead.

On this machine, files are durable before the commit, and the commit is durable before it is
acknowledged. A process that is killed before the commit leaves files that nobody reads; a vacuum
removes them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from saf.destinations.delta.files import Files
from saf.destinations.delta.log import checkpoint_of, file_of
from saf.destinations.delta.making import parts, statistics
from saf.destinations.lake.state import DAY
from saf.errors import Unavailable

FILE_BYTES = 128 << 20
"""Bytes in memory at which a file is written."""


def write(
    files: Files, rows: pa.Table, by: Sequence[str], counted: Sequence[str]
) -> Iterator[AddAction]:
    """Write rows, a file for each partition; yield each file's entry for the log.

    ``by``: the columns that the table is partitioned by; ``counted``: the columns whose minimum and
    maximum are recorded.
    """
    for values, part in parts(rows, by):
        out = pa.BufferOutputStream()
        pq.write_table(part, out, compression="zstd", store_schema=False)
        content = out.getvalue().to_pybytes()
        # a day also names a folder; values of other columns may be anything
        dated = DAY in values and pa.types.is_date(rows.schema.field(DAY).type)
        folder = f"{DAY}={values[DAY]}/" if dated and values[DAY] else ""
        path = f"{folder}{uuid4()}.parquet"
        files.write(path, content)
        now = time.time_ns() // 1_000_000
        yield AddAction(path, len(content), values, now, True, statistics(part, counted))


def commit(
    what: str,
    table: DeltaTable,
    files: Files,
    added: Sequence[AddAction],
    *,
    by: Sequence[str],
    numbers: Iterable[tuple[str, int]],
) -> bool:
    """Make files rows of a table, and set the numbers of transactions.

    Return False, and change nothing, if another process has set one of these numbers since this
    version of the table.

    Raises:
        Unavailable: the table was removed during the commit.
        DeltaError, OSError: from deltalake and the file system.
    """
    before, failed = table.version(), False
    try:
        table.create_write_transaction(
            [*added],
            "append",
            table.schema(),
            partition_by=[*by],
            commit_properties=CommitProperties(
                app_transactions=[Transaction(name, number) for name, number in numbers]
            ),
        )
    except CommitFailedError:
        failed = True
    table.update_incremental()
    # an object store's client that retries after a lost answer meets its own commit
    if failed and not (added and {file.path for file in added} <= _paths(table)):
        return False
    after = table.version()
    if after == before or not all(map(files.there, map(file_of, (before, after)))):
        # deltalake creates missing folders, for example where a disk is no longer mounted
        raise Unavailable(what, "its table was removed during a commit")
    sync(table, files, before)
    return True


def _paths(table: DeltaTable) -> set[str]:
    return set(pa.table(table.get_add_actions(flatten=True))["path"].to_pylist())


def sync(table: DeltaTable, files: Files, before: int) -> None:
    """Make all versions after ``before`` durable, whichever process has written them."""
    versions = range(before + 1, table.version() + 1)
    files.sync(path for version in versions for path in (file_of(version), checkpoint_of(version)))


def gathered(batches: Iterable[pa.RecordBatch], most: int = FILE_BYTES) -> Iterator[pa.Table]:
    """Yield tables of about ``most`` bytes, so that files are few and memory is bounded."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
            size += batch.nbytes
        if size >= most:
            yield pa.Table.from_batches(held)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held)
