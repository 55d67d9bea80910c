"""The demo's Delta table, and what is in it. It needs no server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saf.demo.proof import Received
from saf.destinations.delta import Delta
from saf.errors import MissingExtra

COLUMNS = (
    *("message_id", "from_service", "to_service", "key", "message_type"),
    *("headers", "body"),
)
"""The columns of a message, in the order of `Received`."""


@contextmanager
def serve(folder: Path) -> Iterator[Delta]:
    """Give a table in a folder as a destination, with the flights' origins and distances."""
    try:
        import deltalake  # noqa: F401 - to say so early
    except ImportError:
        raise MissingExtra("delta", "a demo to a Delta table") from None
    folder.mkdir(parents=True, exist_ok=True)
    yield Delta(table=str(folder), promote={"origin": "string", "distance": "double"})


def received(settings: Delta) -> Iterator[Received]:
    """Give all rows of the table, those of each key in its order; by the usual client."""
    import pyarrow.compute as pc
    from deltalake import DeltaTable

    rows = DeltaTable(settings.table).to_pyarrow_table(columns=["id", *COLUMNS])
    for batch in rows.take(pc.sort_indices(rows["id"])).to_batches(max_chunksize=10_000):
        columns = [batch[name].to_pylist() for name in COLUMNS]
        for number, row in zip(batch["id"].to_pylist(), zip(*columns, strict=True), strict=True):
            yield (number, *row)
