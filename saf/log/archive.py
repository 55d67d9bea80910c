"""Slots as Parquet files, for a log whose messages are kept longer than its table.

    FOLDER/<broker_id>/outbox-3-<first id>-<last id>.parquet

A file has every column of messages of the slot, in one snapshot, unordered. Values that are too
large to be read (see `saf.limits`) are left out, because a dead letter has the whole message. The
file is written under another name, flushed to disk and then renamed, so a file with this name is
complete and never changes. A broker that was repaired after a set-back adds its incarnation to the
names.

The caller truncates the slot afterwards, and only if the snapshot still shows every row. If it does
not, or if the process dies first, the next archive of the slot writes the messages that no file has
yet. So a broker's files contain each message once, and every message that has left its table. Two
concurrent writers, as after a broken connection, would not know of each other: the second one is
refused.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from uuid import uuid4

from psycopg import sql

from saf.columns import COLUMNS
from saf.database import Dsn, the_row, translated
from saf.errors import MissingExtra, Unavailable
from saf.failpoints import fail_point
from saf.limits import KEPT
from saf.log.disk import make_folder, sync
from saf.log.ring import Contents, Slot

try:
    import adbc_driver_manager.dbapi as adbc
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from saf.database import bulk
    from saf.log.columns import bounded
except ImportError:
    raise MissingExtra("forwarder", "an archive in Parquet") from None

NAME = re.compile(
    r"(?P<log>outbox|inbox)-(?P<slot>\d)-(?P<first>\d+)-(?P<last>\d+)(-life-(?P<incarnation>\d+))?"
    r"(\.\d+)?\.parquet"
)
FIRST = 1
"""The incarnation of a broker that was never repaired."""
KEY = ("id", "message_id")
"""Columns that tell messages of a broker apart, even those from before and after a set-back."""
KEY_BYTES = 24
LOCK = ".lock"
"""File in a broker's folder that a writer keeps locked."""

ARROW_BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of a batch that is read; also about the size of a row group."""

COLUMNS_OF_LOG = {"outbox": COLUMNS, "inbox": (*COLUMNS, "source", "received_at")}

WHOSE = "SELECT broker_id::text, incarnation FROM saf.broker"

# Transaction ids stay far below 2^63, and Arrow has no type of its own for them.
ROWS = "SELECT txid::text::bigint AS txid, id, shard, {columns} FROM {slot}"


@dataclass(frozen=True, kw_only=True)
class SlotRows:
    """A slot's rows, which can be read once."""

    slot: Slot
    broker_id: str
    incarnation: int
    cursor: bulk.BulkCursor

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the current rows, in the types in which PostgreSQL sends them."""
        log = self.slot.log
        expressions = [bounded(name, kept=KEPT.format(log=log)) for name in COLUMNS_OF_LOG[log]]
        columns = sql.SQL(", ").join(
            sql.Identifier(c) if isinstance(c, str) else c for c in expressions
        )
        query = sql.SQL(ROWS).format(columns=columns, slot=sql.Identifier("saf", self.slot.table))
        self.cursor.adbc_statement.set_options(
            **{"adbc.postgresql.batch_size_hint_bytes": str(ARROW_BATCH_BYTES)}
        )
        self.cursor.execute(query.as_string(None))
        yield from self.cursor.batches()


@contextmanager
def reading(dsn: Dsn, slot: Slot) -> Iterator[SlotRows]:
    """Connect, so that a slot can be read.

    Raises:
        Unavailable: the database does not answer.
    """
    what = f"slot saf.{slot.table}"
    try:
        with bulk.connect(dsn, "archive", what) as connection, connection.cursor() as cursor:
            cursor.execute(WHOSE)
            broker_id, incarnation = the_row(cursor.fetchall(), dsn.database)
            yield SlotRows(
                slot=slot, broker_id=str(broker_id), incarnation=int(incarnation), cursor=cursor
            )
    except adbc.Error as error:
        raise translated(what, error.sqlstate, dsn.reason(error)) from None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One file of an archive, by its name."""

    path: Path
    log: str
    slot: int
    first: int
    last: int
    incarnation: int


