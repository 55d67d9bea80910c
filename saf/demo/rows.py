"""Rows that the demo reads from a lakehouse table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from saf.demo.proof import Received
from saf.destinations.lake.settings import ColumnType

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = (
    *("id", "message_id", "from_service", "to_service", "key", "message_type"),
    *("headers", "body"),
)
"""Needed columns, in the order of `Received`."""
PROMOTE: dict[str, ColumnType] = {"origin": "string", "distance": "double"}
"""Values of flights that get columns of their own."""


def received_of(rows: pa.Table) -> Iterator[Received]:
    """Yield all rows, each key's in order."""
    import pyarrow.compute as pc

    for batch in rows.take(pc.sort_indices(rows["id"])).to_batches(max_chunksize=10_000):
        yield from zip(*(batch[name].to_pylist() for name in COLUMNS), strict=True)
