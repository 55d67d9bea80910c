"""Another broker's inbox, filled by COPY, exactly once.

A chunk is stored in one transaction: lock the watermarks of the chunk's source shards; refuse an
older epoch (`saf.destinations.places.guarded`), and marks that differ from those that the source
remembers (`saf.destinations.marks`); drop the rows at or below (batch, position); COPY the rest;
move the watermarks; commit. Messages for another broker are refused before anything is stored.

Because a batch never changes, the watermark alone recognises a chunk that was stored before its
acknowledgement got lost. It needs no index over message ids, and no table that grows.

Arrow data is passed on unchanged: the ADBC driver writes it as COPY binary, inside the transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import adbc_driver_manager.dbapi as adbc
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.broker import whole
from saf.columns import COLUMNS, JSON, UUIDS
from saf.database import (
    HAS_SCHEMA,
    SCHEMA_REVISION,
    Dsn,
    Meaning,
    array,
    bulk,
    connections,
    meaning,
    require_revision,
    require_schema,
    the_row,
    translated,
)
from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.marks import Mark, Place
from saf.destinations.places import (
    beyond,
    for_others,
    guarded,
    last_of,
    of_brokers,
    of_services,
    refuse,
)
from saf.destinations.postgresql.little import DURABLE
from saf.errors import Rejected, Restored, Unavailable
from saf.failpoints import fail_point
from saf.log import lineage
from saf.log.shards import LAST

# Schema revision, identity, and whether messages may be stored
MEETING = f"""
(SELECT version_num FROM saf.alembic_version), broker_id::text, ARRAY({lineage.MOVED}), {DURABLE}
"""
MEET = f"SELECT {MEETING} FROM saf.broker"

# One delivery at a time: a second watermark of a place is refused, so the second delivery must see
# the first one's
TAKE_TURN = "SELECT pg_advisory_xact_lock(hashtextextended('saf.watermark', 0))"
KNOW_PLACES = """
INSERT INTO saf.watermark (source, shard, lane, epoch, batch, position)
SELECT {source}::uuid, shard, lane, 0, 0, 0
FROM unnest({lanes}::text[], {shards}::smallint[]) AS s (lane, shard)
WHERE NOT EXISTS (SELECT FROM saf.watermark w
                  WHERE w.source = {source}::uuid AND w.shard = s.shard AND w.lane = s.lane)
"""

# In the order of the places, so that two deliveries wait for each other instead of deadlocking. The
# index finds the newest version first; see saf.log.shards.newest.
LOCK = f"""
SELECT w.lane, w.shard, epoch, batch, position, opened_at, acknowledged, set_aside_at
FROM unnest({{lanes}}::text[], {{shards}}::smallint[]) AS s (lane, shard)
CROSS JOIN LATERAL (
    SELECT shard, lane, epoch, batch, position, opened_at, acknowledged, set_aside_at, source
    FROM saf.watermark
    WHERE (source, shard, lane, batch) <= ({{source}}::uuid, s.shard, s.lane, {LAST})
    ORDER BY source DESC, shard DESC, lane DESC, batch DESC LIMIT 1 FOR UPDATE
) AS w
WHERE w.source = {{source}}::uuid AND w.shard = s.shard AND w.lane = s.lane
"""

# Everything to check before a chunk is stored; the broker may have changed since the connection
CONTACT = f"""
WITH locked AS ({{locked}})
SELECT {MEETING}, ARRAY(SELECT name FROM saf.service), places.*
FROM saf.broker, (
    SELECT array_agg(lane), array_agg(shard), array_agg(epoch), array_agg(batch),
           array_agg(position), array_agg(opened_at), array_agg(acknowledged),
           array_agg(set_aside_at)
    FROM locked) AS places
"""

# The epoch rises even where no row is stored, so that the owner before is fenced
MOVE = """
UPDATE saf.watermark w SET epoch = mine.epoch, batch = mine.batch, position = mine.position,
       opened_at = mine.opened_at, acknowledged = mine.acknowledged,
       set_aside_at = mine.set_aside_at
FROM unnest({lanes}::text[], {shards}::smallint[], {epochs}::bigint[], {locked}::bigint[],
            {batches}::bigint[], {positions}::bigint[], {moments}::timestamptz[],
            {acknowledged}::boolean[], {asides}::timestamptz[])
     AS mine (lane, shard, epoch, locked, batch, position, opened_at, acknowledged, set_aside_at)
WHERE w.source = {source}::uuid AND w.shard = mine.shard AND w.lane = mine.lane
  AND w.batch = mine.locked
