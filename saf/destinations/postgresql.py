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
import numpy as np
import psycopg.errors
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf import bulk, connections
from saf.database import HAS_SCHEMA, SCHEMA_REVISION, Dsn, lacks_right, require_revision
from saf.destinations import Chunk, Stored
from saf.errors import Ahead, Fenced, Rejected, Unavailable, UnknownService
from saf.failpoints import fail_point
from saf.message import COLUMNS
from saf.parking import MAIN
from saf.shards import LAST

# COPY needs Arrow types that say which PostgreSQL type is meant
UUIDS = ("message_id", "to_broker", "conversation_id")
JSON = ("headers",)

# A server whose default is off would acknowledge what a crash could still lose. A stricter
# default (remote_apply) stays.
DURABLE = """
SELECT set_config('synchronous_commit', 'on', false)
WHERE current_setting('synchronous_commit') IN ('off', 'local')
"""

OF_THE_ROWS = ("09", "22", "23", "27", "38", "39", "44", "54", "P0")
"""Classes of SQLSTATE: data, constraints, limits of size, and what triggers raise."""

SERVICES = "SELECT name FROM saf.service"

BROKER_ID = "SELECT broker_id::text FROM saf.broker"

# By one delivery at a time, because nothing else forbids a second watermark of a shard: the key
# has the batch as its last column, for LOCK
TAKE_TURN = "SELECT pg_advisory_xact_lock(hashtextextended('saf.watermark', 0))"
KNOW_SHARDS = """
INSERT INTO saf.watermark (source, shard, lane, epoch, batch, position)
SELECT {source}::uuid, shard, {lane}, 0, 0, 0 FROM unnest({shards}::smallint[]) AS s (shard)
WHERE NOT EXISTS (SELECT FROM saf.watermark w
                  WHERE w.source = {source}::uuid AND w.shard = s.shard AND w.lane = {lane})
"""

# In the order of the shards, so that two deliveries wait for each other instead of deadlocking. The
# newest version is the first that the index finds; see saf.shards.newest.
LOCK = f"""
SELECT w.*, batch > {{current}} OR batch = {{current}} AND opened_at <> {{opened_at}}::timestamptz
FROM unnest({{shards}}::smallint[]) AS s (shard)
CROSS JOIN LATERAL (
    SELECT shard, epoch, batch, position, opened_at, source, lane FROM saf.watermark
    WHERE (source, shard, lane, batch) <= ({{source}}::uuid, s.shard, {{lane}}, {LAST})
    ORDER BY source DESC, shard DESC, lane DESC, batch DESC LIMIT 1 FOR UPDATE
) AS w
WHERE w.source = {{source}}::uuid AND w.shard = s.shard AND w.lane = {{lane}}
"""

# The epoch rises even where every row was stored before, so that the owner before is fenced
MOVE = """
UPDATE saf.watermark w SET epoch = mine.epoch, (batch, position, opened_at) = (
    SELECT batch, position, opened_at FROM (
        VALUES (w.batch, w.position, w.opened_at), ({batch}, {position}, {opened_at}::timestamptz)
    ) AS mark (batch, position, opened_at) ORDER BY batch DESC, position DESC LIMIT 1)
FROM unnest({shards}::smallint[], {epochs}::bigint[], {locked}::bigint[])
     AS mine (shard, epoch, batch)
WHERE w.source = {source}::uuid AND w.shard = mine.shard AND w.lane = {lane}
  AND w.batch = mine.batch
"""


