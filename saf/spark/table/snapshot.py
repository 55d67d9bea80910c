"""The moment of a read: one snapshot for all of its partitions, taken while Spark plans.

The snapshot is a text, and holds nothing at the source: no transaction, no lock. A row that it
contains stays in it, and rows never change. So each partition, whenever and however often its task
runs, reads the same rows; rows committed later are not among them (see `saf.log.cursor`).

Only a purge removes rows: it empties a whole slot of the ring by giving the slot a new file. So the
files are recorded with the snapshot, while a lock keeps purges out. A task takes the same lock, and
compares the files: see `saf.spark.table.part`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql

from saf.broker import health
from saf.database import Dsn, check_schema, fetch, unavailable_if_lost
from saf.engine.survey import WINDOW_BYTES
from saf.limits import KEPT
from saf.log.cursor import Batch
from saf.log.offset import BEGINNING
from saf.log.ring import SLOTS
from saf.log.side import KEEP_UNPURGED

DEEP_BYTES = 4 * WINDOW_BYTES
"""Log size above which rows are read in windows (see `saf.engine.windows`), not sorted at the
source."""

LOCK = KEEP_UNPURGED
"""Keeps purges out until the end of the transaction."""

FILES = f"""
SELECT array_agg(pg_relation_filenode(('saf.{{log}}_' || slot)::regclass)::bigint ORDER BY slot)
FROM generate_series(0, {SLOTS - 1}) AS slot
"""

STORAGE = f"SELECT {KEPT}, ({FILES})"

NOW = f"""
SELECT pg_current_snapshot()::text, (SELECT shards FROM saf.broker), {KEPT}, ({FILES}),
       (SELECT sum(pg_table_size(('saf.{{log}}_' || slot)::regclass))
        FROM generate_series(0, {SLOTS - 1}) AS slot) >= {DEEP_BYTES}
"""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A log at one moment."""

    log: str
    snapshot: str
    """pg_snapshot as text."""
    shards: int
    """The broker's number of shards."""
    kept: bool
    """True if the log's constraint holds for all rows; see `saf.limits.KEPT`."""
    files: tuple[int, ...]
    """Storage identifier of each slot."""
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
        connection.execute(sql.SQL(LOCK).format(log=sql.Identifier(log)))
        ((snapshot, shards, kept, files, deep),) = fetch(connection, NOW.format(log=log).encode())
        if meanwhile is not None:
            meanwhile(connection)
        connection.rollback()
    return Snapshot(
        log=log,
        snapshot=snapshot,
        shards=shards,
        kept=bool(kept),
        files=tuple(files),
        deep=bool(deep),
    )


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Facts about a log's tables that a task needs."""

    kept: bool
    files: tuple[int, ...]


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
