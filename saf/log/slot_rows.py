"""The rows of a slot, as an archive writes them: every column, in one snapshot, unordered.

Values that are too large to be read (see `saf.limits`) are left out, because a dead letter has the
whole message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import adbc_driver_manager.dbapi as adbc
import pyarrow as pa
from psycopg import sql

from saf.columns import COLUMNS
from saf.database import Dsn, bulk, the_row, translated
from saf.limits import KEPT
from saf.log.columns import bounded
from saf.log.ring import Slot

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
        raise translated(what, error.sqlstate, dsn.redact(str(error))) from None
