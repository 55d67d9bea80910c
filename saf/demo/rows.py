"""What the demo receives from a table of a lakehouse: its rows."""

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
"""The columns that are needed, in the order of `Received`."""
PROMOTE: dict[str, ColumnType] = {"origin": "string", "distance": "double"}
"""What flights have a column for."""


def received_of(rows: pa.Table) -> Iterator[Received]:
    """Give all rows, those of each key in its order."""
    import pyarrow.compute as pc

    for batch in rows.take(pc.sort_indices(rows["id"])).to_batches(max_chunksize=10_000):
        yield from zip(*(batch[name].to_pylist() for name in COLUMNS), strict=True)
