"""A chunk as the body of a request: a stream of Arrow IPC, with all but its rows in the metadata.

Both sides have columns of the same types (`TYPES`), so each side may have its own version of Arrow.
A received body is not trusted: all of it is checked before use. It takes no more memory than its
own bytes: it may not contain compression, values that refer to others, or rows without bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from saf.columns import COLUMNS
from saf.destinations import Chunk
from saf.destinations.https.wire import (
    ROW,
    UNLIKE,
    NotUnderstood,
    moment,
    of_marks,
    read,
    to_marks,
    written,
)
from saf.log.columns import MESSAGES, MOMENT
from saf.log.cursor import Batch
from saf.setaside.lane_columns import LANE

METADATA = b"saf"
REFUSED = (pa.ArrowException, OSError, *UNLIKE)
"""Errors that reading a malformed body raises."""

PARKED = {"batch": pa.int64(), "opened_at": MOMENT}
"""Additional columns of parked messages."""
LANES = dict.fromkeys(LANE, pa.string()) | {"broker": pa.binary()}
TYPES: Mapping[str, pa.DataType] = {
    **{field.name: field.type for field in MESSAGES},
    **PARKED,
    **LANES,
}
NEEDED = ("id", "shard")
NEVER_NULL = (*NEEDED, *PARKED, *LANES, "message_id", "to_service", "body", "created_at")


@dataclass(frozen=True, kw_only=True)
class Given:
    """A forwarder's request."""

    chunk: Chunk
    store: bool
    """True: store the chunk. False: only return its marks."""
    exactly_once: bool


def body_of(chunk: Chunk, *, store: bool, exactly_once: bool = False) -> pa.Buffer:
    """Return a chunk as the body of a request; it contains the messages only to ``store`` them."""
    rows = chunk.rows if store else chunk.rows.drop_columns(list(COLUMNS))
    batch = chunk.batch
    metadata = written(
        store=store,
        exactly_once=exactly_once,
        source=str(chunk.source),
        batch=batch.number,
        opened_at=batch.opened_at.isoformat(),
        set_aside_at=[
            [shard, [time.isoformat() for time in batch.set_aside_at[shard]]]
            for shard in batch.shards
            if shard in batch.set_aside_at
        ],
        epochs=batch.epochs,
        prefix=chunk.prefix,
        known=of_marks(chunk.known),
        behind=sorted(chunk.behind),
    )
    rows = rows.replace_schema_metadata({METADATA: metadata})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return sink.getvalue()


def chunk_of(body: bytes | bytearray) -> Given:
    """Parse the body of a request; the chunk's rows get a column `ROW`.

    Raises:
        NotUnderstood: the body is not a chunk.
    """
    try:
        rows, metadata = _rows_of(body)
        message = read(metadata[METADATA])
        request = _given(message, _whole(rows, messages=bool(message["store"])))
    except NotUnderstood:
        raise
    except REFUSED as error:
        raise NotUnderstood(f"not a chunk: {type(error).__name__}") from None
    shards = {*pc.unique(request.chunk.rows["shard"]).to_pylist()}
    if not shards <= {*request.chunk.batch.shards}:
        raise NotUnderstood("it has messages of shards that are not in its batch")
    return request


def _rows_of(body: bytes | bytearray) -> tuple[pa.Table, Mapping[bytes, bytes]]:
    """Return the rows of a stream, with columns that a chunk may have, and its metadata."""
    buffer = pa.py_buffer(body)
    stream = pa.ipc.open_stream(buffer)
    columns = [name for name in stream.schema.names if name in TYPES]
    for name in columns:
        if stream.schema.field(name).type != TYPES[name]:
            raise NotUnderstood(f"its column {name!r} is {stream.schema.field(name).type}")
    for message in pa.ipc.MessageReader.open_stream(buffer):
        if message.type != "schema" and _may_grow(message.type, bytes(message.metadata)):
            raise NotUnderstood("it has more than plain rows, such as dictionaries or compression")
    rows = stream.read_all().select(columns)
    rows.validate(full=True)
    if rows.nbytes > len(body):  # columns share bytes
        raise NotUnderstood(f"its rows have {rows.nbytes:,} bytes, and it has {len(body):,}")
    return rows, stream.schema.metadata or {}


MORE, HEADER, COMPRESSION = 4, 2, 3
"""Field numbers in Arrow's Message.fbs: a message's own metadata, where older versions declare a
compression; its record batch; and the record batch's compression."""


def _may_grow(kind: str, message: bytes) -> bool:
    """Return True if a message's flatbuffer describes more than a plain record batch."""

    def number(at: int, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(message[at : at + size], "little", signed=signed)

    def field(table: int, index: int) -> int:
        """Return the position of a table's field; 0 if the table lacks it."""
        described = table - number(table, 4, signed=True)
        place = 4 + 2 * index
        offset = number(described + place, 2) if place < number(described, 2) else 0
        return offset and table + offset

    root = number(0, 4)
    at = field(root, HEADER)
    batch = at + number(at, 4)
    return kind != "record batch" or bool(field(root, MORE) or field(batch, COMPRESSION))


def _whole(rows: pa.Table, *, messages: bool) -> pa.Table:
    """Check that rows have everything that a chunk needs; return them with `ROW`."""
    columns: dict[str, Any] = {name: rows[name] for name in rows.column_names}
    required = {*NEEDED, *(COLUMNS if messages else ())}
    for group in (PARKED, LANES):
        required |= {*group} if {*group} & columns.keys() else set()
    if missing := required - columns.keys():
        raise NotUnderstood(f"it has no column {sorted(missing)[0]!r}")
    for name in NEVER_NULL:
        if name in columns and columns[name].null_count:
            raise NotUnderstood(f"a row has no {name}")
    return pa.table({**columns, ROW: pa.array(range(rows.num_rows), pa.int32())})


def _given(message: Mapping[str, Any], rows: pa.Table) -> Given:
    opened_at = moment(message["opened_at"])
    if opened_at is None:
        raise NotUnderstood("the opening time of its batch is missing")
    chunk = Chunk(
        source=UUID(message["source"]),
        batch=Batch(
            log="outbox",
            subscription_id=0,
            owner=UUID(int=0),
            number=int(message["batch"]),
            done="",
            open="",
            position=0,
            route_version=None,
            opened_at=opened_at,
            set_aside_at={
                int(shard): [time for time in map(moment, times) if time is not None]
                for shard, times in message.get("set_aside_at", ())  # older forwarders send none
            },
            epochs=tuple((int(shard), int(epoch)) for shard, epoch in message["epochs"]),
        ),
        rows=rows,
        prefix=str(message["prefix"]),
        known=to_marks(message["known"]),
        behind=frozenset(map(str, message["behind"])),
    )
    return Given(
        chunk=chunk, store=bool(message["store"]), exactly_once=bool(message["exactly_once"])
    )
