"""Storing: the transaction of the inbox's database that stores records and moves their mark.

It is the transaction of a destination (`saf.destinations.postgresql.inbox`), with the position of a
record as its batch and id: lock the mark; refuse an older epoch; drop what is stored already; COPY
the rest into the inbox; move the mark. In the same transaction, records that no inbox takes become
dead letters, and the owner is checked once more: `saf source continue` may have removed the source.
For a topic without places, the ids of the messages join a window (`saf.sources.window`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.columns import COLUMNS, MESSAGE
from saf.database import array, bulk
from saf.destinations import Chunk
from saf.destinations.marks import Mark, Place
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.errors import Fenced
from saf.log.cursor import Batch
from saf.log.shards import shard_expression
from saf.sources import BEGINNING, Position
from saf.sources.decoding import ERROR, REASON
from saf.sources.settings import WindowBounds

# The row lock lasts until the commit, so that neither a new owner nor an operator comes in between
OWNED = """
UPDATE saf.source_shard
SET added = {added}, start_batch = {batch}, start_position = {position}
WHERE source = {source}::uuid AND shard = {shard} AND owner = {owner}::uuid AND epoch = {epoch}
RETURNING shard
"""

# One row of ids for each chunk; rows beyond the bounds go in the same statement
REMEMBER = """
WITH forgotten AS (
    DELETE FROM saf.source_window
    WHERE source = {source}::uuid AND shard = {shard}
      AND (number <= {oldest} OR stored_at < now() - make_interval(secs => {seconds})))
INSERT INTO saf.source_window (source, shard, number, ids)
VALUES ({source}::uuid, {shard}, {number}, {ids}::uuid[])
"""

_NAMES = ", ".join(COLUMNS)
_TYPES = {column.name: column.type for column in MESSAGE}

# A message's shard at the inbox is that of its key there, as for messages that handlers reject
BURY = f"""
INSERT INTO saf.dead_letter (subscription_id, shard, id, reason, error, {_NAMES})
SELECT {{subscription_id}}, {shard_expression("(SELECT shards FROM saf.broker)")}, 0, reason, error,
       {_NAMES}
FROM (VALUES {{rows}}) AS dead (reason, error, {_NAMES})
"""


class SourceInbox(PostgresInbox):
    """An inbox that stores a source's records."""

    def __init__(
        self,
        *given: Any,
        owner: UUID,
        subscription_id: int,
        window: WindowBounds | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*given, **options)
        self.window = window
        """Bounds of the window of ids, for a topic without places."""
        self.owner = owner
        self.subscription_id = subscription_id
        """The subscription that gets the dead letters."""
        self.end: Position = BEGINNING
        """Position up to which the chunk reads; records that no reader gets may follow its last."""
        self.added = 0
        """Number of messages up to that position, as the topic's broker counts them."""
        self.dead = 0
        """Number of dead letters that the last chunk has made."""

    def _insert(self, cursor: bulk.BulkCursor, chunk: Chunk, rows: pa.Table) -> None:
        self._of_rows = False  # until rows are sent
        ((shard, epoch),) = chunk.batch.epochs
        owned = sql.SQL(OWNED).format(
            added=sql.Literal(self.added),
            batch=sql.Literal(self.end[0]),
            position=sql.Literal(self.end[1]),
            source=sql.Literal(str(chunk.source)),
            shard=sql.Literal(shard),
            owner=sql.Literal(str(self.owner)),
            epoch=sql.Literal(epoch),
        )
        if not cursor.ask(owned.as_string(None)):
            raise Fenced(f"destination {self.name!r}", [shard])
        if self.window is not None and self.window.messages:
            cursor.update(self._remembering(chunk.source, shard, rows, self.window))
        is_dead = rows[REASON].is_valid()
        self.dead = int(pc.sum(is_dead).as_py() or 0)
        self._of_rows = True
        good = rows.filter(pc.invert(is_dead)) if self.dead else rows
        if good.num_rows:
            super()._insert(cursor, chunk, good)
        if self.dead:
            cursor.update(_burying(self.subscription_id, rows.filter(is_dead)))

    def _remembering(self, source: UUID, shard: int, rows: pa.Table, window: WindowBounds) -> str:
        """Return the statement that adds the ids of rows to the window."""
        number = self.end[1]
        statement = sql.SQL(REMEMBER).format(
            source=sql.Literal(str(source)),
            shard=sql.Literal(shard),
            number=sql.Literal(number),
            oldest=sql.Literal(number - window.messages),
            seconds=sql.Literal(window.seconds),
            ids=sql.Literal(array(id_.hex() for id_ in rows["message_id"].to_pylist())),
        )
        return statement.as_string(None)


def chunk_of(
    *,
    source: UUID,
    owner: UUID,
    rows: pa.Table,
    epoch: tuple[int, int],
    known: Mapping[Place, Mark],
    opened_at: datetime,
) -> Chunk:
    """Return the rows of one shard as a chunk for an inbox.

    Args:
        source: the source.
        owner: the member that owns the shard.
        rows: the rows, with the columns `saf.sources.decoding.SCHEMA`.
        epoch: the shard and its epoch.
        known: the marks that the member knows.
        opened_at: when the member began to own the shard.
    """
    batch = Batch(
        log="source", subscription_id=0, owner=owner, number=0, done="", open="", position=0,
        route_version=None, opened_at=opened_at, epochs=(epoch,),
    )  # fmt: skip
    return Chunk(source=source, batch=batch, rows=rows, known=known)


def _burying(subscription_id: int, rows: pa.Table) -> str:
    values = sql.SQL(", ").join(
        sql.SQL("({})").format(
            sql.SQL(", ").join(
                [
                    *(sql.Literal(row[name]) for name in (REASON, ERROR)),
                    *(_value(row[name], _TYPES[name]) for name in COLUMNS),
                ]
            )
        )
        for row in rows.to_pylist()
    )
    statement = sql.SQL(BURY).format(subscription_id=sql.Literal(subscription_id), rows=values)
    return statement.as_string(None)


def _value(value: Any, kind: str) -> sql.Composable:
    """Return a value as a literal of its type, because a VALUES list would guess the type."""
    if isinstance(value, bytes):
        value = str(UUID(bytes=value)) if kind == "uuid" else f"\\x{value.hex()}"
    elif isinstance(value, datetime):
        value = value.isoformat()
    return sql.SQL("CAST({} AS {})").format(sql.Literal(value), sql.SQL(kind))