class PostgresInbox:
    """A broker's inbox as a `Destination`. Connects at the first chunk.

    ``keep``: stays connected for the next one; see `saf.connections`.
    """

    def __init__(self, name: str, dsn: Dsn, *, keep: bool = False) -> None:
        self.name = name
        self.dsn = dsn
        self.keep = keep
        self._connection: adbc.Connection | None = None
        self._identity = ""

    def identity(self) -> str:
        """The inbox's broker_id."""
        if not self._identity:
            self.connect()
        return self._identity

    def connect(self) -> None:
        """Be connected: what fails here has sent nothing."""
        with self._transaction() as cursor:
            _query(cursor, "SELECT 1")

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored:
        """Store a chunk; see `saf.destinations.Destination`."""
        with self._transaction() as cursor:
            marks = self._lock_watermarks(cursor, chunk)
            rows = beyond(chunk.rows, chunk.number, marks) if exactly_once else chunk.rows
            unknown = self._unknown(cursor, rows, chunk.behind)
            # nobody who was owner before may store what the caller sets aside now
            epoch_only = bool(unknown) or not exactly_once
            self._move_watermarks(cursor, chunk, marks, epoch_only=epoch_only)
            if rows.num_rows and not unknown:
                cursor.adbc_ingest(
                    "inbox", inbox_rows(rows, chunk.source), mode="append", db_schema_name="saf"
                )
            fail_point("mom_insert")
        fail_point("mom_commit")
        if unknown:
            raise UnknownService(f"destination {self.name!r}", unknown, rows)
        return Stored(messages=rows.num_rows, dropped=chunk.rows.num_rows - rows.num_rows)

    def close(self) -> None:
        """Give up the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connections.put(self.keep, "deliver", self.dsn, connection)

    def _lock_watermarks(self, cursor: adbc.Cursor, chunk: Chunk) -> dict[int, tuple[int, int]]:
        """Lock the watermarks of the chunk's shards; return them, (batch, position) by shard."""
        values = _values(chunk)
        marks = _query(cursor, LOCK, values)
        if len(marks) < len(chunk.batch.epochs):
            # in a transaction of its own: who waits for its turn holds nothing
            self._connect().rollback()
            _query(cursor, TAKE_TURN)
            _query(cursor, KNOW_SHARDS, values)
            self._connect().commit()
            marks = _query(cursor, LOCK, values)
        epochs = dict(chunk.batch.epochs)
        newer = [shard for shard, epoch, *_ in marks if epoch > epochs[shard]]
        if newer:
            raise Fenced(f"destination {self.name!r}", newer)
        ahead = [shard for shard, *_, ahead in marks if ahead]
        if ahead and chunk.lane == MAIN:
            raise Ahead(f"destination {self.name!r}", ahead)
        return {shard: (batch, position) for shard, _, batch, position, *_ in marks}

    def _move_watermarks(
        self,
        cursor: adbc.Cursor,
        chunk: Chunk,
        marks: dict[int, tuple[int, int]],
        *,
        epoch_only: bool,
    ) -> None:
        """Move the locked watermarks to the chunk's end: an older owner writes nothing any more."""
        values = _values(chunk)
        values["locked"] = sql.Literal([marks[shard][0] for shard in chunk.batch.shards])
        if epoch_only:
            values |= {"batch": sql.Literal(0), "position": sql.Literal(0)}
        _query(cursor, MOVE, values)

    def _unknown(self, cursor: adbc.Cursor, rows: pa.Table, behind: frozenset[str]) -> list[str]:
        """The services that are addressed and not known here, or as if they were not."""
        addressed = set(pc.unique(rows["to_service"]).to_pylist())
        known = {name for (name,) in _query(cursor, SERVICES)} if addressed else set()
        return sorted(addressed & behind | (addressed - known if known else set()))

    @contextmanager
    def _transaction(self) -> Iterator[adbc.Cursor]:
        """A cursor whose work is committed at the end, or rolled back and the error translated."""
        try:
            connection = self._connect()
            with connection.cursor() as cursor:
                yield cursor
            connection.commit()
        except adbc.Error as error:
            self._drop()
            raise self._translate(error) from None
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        """Close the connection, if there is one; what is not committed is rolled back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connections.drop(connection)

    def _connect(self) -> adbc.Connection:
        if self._connection is None:
            self._connection = connections.take(
                "deliver",
                self.dsn,
                lambda: bulk.connect(self.dsn, "deliver"),
                self._meet,
            )
        return self._connection

    def _meet(self, connection: adbc.Connection) -> None:
        """Make sure of the schema, learn whose it is, and be durable."""
        with connection.cursor() as cursor:
            (exists,) = _query(cursor, HAS_SCHEMA)[0]
            found = _query(cursor, SCHEMA_REVISION) if exists else []
            require_revision(self.dsn.database, found[0][0] if found else None)
            self._identity = str(_query(cursor, BROKER_ID)[0][0])
            _query(cursor, DURABLE)
        connection.commit()

    def _translate(self, error: adbc.Error) -> Exception:
        reason = self.dsn.redact(str(error))
        state = error.sqlstate or ""
        if state == psycopg.errors.InsufficientPrivilege.sqlstate:
            return lacks_right(f"destination {self.name!r}", reason)
        # Only what is said of the rows themselves is a rejection. All else (lost connections, a
        # full disk, a standby, a lock or transaction timeout, a missing table) is the server's,
        # and would make dead letters of everything.
        if state[:2] in OF_THE_ROWS:
            return Rejected(f"destination {self.name!r}", reason)
        return Unavailable(f"destination {self.name!r}", reason, hangs=bulk.hangs(error))


def _values(chunk: Chunk) -> dict[str, sql.Literal]:
    return {
        "source": sql.Literal(str(chunk.source)),
        "shards": sql.Literal(chunk.batch.shards),
        "epochs": sql.Literal([epoch for _, epoch in chunk.batch.epochs]),
        "lane": sql.Literal(chunk.lane),
        "batch": sql.Literal(chunk.number),
        "position": sql.Literal(chunk.position),
        "current": sql.Literal(chunk.batch.number),
        "opened_at": sql.Literal(chunk.batch.opened_at.isoformat()),
    }


def beyond(rows: pa.Table, number: int, stored: dict[int, tuple[int, int]]) -> pa.Table:
    """The rows after what is stored of their shard: (batch, position). Others' shards are fresh.

    ``number`` is the batch of all rows, unless they have a column that says which.
    """
    if not stored or not rows.num_rows:
        return rows
    shards = rows["shard"].to_numpy()
    ids = rows["id"].to_numpy()
    batches = rows["batch"].to_numpy() if "batch" in rows.column_names else np.int64(number)
    marks = np.zeros((max(int(shards.max()), *stored) + 1, 2), dtype=np.int64)
    marks[list(stored)] = list(stored.values())
    batch, position = marks[shards].T
    fresh = (batches > batch) | ((batches == batch) & (ids > position))
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
