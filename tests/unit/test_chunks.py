"""Chunks: every row once, in order, in tables that are no larger than they may be."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saf.engine import source
from saf.engine.source import NotInWindows, bounded, chunks
from saf.engine.survey import _cut

SINGLE = [pa.RecordBatch.from_pydict({"id": pa.array([n], pa.int64())}) for n in range(10)]
"""Batches of one row and 8 bytes."""


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 7), st.integers(8, 100))
def test_batches_of_any_size_are_cut_into_chunks_without_loss(
    sizes: list[int], max_rows: int, max_bytes: int
) -> None:
    number = 0
    batches = []
    for size in sizes:
        ids = pa.array(range(number, number + size), pa.int64())
        batches.append(pa.RecordBatch.from_arrays([ids], names=["id"]))
        number += size
    found = list(chunks(batches, max_rows, max_bytes))
    assert [id_ for table in found for id_ in table["id"].to_pylist()] == list(range(number))
    assert all(0 < table.num_rows <= max_rows for table in found)
    # a table ends with the batch that reaches the bytes: so without its last part, it had not
    assert all(table.slice(0, table.num_rows - 9).nbytes < max_bytes for table in found)


def test_a_chunk_ends_with_the_batch_that_reaches_its_bytes() -> None:
    assert [table.num_rows for table in chunks(SINGLE, 100, 24)] == [3, 3, 3, 1]


def test_the_batches_of_one_window_count_together_towards_what_is_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "HELD_BYTES", 80)
    assert bounded(SINGLE) == SINGLE
    monkeypatch.setattr(source, "HELD_BYTES", 79)
    with pytest.raises(NotInWindows):
        bounded(SINGLE)


def test_a_slot_is_cut_into_windows_of_some_mebibytes() -> None:
    pages = 10_000
    windows = list(_cut(3, pages, pages * 8192))
    assert len(windows) == 10
    assert [window.first for window in windows[1:]] == [window.end for window in windows[:-1]]
    assert (windows[0].first, windows[-1].end >= pages) == (0, True)
