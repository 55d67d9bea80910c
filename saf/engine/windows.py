"""A deep backlog in the order of its ids, without sorting it at the source.

A log is stored nearly in the order of its ids, but not quite, because those who insert at the same
time fill different pages. To sort millions of rows takes the server as long as to read them, and
needs files as large as they are. So a deep batch is read in windows of some pages each. First the
lowest id in each window is surveyed, and the windows are read in the order of these ids. So when a
window ends, all rows below the lowest id of the next window are known, and are sorted here. The
others are held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from psycopg import sql

from saf.log.cursor import Batch, begun_since, since
from saf.log.ring import SLOT_ROWS, SLOTS

WINDOW_BYTES = 8 * 1024 * 1024
"""The size of a window, in bytes, as it is stored."""

HELD_BYTES = 64 * 1024 * 1024
"""The most bytes that may be held back; also in one window, whose bodies may be compressed."""

AT_ONCE = 256
"""How many windows one statement surveys."""

BATCH_BYTES = 4 * 1024 * 1024
"""How many bytes of sorted rows are given on at a time."""

# Only the index can say quickly that a full slot holds nothing of the batch. To read some pages the
# index is of no use, whatever the planner expects. A query each, because ADBC prepares statements.
BY_INDEX = """
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       current_setting('transaction_isolation')
"""
BY_PAGES = "SELECT set_config('enable_indexscan', 'off', true)"
ISOLATION = "repeatable read"
"""The isolation level of the transaction, with one snapshot for all its statements."""

# The slot by the expression of the partitions, so that the planner leaves out the others
IN_SLOT = "(SELECT * FROM {log} WHERE (id / {slot_rows}) % {slots} = {slot}) AS slot"
IN_WINDOW = """
SELECT * FROM {log} WHERE (id / {slot_rows}) % {slots} = {slot}
AND ctid >= {first}::tid AND ctid < {end}::tid AND shard = ANY ({shards}::smallint[])
AND (txid >= {xmax}::xid8 OR txid = ANY ({xip}::xid8[]))
"""

SIZES = """
SELECT {slot}, pg_relation_size({name}::regclass) / current_setting('block_size')::bigint,
       pg_table_size({name}::regclass)
WHERE EXISTS ({rows})
"""
LOWEST = "(SELECT min(id) FROM ({rows}) AS rows)"


class Querying(Protocol):
    """What is needed of a cursor of a database."""

    def execute(self, operation: str, /) -> object:
        """Run a statement."""

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return its rows."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The rows of a batch on some pages of a slot, from page ``first`` to before page ``end``."""

    slot: int
    first: int
    end: int
    lowest: int = 0
    """The lowest id in the window."""

    def rows(self, batch: Batch, columns: Iterable[str | sql.Composable]) -> str:
        """The query for these rows, in no order."""
        xmax, in_progress = begun_since(batch.done)
        found = sql.SQL(IN_WINDOW).format(
            **_slot(batch, self.slot),
            first=f"({self.first},0)",
            end=f"({self.end},0)",
            shards=sql.Literal(batch.shards),
            xmax=xmax,
            xip=sql.Literal(in_progress),
        )
        return batch.rows(columns, found)


class NotInWindows(Exception):
    """Too much would have to be held back, or there is no snapshot to rely on."""


def survey(cursor: Querying, batch: Batch) -> list[Window]:
    """Return the windows with rows of a batch, in the order in which they have to be read.

    Raises:
        NotInWindows: the transaction is not one of repeatable reads.
    """
    cursor.execute(BY_INDEX)
    if cursor.fetchall()[0][-1] != ISOLATION:
        raise NotInWindows
    cursor.execute(" UNION ALL ".join(_sizes(batch, slot) for slot in range(SLOTS)))
    windows = [
        window for slot, pages, size in cursor.fetchall() for window in _cut(slot, pages, size)
    ]
    cursor.execute(BY_PAGES)
    found: list[Window] = []
    for start in range(0, len(windows), AT_ONCE):
        some = windows[start : start + AT_ONCE]
        each = ", ".join(LOWEST.format(rows=window.rows(batch, ["id"])) for window in some)
        cursor.execute(f"SELECT ARRAY[{each}]")
        ((lowest,),) = cursor.fetchall()
        found += [
            replace(window, lowest=id_)
            for window, id_ in zip(some, lowest, strict=True)
            if id_ is not None
        ]
    return sorted(found, key=lambda window: window.lowest)


def in_order(
    windows: Sequence[Window], read: Callable[[Window], Iterable[pa.RecordBatch]]
) -> Iterator[pa.RecordBatch]:
    """Give what ``read`` gives for surveyed windows, in the order of the ids.

    Raises:
        NotInWindows: too much would have to be held back.
    """
    held: list[pa.RecordBatch] = []
    for number, window in enumerate(windows, 1):
        held += bounded(read(window), held)
        if held:
            bound = windows[number].lowest if number < len(windows) else None
            rows, known = _in_order(pa.Table.from_batches(held), bound)
            held = rows.slice(known).to_batches()
            yield from _batches(rows.slice(0, known))


def bounded(
    batches: Iterable[pa.RecordBatch], beside: Iterable[pa.RecordBatch] = ()
) -> list[pa.RecordBatch]:
    """Return all batches, unless together with those ``beside`` they exceed what may be held.

    Raises:
        NotInWindows: they do.
    """
    size = sum(batch.nbytes for batch in beside)
    held = []
    for batch in batches:
        size += batch.nbytes
        if size > HELD_BYTES:
            raise NotInWindows
        held.append(batch)
    return held


def _in_order(rows: pa.Table, bound: int | None) -> tuple[pa.Table, int]:
    """Sort rows; return them, and how many are below the bound, if there is one."""
    ids = rows["id"].to_numpy()
    if (np.diff(ids) < 0).any():
        order = np.argsort(ids, kind="stable")
        rows, ids = rows.take(order), ids[order]
    return rows, len(ids) if bound is None else int(np.searchsorted(ids, bound))


def _batches(rows: pa.Table) -> list[pa.RecordBatch]:
    """Split rows into batches of a bounded size, because sorting made a single one of them."""
    if not rows.num_rows:
        return []
    few = max(1, BATCH_BYTES * rows.num_rows // max(1, rows.nbytes))
    return [batch for batch in rows.to_batches(max_chunksize=few) if batch.num_rows]


def _cut(slot: int, pages: int, size: int) -> Iterator[Window]:
    """Cut a slot of so many pages and bytes into windows; the bytes include large bodies."""
    step = max(1, WINDOW_BYTES * pages // size)
    for first in range(0, pages, step):
        yield Window(slot=slot, first=first, end=first + step)


def _sizes(batch: Batch, slot: int) -> str:
    """The query for the size of a slot, if it holds anything of the batch."""
    part = sql.SQL(IN_SLOT).format(**_slot(batch, slot))
    query = sql.SQL(SIZES).format(
        slot=slot,
        name=f"saf.{batch.log}_{slot}",
        rows=sql.SQL(batch.rows(["id"], since(part, batch.shards, batch.done))),
    )
    return query.as_string(None)


def _slot(batch: Batch, slot: int) -> dict[str, Any]:
    log = sql.Identifier("saf", batch.log)
    return {"log": log, "slot_rows": SLOT_ROWS, "slots": SLOTS, "slot": slot}
