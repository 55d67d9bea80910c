"""Slots as Parquet files, for a log whose messages are kept longer than its table.

    FOLDER/<broker_id>/outbox-3-<first id>-<last id>.parquet

A file has every column of every message of the slot, in no order. What is too large to be read (see
`saf.limits`) is left out, because a dead letter has it whole. The slot is read in one snapshot and
in bounded memory. The file is written under another name, brought to the disk and then renamed, so
a file with this name is whole. The caller truncates the slot afterwards, and only if the snapshot
still shows every row. If it does not, the next archive of the slot replaces the file, or lies
beside it under another range of ids; an id that is in two files is one message.
"""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

from psycopg import sql

from saf.columns import COLUMNS
from saf.database import Dsn, translated
from saf.errors import MissingExtra, Unavailable
from saf.log.ring import Contents, Slot

try:
    import adbc_driver_manager.dbapi as adbc
    import pyarrow.parquet as pq

    from saf.database import bulk
    from saf.limits import KEPT
    from saf.log.columns import bounded
except ImportError:
    raise MissingExtra("forwarder", "an archive in Parquet") from None

ARROW_BATCH_BYTES = 4 * 1024 * 1024
"""The bytes of a batch that is read; also about the size of a row group."""

COLUMNS_OF_LOG = {"outbox": COLUMNS, "inbox": (*COLUMNS, "source", "received_at")}

BROKER_ID = "SELECT broker_id::text FROM saf.broker"

# A transaction id does not come near 2^63, and Arrow has no type of its own for it.
ROWS = "SELECT txid::text::bigint AS txid, id, shard, {columns} FROM {slot}"


class ParquetArchive:
    """Writes slots of one broker below a folder: a `saf.log.ring.Archive`."""

    def __init__(self, dsn: Dsn, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder

    def __call__(self, contents: Contents) -> Path | None:
        """Write the messages of a slot to a file; None if their number has changed meanwhile.

        Raises:
            Unavailable: the folder cannot be written to, or the database does not answer.
        """
        slot = contents.slot
        name = f"{slot.log}-{slot.number}-{contents.first_id}-{contents.last_id}.parquet"
        try:
            with (
                bulk.connect(self.dsn, "archive", f"slot saf.{slot.table}") as connection,
                connection.cursor() as cursor,
            ):
                file = self._folder(cursor) / name
                part = file.with_name(f"{name}.{uuid4().hex}.part")
                try:
                    if _write(cursor, slot, part) != contents.messages:
                        return None
                    part.replace(file)
                    _to_disk(file.parent)
                finally:
                    part.unlink(missing_ok=True)
                return file
        except adbc.Error as error:
            reason = self.dsn.redact(str(error))
            raise translated(f"slot saf.{slot.table}", error.sqlstate, reason) from None
        except OSError as error:
            raise Unavailable(f"archive {self.folder}", error.strerror or str(error)) from None

    def _folder(self, cursor: adbc.Cursor) -> Path:
        """The broker's own folder, because names of brokers may repeat, and all ids begin at 1."""
        cursor.execute(BROKER_ID)
        ((broker_id,),) = cursor.fetchall()
        folder = self.folder / str(broker_id)
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            _to_disk(self.folder)
        return folder


def _write(cursor: adbc.Cursor, slot: Slot, file: Path) -> int:
    """Copy a slot's rows into a file, durably; return how many there were."""
    some = [bounded(name, kept=KEPT.format(log=slot.log)) for name in COLUMNS_OF_LOG[slot.log]]
    columns = sql.SQL(", ").join(sql.Identifier(c) if isinstance(c, str) else c for c in some)
    query = sql.SQL(ROWS).format(columns=columns, slot=sql.Identifier("saf", slot.table))
    cursor.adbc_statement.set_options(
        **{"adbc.postgresql.batch_size_hint_bytes": str(ARROW_BATCH_BYTES)}
    )
    cursor.execute(query.as_string(None))
    count = 0
    with cursor.fetch_record_batch() as batches, file.open("wb") as stream:
        with pq.ParquetWriter(stream, batches.schema, compression="zstd") as writer:
            for batch in batches:
                writer.write_batch(batch)
                count += batch.num_rows
        stream.flush()
        os.fsync(stream.fileno())
    return count


def _to_disk(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
