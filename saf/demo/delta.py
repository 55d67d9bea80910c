"""The demo's Delta table and its contents. It needs no server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saf.demo.proof import Received
from saf.demo.rows import COLUMNS, PROMOTE, received_of
from saf.destinations.delta import Delta
from saf.errors import MissingExtra


@contextmanager
def serve(folder: Path) -> Iterator[Delta]:
    """Yield a table in a folder as a destination, with the flights' origins and distances."""
    try:
        import deltalake  # noqa: F401 - fails early
    except ImportError:
        raise MissingExtra("delta", "a demo to a Delta table") from None
    folder.mkdir(parents=True, exist_ok=True)
    yield Delta(table=str(folder), promote=PROMOTE)


def received(settings: Delta) -> Iterator[Received]:
    """Yield all rows of the table, each key's in order, read by the usual client."""
    from deltalake import DeltaTable

    return received_of(DeltaTable(settings.table).to_pyarrow_table(columns=[*COLUMNS]))
