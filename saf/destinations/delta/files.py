"""Files of a table and its log: written, appended in one commit, and read for saf's marks.

*Files* (`Files`). On this machine, a file is durable when `Files.write` returns: its content and
its name. `Files.sync` makes deltalake's own files durable. In an object store, everything
acknowledged is durable. The object store's client is deltalake's own, so that both find the same
login. It holds Python's GIL while it opens, lists and removes files. So each chunk begins with a
call that does not hold it (`Files.there`): a store that hangs is noticed there, and no other thread
of the process waits.

*Marks* (`Log`). An application transaction has a name, and a number that a commit may change. saf's
names:

    saf:SOURCE:7:epoch:              the epoch of shard 7 of a source: in each commit for the shard
    saf:SOURCE:7:batch:LANE          how far shard 7 is stored in a lane,
    saf:SOURCE:7:position:LANE       as in `saf.destinations.marks.Mark`
    saf:SOURCE:7:opened_at:LANE      microseconds since 1970
    saf:SOURCE:7:set_aside_at:LANE   microseconds since 1970

A commit fails if another commit has set one of its numbers since the version that it was made for.
So each commit writes the epoch, whether it changes or not: if two commits concern the same shard,
the second one fails, reads again, and finds itself fenced or its messages stored.

deltalake returns only the number of a transaction whose name is known. So `Log` finds all of saf's
transactions as of one version. A checkpoint contains those of all versions before it; the files of
later versions contain the rest. Each file is read once. A file that is missing or cannot be read
raises `OSError`.

*Appending* (`write`, `commit`). Files that no reader knows become rows by one commit, which also
sets the numbers of application transactions: both, or neither. The commit is a new file of the
table's log, whose name another process may have taken. deltalake then checks the other commit, and
takes the next name; if both set the number of the same transaction, it gives up instead. The commit
is durable before it is acknowledged. A process that is killed before the commit leaves files that
nobody reads; a vacuum removes them.

*Probing* (`probe`). If a second commit can overwrite the first one, the object store silently loses
messages that the first commit has acknowledged. Only writing shows whether a store does this. So
`probe` makes commits for the same version of a table, and only one may win. The commits run at the
same time, because deltalake checks for others just before it writes. So a store that passes all
rounds may have been lucky, but one that fails is certainly wrong, and is refused. The probe is a
table of its own in the folder ``_saf_probe`` below the address of the table, which readers and
vacuums ignore. It is deleted afterwards.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction
from pyarrow.fs import (
    FileSelector,
    FileSystem,
    FileType,
    LocalFileSystem,
    PyFileSystem,
    SubTreeFileSystem,
)

from saf.database import pinned
from saf.destinations.lake import DAY, State, mark_of, numbers_of
from saf.destinations.marks import Mark, Place
from saf.destinations.settings import unusable
from saf.destinations.texts import moments
from saf.errors import Unavailable
from saf.log import disk

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

OURS = "saf:"
"""Prefix of the names of saf's application transactions."""
LOG = "_delta_log"
"""Folder of the log below the table's address."""
CHECKPOINT = re.compile(
    r"(?P<version>\d{20})\.checkpoint(\.(?P<part>\d{10})\.(?P<parts>\d{10})|\.[0-9a-f-]{36})?"
    r"\.(parquet|json)"
)

FILE_BYTES = 128 << 20
"""Bytes in memory at which a file is written."""

FOLDER = "_saf_probe"
"""Folder of probes below the table's address."""
ROWS = pa.table({"n": pa.array([1], pa.int64())})
AT_ONCE = 4
"""Commits that compete in one round."""
ROUNDS = 2


