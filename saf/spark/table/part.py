"""Partitions of a read: the rows of some shards in a snapshot, ordered by id, for one task each.

All partitions of a batch read have one snapshot, which `take` takes while Spark plans. The snapshot
is a text, and holds nothing at the source: no transaction, no lock. A row that it contains stays in
it, and rows never change. So each partition, whenever and however often its task runs, reads the
same rows; rows committed later are not among them (see `saf.log.cursor`). Reading changes nothing,
so a task may be retried, or run twice. A stream's partitions lie between two of its offsets instead
(see `saf.spark.table.stream`); `storage` records the files for them.

Only a purge removes rows: it empties a whole slot of the ring by giving the slot a new file. So the
files are recorded with the snapshot, while a lock keeps purges out. A task takes the same lock, and
compares the files. From this check until the last row is returned, the lock prevents purges of the
remaining rows. If a slot was purged since the snapshot, the task fails; it never returns fewer
rows. Only a stream's task continues if its subscription still retains the whole batch, because then
the purge took older rows only.

The rows of a large log are read in windows (see `saf.engine.source`), not sorted at the source. If
windows are impossible, or would hold back too many rows, the remaining rows are sorted at the
source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark.sql.datasource import InputPartition

from saf.broker import health
from saf.database import Dsn, bulk, check_schema, fetch, unavailable_if_lost
from saf.engine.source import NotInWindows, bounded, given, in_order, reading
from saf.engine.survey import WINDOW_BYTES, NotSurveyed, Window, survey
from saf.errors import PurgedMeanwhile
from saf.limits import KEPT
from saf.log.columns import completed
from saf.log.cursor import Batch
from saf.log.offset import BEGINNING, shows_all_of
from saf.log.ring import SLOTS
from saf.log.side import KEEP_UNPURGED
from saf.spark.table.query import Query, shaped

DEEP_BYTES = 4 * WINDOW_BYTES
"""Log size above which rows are read in windows (see `saf.engine.source`), not sorted at the
source."""

LOCK = KEEP_UNPURGED
"""Keeps purges out until the end of the transaction."""

FILES = f"""
SELECT array_agg(pg_relation_filenode(('saf.{{log}}_' || slot)::regclass)::bigint ORDER BY slot)
FROM generate_series(0, {SLOTS - 1}) AS slot
"""

STORAGE = f"SELECT {KEPT}, ({FILES})"

NOW = f"""
SELECT pg_current_snapshot()::text, (SELECT shards FROM saf.broker),
       (SELECT sum(pg_table_size(('saf.{{log}}_' || slot)::regclass))
        FROM generate_series(0, {SLOTS - 1}) AS slot) >= {DEEP_BYTES}