class ParquetArchive:
    """Writes slots of one broker to files in a folder: a `saf.log.ring.Archive`."""

    def __init__(self, dsn: Dsn, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder

    def __call__(self, contents: Contents) -> Path | None:
        """Write the messages of a slot to a file; None if their number has changed.

        Raises:
            Unavailable: the folder cannot be written to, or the database does not answer.
        """
        try:
            with reading(self.dsn, contents.slot) as rows:
                folder = self._folder(rows.broker_id)
                with self._alone(folder):
                    return _write(rows, contents, folder)
        except OSError as error:
            raise Unavailable(f"archive {self.folder}", error.strerror or str(error)) from None

    def _folder(self, broker_id: str) -> Path:
        """Return the broker's own folder: names of brokers may repeat, and all ids begin at 1."""
        folder = self.folder / broker_id
        make_folder(folder)
        return folder

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        with (folder / LOCK).open("w") as lock:  # not the folder, which NFS would not lock
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                what = f"archive {self.folder}"
                raise Unavailable(what, "another purge is writing to it") from None
            yield


def pieces(folder: Path, broker_id: str, log: str) -> list[Piece]:
    """Return an archive's files of a log; `.part` files do not count.

    Raises:
        OSError: the folder cannot be read.
    """
    folder.stat()  # raises if there is no archive at all
    try:
        paths = sorted((folder / broker_id).iterdir())
    except FileNotFoundError:  # nothing of this broker was archived yet
        return []
    named = [(path, NAME.fullmatch(path.name)) for path in paths]
    return [
        Piece(
            path=path,
            log=log,
            slot=int(name["slot"]),
            first=int(name["first"]),
            last=int(name["last"]),
            incarnation=int(name["incarnation"] or FIRST),
        )
        for path, name in named
        if name and name["log"] == log
    ]


def _write(rows: SlotRows, contents: Contents, folder: Path) -> Path | None:
    """Write messages that no file has yet; return the newest file with messages of the slot."""
    slot = contents.slot
    before = [
        piece for piece in pieces(folder.parent, folder.name, slot.log) if _meets(piece, contents)
    ]
    known = [_keys(pq.read_table(piece.path, columns=[*KEY])) for piece in before]
    part = folder / f"{slot.log}-{slot.number}.{uuid4().hex}.part"
    try:
        read, ends = _copy(rows.batches(), part, pa.chunked_array(known, pa.binary(KEY_BYTES)))
        if read != contents.messages:
            return None
        if ends is None:
            sync(folder)  # the writer that renamed them may have died first
            return max((piece.path for piece in before), key=lambda path: path.stat().st_mtime_ns)
        fail_point("archive_written")
        life = "" if rows.incarnation == FIRST else f"-life-{rows.incarnation}"
        file = _named(part, folder / f"{slot.log}-{slot.number}-{ends[0]}-{ends[1]}{life}.parquet")
        sync(folder)
    finally:
        part.unlink(missing_ok=True)
    fail_point("archived")
    return file


def _meets(piece: Piece, contents: Contents) -> bool:
    """Whether a file may have messages that are in a slot now."""
    first, last = contents.first_id or 0, contents.last_id or 0
    return piece.slot == contents.slot.number and piece.first <= last and piece.last >= first


def _copy(
    batches: Iterable[pa.RecordBatch], file: Path, known: pa.ChunkedArray
) -> tuple[int, tuple[int, int] | None]:
    """Copy rows that are not known into a file, durably.

    Return how many rows were read, and the first and last id in the file; None: no rows.
    """
    read, lows, highs = 0, [], []
    writer: pq.ParquetWriter | None = None
    with file.open("wb") as stream:
        for batch in batches:
            read += batch.num_rows
            new = batch.filter(pc.invert(pc.is_in(_keys(batch), known))) if len(known) else batch
            if not new.num_rows:
                continue
            writer = writer or pq.ParquetWriter(stream, new.schema, compression="zstd")
            writer.write_batch(new)
            ends = pc.min_max(new["id"])
            lows.append(ends["min"].as_py())
            highs.append(ends["max"].as_py())
        if writer is not None:
            writer.close()
        stream.flush()
        os.fsync(stream.fileno())
    return read, (min(lows), max(highs)) if lows else None


def _keys(rows: pa.Table | pa.RecordBatch) -> pa.Array:
    """Return each message's identity as bytes."""
    columns = []
    for name, size in (("id", 8), ("message_id", 16)):
        column = rows[name]
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        column = column.storage if isinstance(column, pa.ExtensionArray) else column
        given = np.frombuffer(column.buffers()[-1], np.uint8)[column.offset * size :]
        columns.append(given[: len(column) * size].reshape(len(column), size))
    keys = np.hstack(columns)
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(KEY_BYTES), len(keys), [None, pa.py_buffer(keys.tobytes())]
    )


def _named(part: Path, file: Path) -> Path:
    """Rename a file, or give it the next free name; never replace an existing file."""
    names = (file.with_suffix(f".{number}.parquet") for number in count(2))
    name = next(path for path in chain([file], names) if not path.exists())
    return part.rename(name)