class Files:
    """Files of one table, by their paths in the table."""

    def __init__(self, address: str, folder: Path | None, options: Mapping[str, str]) -> None:
        """``folder``: the table's folder, if it is on this machine."""
        self._folder = folder
        self._store = None if folder else DeltaStorageHandler(address, dict(options))
        self.filesystem: FileSystem = (
            SubTreeFileSystem(str(folder), LocalFileSystem())
            if folder
            else PyFileSystem(self._store)
        )
        """The table's folder, for readers of Parquet."""

    def names(self, folder: str) -> Sequence[str]:
        """Return the names in a folder."""
        entries = self.filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
        return [entry.base_name for entry in entries]

    def there(self, path: str) -> bool:
        """Return True if a file exists."""
        return bool(self.filesystem.get_file_info(path).type == FileType.File)

    def content(self, path: str) -> bytes:
        """Return the bytes of a file."""
        with self.filesystem.open_input_file(path) as file:
            return bytes(file.read(file.size()))  # in one request

    def readable(self, path: str) -> Any:
        """Open a file for a reader of Parquet."""
        return self.filesystem.open_input_file(path)

    def write(self, path: str, content: bytes) -> None:
        """Write a new file."""
        if self._folder is None:
            upload = pinned.output(self._store, path)
            upload.write(content)
            upload.close()  # the file exists only now
            return
        file = self._folder / path
        if file.parent != self._folder and not file.parent.exists():
            file.parent.mkdir(exist_ok=True)  # fails without the table's folder
            disk.sync(self._folder)
        disk.write(file, content)
        disk.sync(file.parent)

    def sync(self, paths: Iterable[str]) -> None:
        """Make existing files durable, and their names."""
        if self._folder is None:
            return
        files = [self._folder / path for path in paths]
        for file in files:
            with suppress(FileNotFoundError):
                disk.sync_file(file)
        for folder in {self._folder, *(file.parent for file in files)}:
            disk.sync(folder)

    def remove(self, paths: Iterable[str]) -> list[str]:
        """Remove files that no reader knows; return the paths that could not be removed."""
        failed = []
        for path in paths:
            try:
                self.filesystem.delete_file(path)
            except OSError:
                failed.append(path)
        return failed


def sizes_of(table: DeltaTable) -> list[int]:
    """Return the size in bytes of each file in a version of a table."""
    return [*map(int, pa.table(table.get_add_actions(flatten=True))["size_bytes"].to_pylist())]


class Log:
    """A table's log; the versions given to `at` must never go down."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._version = -1
        self._numbers: dict[str, int] = {}

    def at(self, version: int) -> Mapping[str, int]:
        """Return the number of each of saf's transactions, as of a version.

        Raises:
            OSError: a file of the log is missing or cannot be read.
        """
        if self._version < 0:
            self._version, checkpoint = self._checkpoint(version)
            for path in checkpoint:
                self._numbers |= self._of_checkpoint(path)
        while self._version < version:
            text = self._files.content(file_of(self._version + 1))
            self._numbers |= _of_lines(text)
            self._version += 1
        return self._numbers

    def _checkpoint(self, version: int) -> tuple[int, list[str]]:
        """Return the version and files of the newest complete checkpoint; -1 without one."""
        checkpoints: dict[int, list[str]] = {}
        counts: dict[int, int] = {}
        for name in self._files.names(LOG):
            if (match := CHECKPOINT.fullmatch(name)) and int(match["version"]) <= version:
                checkpoints.setdefault(int(match["version"]), []).append(f"{LOG}/{name}")
                counts[int(match["version"])] = int(match["parts"] or 1)
        complete = [number for number, paths in checkpoints.items() if len(paths) >= counts[number]]
        newest = max(complete, default=-1)
        return newest, checkpoints.get(newest, [])

    def _of_checkpoint(self, path: str) -> dict[str, int]:
        if path.endswith(".json"):
            return _of_lines(self._files.content(path))
        column = pq.read_table(self._files.readable(path), columns=["txn"])["txn"]
        return _ours(action for action in column.drop_null().to_pylist())


def _of_lines(content: bytes) -> dict[str, int]:
    r"""Return saf's transactions in a file of the log.

    >>> _of_lines(b'{"add":{}}\n{"txn":{"appId":"saf:a","version":7}}\n')
    {'saf:a': 7}
    """
    lines = (json.loads(line) for line in content.splitlines() if OURS.encode() in line)
    return _ours(action["txn"] for action in lines if "txn" in action)


def _ours(actions: Iterator[Mapping[str, Any]]) -> dict[str, int]:
    return {
        action["appId"]: action["version"] for action in actions if action["appId"].startswith(OURS)
    }


def state_of(source: UUID, numbers: Mapping[str, int]) -> State:
    """Return a source's state from the numbers of transactions.

    >>> from datetime import UTC, datetime
    >>> source, at = UUID(int=7), datetime(2026, 1, 31, tzinfo=UTC)
    >>> mark = Mark(batch=2, position=70, opened_at=at, acknowledged=True)
    >>> numbers = dict(transactions(source, {("", 7): mark}, {7: 3}))
    >>> state_of(source, numbers) == State(marks={("", 7): mark}, epochs={7: 3})
    True
    """
    prefix = f"{OURS}{source}:"
    epochs: dict[int, int] = {}
    places: dict[Place, dict[str, int]] = {}
    for name, number in numbers.items():
        if name.startswith(prefix):
            shard, column, lane = name.removeprefix(prefix).split(":", 2)
            if column == "epoch":
                epochs[int(shard)] = number
            else:
                places.setdefault((lane, int(shard)), {})[column] = number
    marks = {place: mark_of(place[0], **values) for place, values in places.items()}
    return State(marks=marks, epochs=epochs)


def transactions(
    source: UUID, moved: Mapping[Place, Mark], epochs: Mapping[int, int]
) -> Iterator[tuple[str, int]]:
    """Yield the transactions that store marks and epochs."""
    for shard, epoch in epochs.items():
        yield f"{OURS}{source}:{shard}:epoch:", epoch
    for (lane, shard), mark in moved.items():
        for column, number in numbers_of(mark).items():
            yield f"{OURS}{source}:{shard}:{column}:{lane}", number


def file_of(version: int) -> str:
    """Return the path of a version's file in the log."""
    return f"{LOG}/{version:020}.json"


