"""Arrow batches, cut into the chunks that are stored in one transaction each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa


def chunks(batches: Iterable[pa.RecordBatch], max_rows: int, max_bytes: int) -> Iterator[pa.Table]:
    """Gather Arrow batches, and cut them where they are long, into tables of bounded size.

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