"""

IDENTITY = "broker_id"
"""Key of what a connection has learnt about its destination."""


class PostgresInbox:
    """A broker's inbox as a `Destination`, which connects at the first chunk.

    With ``keep``, its connection is kept for the next task; see `saf.database.connections`. If
    ``services`` is given, all other services count as unknown.
    """

    def __init__(
        self,
        name: str,
        dsn: Dsn,
        *,
        keep: bool = False,
        services: Collection[str] | None = None,
    ) -> None:
        self.name = name
        self.dsn = dsn
        self.keep = keep
        self.services = services
        self._connection: bulk.Connection | None = None
        self._identity: UUID | None = None
        self._of_rows = False
        """True once rows were sent, so that a server error may be about one of them."""

    def identity(self) -> UUID:
        """Return the inbox's broker_id."""
        if self._identity is None:
            self.connect()
        assert self._identity is not None  # noqa: S101 - set by connect()
        return self._identity

    def connect(self) -> None:
        """Connect, and read the inbox's identity. If this fails, nothing was sent."""
        with self._transaction():
            pass

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        """Store a chunk; see `saf.destinations.Destination`."""
        with self._transaction() as cursor:
            services, epochs, marks = self._lock_watermarks(cursor, chunk)
            rows = chunk.rows
            if exactly_once:
                stored = {place: mark.number for place, mark in marks.items()}
                rows = beyond(rows, chunk.batch.number, stored, chunk.prefix)
            brokers = for_others(rows, self.identity())
            unknown = [] if brokers else self._unknown(services, rows, chunk.behind)
            # the caller sets these messages aside now: no previous owner may store them any more
            moved = {} if brokers or unknown else last_of(chunk, marks)
            self._move_watermarks(cursor, chunk, epochs, marks, moved)
            if rows.num_rows and not (brokers or unknown):
                self._of_rows = True
                self._insert(cursor, chunk, rows)
            fail_point("mom_insert")
        fail_point("mom_commit")
        if brokers:
            return of_brokers(f"destination {self.name!r}", str(self.identity()), brokers, rows)
        if unknown:
            where = f"destination {self.name!r}"
            return of_services(where, unknown, rows, known=services, broker=self.name)
        dropped = chunk.rows.num_rows - rows.num_rows
        return Stored(messages=rows.num_rows, dropped=dropped, marks=moved)

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:
        """Return how far the lanes and shards of a chunk are stored; see `Destination.marks`."""
        with self._transaction() as cursor:
            return self._lock_watermarks(cursor, chunk)[2]

    def close(self) -> None:
        """Close the connection, if one is open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connections.put(self.keep, "deliver", self.dsn, connection)

    def _insert(self, cursor: bulk.BulkCursor, chunk: Chunk, rows: pa.Table) -> None:
        """Insert those rows of a chunk that are not stored yet, in the transaction of its marks."""
        cursor.adbc_ingest(
            "inbox", inbox_rows(rows, chunk.source), mode="append", db_schema_name="saf"
        )

    def _lock_watermarks(
        self, cursor: bulk.BulkCursor, chunk: Chunk
    ) -> tuple[set[str], dict[Place, int], dict[Place, Mark]]:
        """Lock the watermarks that a chunk needs.

        Return the services that live there, and the epochs and marks of the watermarks.
        """
        places = guarded(chunk)
        values = _values(chunk, places)
        services, watermarks = self._contact(cursor, values)
        if len(watermarks) < len(places):
            # in a transaction of its own, so that waiting for the turn holds no other lock
            self._connect().rollback()
            cursor.ask(TAKE_TURN)
            cursor.update(_text(KNOW_PLACES, values))
            self._connect().commit()
            services, watermarks = self._contact(cursor, values)
        epochs = {(lane, shard): epoch for lane, shard, epoch, *_ in watermarks}
        marks = {(lane, shard): Mark.of(*mark) for lane, shard, _, *mark in watermarks}
        refuse(f"destination {self.name!r}", chunk, epochs, marks)
        return services, epochs, marks

    def _contact(
        self, cursor: bulk.BulkCursor, values: dict[str, sql.Literal]
    ) -> tuple[set[str], list[tuple[Any, ...]]]:
        """Return the services, and the rows of the watermarks, which are now locked."""
        locked = sql.SQL(LOCK).format(**values)
        contact = cursor.ask(_text(CONTACT, {"locked": locked}))
        revision, identity, moved, _, services, *columns = the_row(contact, self.dsn.database)
        self._is(self._meets(revision, identity, moved))
        return set(services), list(zip(*(column or () for column in columns), strict=True))

    def _move_watermarks(
        self,
        cursor: bulk.BulkCursor,
        chunk: Chunk,
        epochs: Mapping[Place, int],
        marks: Mapping[Place, Mark],
        moved: Mapping[Place, Mark],
    ) -> None:
        """Move the locked watermarks. Afterwards, an older owner cannot write."""
        own = dict(chunk.batch.epochs)
        new = {
            place: moved.get(place, mark)
            for place, mark in marks.items()
            if epochs[place] != own[place[1]] or moved.get(place, mark) != mark
        }
        if not new:
            return
        columns: dict[str, Iterable[object]] = {
            "epochs": [own[shard] for _, shard in new],
            "locked": [marks[place].batch for place in new],
            "batches": [mark.batch for mark in new.values()],
            "positions": [mark.position for mark in new.values()],
            "moments": [mark.opened_at and mark.opened_at.isoformat() for mark in new.values()],
            "acknowledged": [mark.acknowledged for mark in new.values()],
            "asides": [m.set_aside_at and m.set_aside_at.isoformat() for m in new.values()],
        }
        literals = {name: sql.Literal(array(column)) for name, column in columns.items()}
        cursor.update(_text(MOVE, _values(chunk, list(new)) | literals))

    def _unknown(self, known: set[str], rows: pa.Table, behind: frozenset[str]) -> list[str]:
        """Return the addressed services that do not live there, and those ``behind``."""
        addressed = set(pc.unique(rows["to_service"]).to_pylist())
        unknown = addressed - known if known else set()
        if self.services is not None:
            unknown |= addressed - {*self.services}
        return sorted(addressed & behind | unknown)

    @contextmanager
    def _transaction(self) -> Iterator[bulk.BulkCursor]:
        """Yield a cursor; commit at the end, or roll back and translate the error."""
        self._of_rows = False
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
        """Close the connection, if one is open; uncommitted work is rolled back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connections.drop(connection)

    def _connect(self) -> bulk.Connection:
        if self._connection is None:
            self._connection = connections.take(
                "deliver", self.dsn, self._meet, bulk.Connection.refuse_lost
            )
            self._is(self._connection.learnt[IDENTITY])
        return self._connection

    def _meet(self) -> bulk.Connection:
        """Return a new connection to a broker that is fit to store messages."""
        connection = bulk.connect(self.dsn, "deliver", f"destination {self.name!r}")
        try:
            with connection.cursor() as cursor:
                try:
                    identity = self._examine(cursor)
                except adbc.Error as error:
                    connection.rollback()
                    match meaning(error.sqlstate):
                        case Meaning.INCOMPLETE:
                            self._refuse_schema(cursor)
                        case Meaning.NO_RIGHT:
                            whole.refuse(cursor.ask(whole.POLICIES), self.dsn.database)
                    raise
            connection.learnt[IDENTITY] = identity
            connection.commit()
        except BaseException:
            connections.drop(connection)
            raise
        return connection

    def _examine(self, cursor: bulk.BulkCursor) -> UUID:
        """Return the inbox's broker_id, unless the broker is unhealthy; see `saf.broker.health`."""
        database = self.dsn.database
        revision, identity, moved, _ = the_row(cursor.ask(MEET), database)
        broker = self._meets(revision, identity, moved)
        whole.refuse(cursor.ask(whole.BOTH), database)
        self._refuse_moved([what for _, what in cursor.ask(lineage.asked("inbox"))])
        return broker

    def _meets(self, revision: str, identity: str, moved: list[str]) -> UUID:
        """Return the inbox's broker_id, unless nothing must be stored there now."""
        require_revision(self.dsn.database, revision)
        self._refuse_moved(moved)
        return UUID(identity)

    def _refuse_moved(self, why: list[str]) -> None:
        if why:
            raise Restored(self.dsn.database, f"destination {self.name!r}", why)

    def _is(self, identity: UUID) -> None:
        """Raise if it is another broker than before, whose remembered marks are others."""
        if self._identity not in (None, identity):
            raise Unavailable(f"destination {self.name!r}", "it is another broker than before")
        self._identity = identity

    def _refuse_schema(self, cursor: bulk.BulkCursor) -> None:
        """Raise if the schema does not exist, or has another revision."""
        ((exists,),) = cursor.ask(HAS_SCHEMA)
        rows = cursor.ask(SCHEMA_REVISION) if exists else []
        require_schema(self.dsn.database, exists, rows)

    def _translate(self, error: adbc.Error) -> Exception:
        reason = self.dsn.reason(error)
        # An error is a rejection only if it is about the rows themselves. Everything else concerns
        # the server: a lost connection, a full disk, a standby, a lock or transaction timeout, a
        # missing table, a constraint of saf.watermark. It must not make dead letters.
        if self._of_rows and meaning(error.sqlstate) is Meaning.OF_THE_ROWS:
            return Rejected(f"destination {self.name!r}", reason)
        return translated(f"destination {self.name!r}", error.sqlstate, reason)


def _values(chunk: Chunk, places: Sequence[Place]) -> dict[str, sql.Literal]:
    return {
        "source": sql.Literal(str(chunk.source)),
        "lanes": sql.Literal(array(lane for lane, _ in places)),
        "shards": sql.Literal(array(shard for _, shard in places)),
    }


def inbox_rows(rows: pa.Table, source: UUID) -> pa.Table:
    """Return rows with the columns of `saf.inbox`; a column without any value is left out.

    COPY needs Arrow types that identify the PostgreSQL type.
    """
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


def _text(statement: str, values: Mapping[str, sql.Composable]) -> str:
    return sql.SQL(statement).format(**values).as_string(None)