"""

COMMITTED = """
SELECT shard, done::text FROM saf.cursor
WHERE subscription_id = {subscription_id} AND shard IN ({shards})
"""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A log's tables; see `storage`."""

    kept: bool
    """True if the log's constraint holds for all rows; see `saf.limits.KEPT`."""
    files: tuple[int, ...]
    """Identifier of each slot's file."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A log at one moment."""

    log: str
    snapshot: str
    """pg_snapshot as text."""
    shards: int
    """The broker's number of shards."""
    storage: Storage
    deep: bool

    def batch(self, shards: list[int]) -> Batch:
        """Return all rows of some shards as a read-only batch without an owner."""
        return Batch(
            log=self.log,
            subscription_id=0,
            owner=UUID(int=0),
            number=0,
            done=BEGINNING,
            open=self.snapshot,
            position=0,
            route_version=None,
            opened_at=datetime.now(UTC),
            epochs=tuple((shard, 0) for shard in shards),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Part(InputPartition):
    """Everything that one task needs. Spark passes it to that task only, and never shows it."""

    what: str
    """The database, for error messages."""
    broker: str
    """The broker's name in saf.toml, or the place of its dsn."""
    dsn: Dsn
    batch: Batch
    storage: Storage
    """As at the time of the snapshot."""
    deep: bool
    """True if the log is too large to sort its rows at the source."""


def take(
    what: str,
    dsn: Dsn,
    log: str,
    meanwhile: Callable[[psycopg.Connection[Any]], None] | None = None,
) -> Snapshot:
    """Take a snapshot of a log, in a transaction that has ended when this returns.

    ``meanwhile`` is called in this transaction. It sees the snapshot's rows, and rows committed
    later, because no purge can remove any.

    Raises:
        Unavailable: the database does not answer.
        SchemaError: the database is not a broker of this version, or was restored.
    """
    with unavailable_if_lost(what), dsn.connect(role="read") as connection:
        connection.read_only = True
        check(connection, log)
        stored = storage(connection, log)
        ((snapshot, shards, deep),) = fetch(connection, NOW.format(log=log).encode())
        if meanwhile is not None:
            meanwhile(connection)
        connection.rollback()
    return Snapshot(log=log, snapshot=snapshot, shards=shards, storage=stored, deep=bool(deep))


def storage(connection: psycopg.Connection[Any], log: str) -> Storage:
    """Return identifiers of a log's tables; no purge changes them until the transaction ends."""
    connection.execute(sql.SQL(LOCK).format(log=sql.Identifier(log)))
    ((kept, files),) = fetch(connection, STORAGE.format(log=log).encode())
    return Storage(kept=bool(kept), files=tuple(files))


def check(connection: psycopg.Connection[Any], log: str | None) -> None:
    """Check that a database can be read by snapshots; see `saf.broker.health.refuse`.

    Raises:
        SchemaError: the database is not a broker of this version, or was restored.
    """
    check_schema(connection)
    health.refuse(connection, log)


def read(part: Part, query: Query) -> Iterator[pa.RecordBatch]:
    """Yield a partition's rows in the requested schema.

    Raises:
        PurgedMeanwhile: some of the rows were purged.
        Unavailable: the database does not answer, or stops answering.
    """
    for rows in _rows(part, query):
        yield shaped(rows, query.asked, part.broker)


def _rows(part: Part, query: Query) -> Iterator[pa.RecordBatch]:
    rest = part.batch
    if part.deep:
        try:
            for rows in _in_windows(part, query):
                yield rows
                rest = replace(rest, position=int(rows["id"][-1].as_py()))
        except (NotInWindows, NotSurveyed):
            pass
        else:
            return
    with _unpurged(part) as cursor:
        sorted_ = f"{query.of(rest.rows(query.columns(kept=part.storage.kept)))} ORDER BY id"
        yield from given(cursor, sorted_)


def _in_windows(part: Part, query: Query) -> Iterator[pa.RecordBatch]:
    batch, common = part.batch, query.has_seldom
    columns = query.columns(kept=part.storage.kept)
    few = query.columns(kept=part.storage.kept, common=True)
    with _unpurged(part) as cursor:

        def within(window: Window) -> Iterable[pa.RecordBatch]:
            nonlocal common
            if common:
                rows = bounded(given(cursor, query.of(window.rows(batch, few), common=True)))
                whole = [
                    complete
                    for piece in rows
                    if (complete := completed(piece, query.names)) is not None
                ]
                if len(whole) == len(rows):
                    return whole
                common = False  # expect the same columns in the other windows
            return bounded(given(cursor, query.of(window.rows(batch, columns))))

        yield from in_order(survey(cursor, batch), within)


@contextmanager
def _unpurged(part: Part) -> Iterator[bulk.BulkCursor]:
    """Yield a cursor of a transaction in which all rows exist, and cannot be purged."""
    log = part.batch.log
    with reading(part.what, part.dsn) as cursor:
        cursor.execute(sql.SQL(LOCK).format(log=sql.Identifier(log)).as_string(None))
        cursor.execute(FILES.format(log=log))
        ((files,),) = cursor.fetchall()
        purged = [
            slot
            for slot, (now, before) in enumerate(zip(files, part.storage.files, strict=True))
            if now != before
        ]
        if purged and not _keeps(cursor, part.batch):
            raise PurgedMeanwhile(part.what, log, purged)
        yield cursor


def _keeps(cursor: bulk.BulkCursor, batch: Batch) -> bool:
    """Return whether a stream's subscription retains a whole batch: only older rows were purged."""
    shards = ", ".join(map(str, batch.shards))
    cursor.execute(COMMITTED.format(subscription_id=batch.subscription_id, shards=shards))
    committed = cursor.fetchall()
    return {shard for shard, _ in committed} == {*batch.shards} and all(
        shows_all_of(batch.done, done) for _, done in committed
    )
