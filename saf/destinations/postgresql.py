"""Another broker's inbox, filled by COPY, exactly once.

One transaction per chunk: lock the watermarks of the chunk's source shards, refuse an older
epoch, drop the rows at or below (batch, position), COPY the rest, move the watermarks, commit.
Because a batch never changes, a chunk that was stored before its acknowledgement got lost is
recognised by that mark alone: no index over message ids, no table that grows.

Arrow goes in as it came: the ADBC driver writes it as COPY binary, inside the transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import adbc_driver_manager.dbapi as adbc
import adbc_driver_postgresql.dbapi
import numpy as np
import psycopg.errors
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.database import HAS_SCHEMA, SCHEMA_REVISION, Dsn, lacks_right, require_revision
from saf.destinations import Chunk, Stored
from saf.errors import Fenced, Rejected, Unavailable
from saf.failpoints import fail_point
from saf.message import COLUMNS

# COPY needs Arrow types that say which PostgreSQL type is meant
UUIDS = ("message_id", "to_broker", "conversation_id")
JSON = ("headers",)

# A server whose default is off would acknowledge what a crash could still lose. A stricter
# default (remote_apply) stays.
DURABLE = """
SELECT set_config('synchronous_commit', 'on', false)
WHERE current_setting('synchronous_commit') IN ('off', 'local')
"""

BROKER_ID = "SELECT broker_id::text FROM saf.broker"

KNOW_SHARDS = """
INSERT INTO saf.watermark (source, shard, epoch, batch, position)
SELECT {source}::uuid, unnest({shards}::smallint[]), 0, 0, 0
ON CONFLICT DO NOTHING
"""

# In the order of the shards, so that two deliveries wait for each other instead of deadlocking
LOCK = """
SELECT shard, epoch, batch, position FROM saf.watermark
WHERE source = {source}::uuid AND shard = ANY ({shards}::smallint[])
ORDER BY shard FOR UPDATE
"""

# The epoch rises even where every row was stored before, so that the owner before is fenced
MOVE = """
UPDATE saf.watermark w SET epoch = mine.epoch, (batch, position) = (
    SELECT batch, position FROM (VALUES (w.batch, w.position), ({batch}, {position}))
        AS mark (batch, position) ORDER BY batch DESC, position DESC LIMIT 1)
