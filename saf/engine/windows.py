"""A deep backlog in the order of its ids, without sorting it at the source.

A log is stored nearly in the order of its ids, but not quite, because concurrent inserts fill
different pages. Sorting millions of rows takes the server as long as reading them, and needs files
of the same size. So a deep batch is read in windows of some pages each, ordered by their lowest
ids, which a survey has found (`saf.engine.survey`). When a window ends, all rows below the lowest
id of the next window are known, and are sorted here. The others are held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from saf.engine.survey import Window

HELD_BYTES = 64 * 1024 * 1024
"""Maximum bytes held back, even within one window: its stored bodies may be compressed."""

BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of sorted rows yielded at a time."""


class NotInWindows(Exception):
    """Too many rows to hold back."""


def in_order(
    windows: Sequence[Window], read: Callable[[Window], Iterable[pa.RecordBatch]]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that ``read`` returns for surveyed windows, ordered by id.

    Raises:
        NotInWindows: too many rows to hold back.
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
    """Return all batches, unless they exceed the limit together with those ``beside``.

    Raises:
        NotInWindows: they exceed it.
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
    """Split rows into batches of a bounded size, because sorting made them one."""
    if not rows.num_rows:
        return []
    few = max(1, BATCH_BYTES * rows.num_rows // max(1, rows.nbytes))
    return [batch for batch in rows.to_batches(max_chunksize=few) if batch.num_rows]
