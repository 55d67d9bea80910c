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

from saf.cursor import Batch
from saf.ring import SLOT_ROWS, SLOTS

PAGES = 1024
"""Of a window: 8 MiB at the source."""

HELD_BYTES = 64 * 1024 * 1024
"""So much may be held back."""

# That a full slot holds nothing of the batch, only the index can say quickly. To read some pages it
# is of no use, whatever the planner hopes of it.
BY_INDEX = """
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)
"""
BY_PAGES = "SELECT set_config('enable_indexscan', 'off', true)"

SLOT = "(SELECT * FROM {log} WHERE (id / {slot_rows}) % {slots} = {slot}) AS slot"
WINDOW = """
(SELECT * FROM {log} WHERE (id / {slot_rows}) % {slots} = {slot}
 AND ctid >= {first}::tid AND ctid < {end}::tid) AS pages
"""

PAGES_OF = """
SELECT {slot}, pg_relation_size({name}::regclass) / current_setting('block_size')::bigint
WHERE EXISTS ({rows})
"""
LOWEST = "(SELECT min(id) FROM {window})"


class Cursor(Protocol):
    """What is needed of a database's cursor."""

    def execute(self, operation: str, /) -> object:
        """Run a statement."""

    def fetchall(self) -> list[tuple[Any, ...]]:
        """What it gives."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some pages of a slot of a log, from the ``first`` to before the ``end``."""

    log: str
    slot: int
    first: int
    end: int
    lowest: int = 0
    """The lowest id that is there."""

    @property
    def part(self) -> sql.Composed:
        """It, as it stands in FROM."""
        return sql.SQL(WINDOW).format(
            **_slot(self.log, self.slot), first=f"({self.first},0)", end=f"({self.end},0)"
        )


class Scattered(Exception):
    """More would have to be held back than may be: the rows are stored in some other order."""


def survey(cursor: Cursor, batch: Batch) -> list[Window]:
    """The windows that hold a batch, in the order in which they have to be read."""
    cursor.execute(BY_INDEX)
    cursor.execute(" UNION ALL ".join(_pages_of(batch, slot) for slot in range(SLOTS)))
    slots = cursor.fetchall()
    cursor.execute(BY_PAGES)
    found: list[Window] = []
    for slot, pages in slots:
        windows = [
            Window(log=batch.log, slot=slot, first=first, end=first + PAGES)
            for first in range(0, pages, PAGES)
        ]
        each = sql.SQL(", ").join(sql.SQL(LOWEST).format(window=one.part) for one in windows)
        cursor.execute(sql.SQL("SELECT ARRAY[{}]").format(each).as_string(None))
        ((lowest,),) = cursor.fetchall()
        found += [
            replace(window, lowest=id_)
            for window, id_ in zip(windows, lowest, strict=True)
            if id_ is not None
        ]
    return sorted(found, key=lambda window: window.lowest)


def in_order(
    windows: Sequence[Window], read: Callable[[Window], Iterable[pa.RecordBatch]]
) -> Iterator[pa.RecordBatch]:
    """What ``read`` gives for surveyed windows, in the order of the ids.

    Raises:
        Scattered
    """
    held: list[pa.RecordBatch] = []
    bounds = [*(window.lowest for window in windows[1:]), None]
    for window, bound in zip(windows, bounds, strict=True):
        held += bounded(read(window), held)
        if held:
            rows, known = _in_order(pa.Table.from_batches(held), bound)
            yield from rows.slice(0, known).to_batches()
            held = rows.slice(known).to_batches()


def bounded(
    batches: Iterable[pa.RecordBatch], beside: Iterable[pa.RecordBatch] = ()
) -> list[pa.RecordBatch]:
    """All of them, unless together with those ``beside`` they are more than may be held.

    Raises:
        Scattered
    """
    size = sum(batch.nbytes for batch in beside)
    held = []
    for batch in batches:
        size += batch.nbytes
        if size > HELD_BYTES:
            raise Scattered
        held.append(batch)
    return held


def _in_order(rows: pa.Table, bound: int | None) -> tuple[pa.Table, int]:
    """The rows in order, and how many are below the bound, if there is one."""
    ids = rows["id"].to_numpy()
    if (np.diff(ids) < 0).any():
        order = np.argsort(ids, kind="stable")
        rows, ids = rows.take(order), ids[order]
    return rows, len(ids) if bound is None else int(np.searchsorted(ids, bound))


def _pages_of(batch: Batch, slot: int) -> str:
    """The query for how large a slot is, if it holds any of the batch."""
    part = sql.SQL(SLOT).format(**_slot(batch.log, slot))
    query = sql.SQL(PAGES_OF).format(
        slot=slot, name=f"saf.{batch.log}_{slot}", rows=sql.SQL(batch.rows(["id"], part))
    )
    return query.as_string(None)


def _slot(log: str, slot: int) -> dict[str, Any]:
    """As the log is partitioned, so that the planner leaves out the other slots."""
    return {
        "log": sql.Identifier("saf", log),
        "slot_rows": SLOT_ROWS,
        "slots": SLOTS,
        "slot": slot,
    }