FROM unnest({shards}::smallint[], {epochs}::bigint[]) AS mine (shard, epoch)
WHERE w.source = {source}::uuid AND w.shard = mine.shard
"""


class PostgresInbox:
    """A broker's inbox as a `Destination`. Connects at the first chunk."""

    def __init__(self, name: str, dsn: Dsn) -> None:
        self.name = name
        self.dsn = dsn
        self._connection: adbc.Connection | None = None
        self._identity = ""

    def identity(self) -> str:
        """The inbox's broker_id."""
        if not self._identity:
            with self._transaction():
                pass  # connecting learns it
        return self._identity

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored:
        """Store a chunk; see `saf.destinations.Destination`."""
        with self._transaction() as cursor:
            rows = chunk.rows
            if exactly_once:
                rows = self._move_watermarks(cursor, chunk)
            if rows.num_rows:
                cursor.adbc_ingest(
                    "inbox", inbox_rows(rows, chunk.source), mode="append", db_schema_name="saf"
                )
            fail_point("mom_insert")
        fail_point("mom_commit")
        return Stored(messages=rows.num_rows, dropped=chunk.rows.num_rows - rows.num_rows)

    def close(self) -> None:
        """Close the connection, if there is one; what is not committed is rolled back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            # a connection that the server has cut has nothing left to close
            with _suppress():
                connection.close()

    def _move_watermarks(self, cursor: adbc.Cursor, chunk: Chunk) -> pa.Table:
        """Lock and move the watermarks to the chunk's end; return the rows beyond them."""
        values = {
            "source": sql.Literal(str(chunk.source)),
            "shards": sql.Literal(chunk.batch.shards),
            "epochs": sql.Literal([epoch for _, epoch in chunk.batch.epochs]),
            "batch": sql.Literal(chunk.batch.number),
            "position": sql.Literal(chunk.position),
        }
        marks = _query(cursor, LOCK, values)
        if len(marks) < len(chunk.batch.epochs):
            _query(cursor, KNOW_SHARDS, values)
            marks = _query(cursor, LOCK, values)
        epochs = dict(chunk.batch.epochs)
        newer = [shard for shard, epoch, _, _ in marks if epoch > epochs[shard]]
        if newer:
            raise Fenced(f"destination {self.name!r}", newer)
        _query(cursor, MOVE, values)
        number = chunk.batch.number
        stored = {
            shard: position if batch == number else np.iinfo(np.int64).max
            for shard, _, batch, position in marks
            if batch >= number
        }
        return beyond(chunk.rows, stored)

    @contextmanager
    def _transaction(self) -> Iterator[adbc.Cursor]:
        """A cursor whose work is committed at the end, or rolled back and the error translated."""
        try:
            connection = self._connect()
            with connection.cursor() as cursor:
                yield cursor
            connection.commit()
        except adbc.Error as error:
            self.close()
            raise self._translate(error) from None
        except BaseException:
            self.close()
            raise

    def _connect(self) -> adbc.Connection:
        if self._connection is None:
            self._connection = adbc_driver_postgresql.dbapi.connect(self.dsn.for_role("deliver"))
            with self._connection.cursor() as cursor:
                (exists,) = _query(cursor, HAS_SCHEMA)[0]
                found = _query(cursor, SCHEMA_REVISION) if exists else []
                require_revision(self.dsn.database, found[0][0] if found else None)
                self._identity = str(_query(cursor, BROKER_ID)[0][0])
                _query(cursor, DURABLE)
            self._connection.commit()
        return self._connection

    def _translate(self, error: adbc.Error) -> Exception:
        reason = self.dsn.redact(str(error))
        state = error.sqlstate or ""
        if state == psycopg.errors.InsufficientPrivilege.sqlstate:
            return lacks_right(f"destination {self.name!r}", reason)
        # no SQLSTATE: the connection failed or broke. 08: connection, 40: deadlock or
        # serialization, 53: out of resources, 57: shut down or cancelled, 58: the server's
        # system failed: each may pass by itself.
        if not state or state[:2] in ("08", "40", "53", "57", "58"):
            return Unavailable(f"destination {self.name!r}", reason)
        return Rejected(f"destination {self.name!r}", reason)


def beyond(rows: pa.Table, stored: dict[int, int]) -> pa.Table:
    """The rows whose id is above what is stored of their shard (shards not named: nothing is)."""
    if not stored:
        return rows
    shards = rows["shard"].to_numpy()
    ids = rows["id"].to_numpy()
    limit = np.zeros(max(int(shards.max(initial=0)), *stored) + 1, dtype=np.int64)
    limit[list(stored)] = list(stored.values())
    fresh = ids > limit[shards]
    return rows if fresh.all() else rows.filter(pa.array(fresh))


def inbox_rows(rows: pa.Table, source: UUID) -> pa.Table:
    """``rows`` as columns that `saf.inbox` takes; those that hold nothing are left out."""
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        column = rows[name]
        if column.null_count == len(column):
            continue
        if name in UUIDS:
            column = _as(pa.uuid(), pc.cast(column, pa.binary(16)))
        elif name in JSON:
            column = _as(pa.json_(), column)
        columns[name] = column
    sources = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), rows.num_rows, [None, pa.py_buffer(source.bytes * rows.num_rows)]
    )
    columns["source"] = _as(pa.uuid(), pa.chunked_array([sources]))
    return pa.table(columns)


def _as(extension: pa.ExtensionType, column: pa.ChunkedArray) -> pa.ChunkedArray:
    chunks = [pa.ExtensionArray.from_storage(extension, chunk) for chunk in column.chunks]
    return pa.chunked_array(chunks, type=extension)


def _query(
    cursor: adbc.Cursor, statement: str, values: dict[str, sql.Literal] | None = None
) -> list[tuple[Any, ...]]:
    text = sql.SQL(statement).format(**values).as_string(None) if values else statement
    cursor.execute(text)
    return cursor.fetchall() if cursor.description else []


@contextmanager
def _suppress() -> Iterator[None]:
    try:
        yield
    except adbc.Error:
        return
