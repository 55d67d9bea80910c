"""A deep backlog in the order of its ids, without sorting it at the source.

A log is stored nearly in the order of its ids, but not quite: who inserts at the same time fills
pages of his own. To sort millions of rows takes the server as long as to read them, and files as
large as they are. So a deep batch is read in windows, some pages each. What is surveyed first is
the lowest id in each. They are read in the order of those; so when a window ends, all rows below
the lowest id of the next are known, and are put in order here. The others are held back.

Survey and reading need one snapshot: under that, a row stays where it is.
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
"""Of a window, as they are stored."""

HELD_BYTES = 64 * 1024 * 1024
"""So much may be held back; also of a window alone, whose bodies may have been compressed."""

AT_ONCE = 256
"""Windows that are surveyed by one statement."""

BATCH_BYTES = 4 * 1024 * 1024
"""Of what is in order, given on at a time."""

# That a full slot holds nothing of the batch, only the index can say quickly. To read some pages it
# is of no use, whatever the planner hopes of it. Each a query, because ADBC prepares.
BY_INDEX = """
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       current_setting('transaction_isolation')
"""
BY_PAGES = "SELECT set_config('enable_indexscan', 'off', true)"
ISOLATION = "repeatable read"
"""Of the transaction: under it, all statements have one snapshot."""

# The slot as the log is partitioned, so that the planner leaves out the others
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
    """What is needed of a database's cursor."""

    def execute(self, operation: str, /) -> object:
        """Run a statement."""

    def fetchall(self) -> list[tuple[Any, ...]]:
        """What it gives."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The rows of a batch on some pages of a slot, from the ``first`` to before the ``end``."""

    slot: int
    first: int
    end: int
    lowest: int = 0
    """The lowest id of them."""

    def rows(self, batch: Batch, columns: Iterable[str | sql.Composable]) -> str:
        """The query for them, in no order."""
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
    """The windows that hold rows of a batch, in the order in which they have to be read.

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
    """What ``read`` gives for surveyed windows, in the order of the ids.

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
    """All of them, unless together with those ``beside`` they are more than may be held.

    Raises:
        NotInWindows
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
    """The rows in order, and how many are below the bound, if there is one."""
    ids = rows["id"].to_numpy()
    if (np.diff(ids) < 0).any():
        order = np.argsort(ids, kind="stable")
        rows, ids = rows.take(order), ids[order]
    return rows, len(ids) if bound is None else int(np.searchsorted(ids, bound))


def _batches(rows: pa.Table) -> list[pa.RecordBatch]:
    """The rows as batches of a bounded size; what was sorted is a single one."""
    if not rows.num_rows:
        return []
    few = max(1, BATCH_BYTES * rows.num_rows // max(1, rows.nbytes))
    return [batch for batch in rows.to_batches(max_chunksize=few) if batch.num_rows]


def _cut(slot: int, pages: int, size: int) -> Iterator[Window]:
    """A slot of so many pages and bytes, those in which large bodies are stored among them."""
    step = max(1, WINDOW_BYTES * pages // size)
    for first in range(0, pages, step):
        yield Window(slot=slot, first=first, end=first + step)


def _sizes(batch: Batch, slot: int) -> str:
    """The query for how large a slot is, if it holds any of the batch."""
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