def checkpoint_of(version: int) -> str:
    """Return the path of the checkpoint that deltalake may have written for a version."""
    return f"{LOG}/{version:020}.checkpoint.parquet"


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


def parts(rows: pa.Table, by: Sequence[str]) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    """Yield the partition's values, and its rows without these columns, for each partition.

    >>> rows = pa.table({"day": [7, None, 7], "id": [1, 2, 3]})
    >>> [(values, part["id"].to_pylist()) for values, part in parts(rows, ["day"])]
    [({'day': '7'}, [1, 3]), ({'day': None}, [2])]
    """
    if not by:
        yield {}, rows
        return
    column, *rest = by
    values = rows[column].cast(pa.string())
    for value in pc.unique(values).to_pylist():
        mask = pc.is_null(values) if value is None else pc.equal(values, value)
        for values_of_rest, part in parts(rows.filter(mask).drop_columns([column]), rest):
            yield {column: value, **values_of_rest}, part


def statistics(rows: pa.Table, counted: Sequence[str]) -> str:
    """Return the statistics of a file, by which readers skip files that they do not need.

    They cover the columns in the table's property `delta.dataSkippingStatsColumns`: some readers
    take a missing value to mean that a file has none.
    """
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    for name in counted:
        column = rows[name]
        if column.null_count == rows.num_rows:
            continue
        ends = _written(pa.array(pc.min_max(column).values(), column.type))
        least[name], greatest[name] = ends.to_pylist()
    return json.dumps(
        {
            "numRecords": rows.num_rows,
            "minValues": least,
            "maxValues": greatest,
            "nullCount": {name: rows[name].null_count for name in counted},
        }
    )


def _written(ends: pa.Array) -> pa.Array:
    """Return dates and times in the format of a table's log.

    >>> _written(pa.array([7], pa.timestamp("us"))).to_pylist()
    ['1970-01-01T00:00:00.000007']
    >>> _written(pa.array([7], pa.date32())).to_pylist(), _written(pa.array([7])).to_pylist()
    (['1970-01-08'], [7])
    """
    if pa.types.is_timestamp(ends.type):
        texts = moments(ends)
        return texts if ends.type.tz else pc.utf8_rtrim(texts, "Z")
    return ends.cast(pa.string()) if pa.types.is_date(ends.type) else ends


def probe(what: str, settings: Delta) -> Iterator[tuple[str, str]]:
    """Yield each problem of the table's object store, with its cure.

    Raises:
        Refused: the login has no right to write there, or the store lets two commits win.
        Unavailable: the store does not answer.
    """
    address, options = f"{settings.table}/{FOLDER}/{uuid4()}", settings.options
    files, paths = Files(address, None, options), list[str]()
    ready = Barrier(AT_ONCE)

    def wins(_: int) -> bool:
        """Compete with a commit that sets the number of the same transaction."""
        added = [*write(files, ROWS, (), ())]
        paths.extend(file.path for file in added)
        table = DeltaTable(address, storage_options=options)
        ready.wait(settings.bounds.statement_seconds)
        return commit(what, table, files, added, by=(), numbers=[("saf-probe", 1)])

    try:
        DeltaTable.create(address, ROWS.schema, storage_options=options)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            won = [sum(threads.map(wins, range(AT_ONCE))) for _ in range(ROUNDS)]
    finally:
        remaining = files.remove([*paths, *(f"{LOG}/{name}" for name in files.names(LOG))])
    if max(won) > 1:
        raise unusable(
            what,
            "its store lets two commits write the same file of a table's log: of two forwarders, "
            "one overwrites what the other has acknowledged",
            "use a store with conditional writes (If-None-Match), which S3 has; or set "
            'AWS_S3_LOCKING_PROVIDER = "dynamodb" in storage_options',
        )
    if remaining:
        yield (
            f"its login may not delete: {len(remaining)} files of a probe stay at {address}",
            "let its login delete below the table's address, which `saf lake optimize` needs, too",
        )
