"""Chunks: Arrow batches, cut into tables that are each stored in one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

T = TypeVar("T")


def chunks(batches: Iterable[pa.RecordBatch], max_rows: int, max_bytes: int) -> Iterator[pa.Table]:
    """Join and split Arrow batches into tables of bounded size.

    A table has at most ``max_rows`` rows, and ends with the batch that reaches ``max_bytes``.
    """
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, max_rows - rows)
            start += part.num_rows
            held.append(part)
            rows += part.num_rows
            size += part.nbytes
            if rows >= max_rows or size >= max_bytes:
                yield pa.Table.from_batches(held)
                held, rows, size = [], 0, 0
    if held:
        yield pa.Table.from_batches(held)


def up_to(batches: Iterable[pa.RecordBatch], last: int) -> Iterator[pa.RecordBatch]:
    """Yield the messages with ids up to ``last``; the batches are ordered by id."""
    for batch in batches:
        inside = int(pc.sum(pc.less_equal(batch["id"], last)).as_py() or 0)
        yield batch.slice(0, inside)
        if inside < batch.num_rows:
            return


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item, and whether it is the last one.

    >>> list(with_last("ab")), list(with_last(""))
    ([('a', False), ('b', True)], [])
    """
    rest = iter(items)
    held = list(islice(rest, 1))
    for following in rest:
        yield held.pop(), False
        held.append(following)
    for item in held:
        yield item, True
