"""The demo's Iceberg table and its catalog, with their contents. It needs no server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from saf.demo.proof import Received
from saf.demo.rows import COLUMNS, PROMOTE, received_of
from saf.destinations.iceberg import Iceberg
from saf.errors import MissingExtra


@contextmanager
def serve(folder: Path) -> Iterator[Iceberg]:
    """Yield a table in a folder as a destination, with the flights' origins and distances."""
    try:
        import pyiceberg  # noqa: F401 - fails early
    except ImportError:
        raise MissingExtra("iceberg", "a demo to an Iceberg table") from None
    folder.mkdir(parents=True, exist_ok=True)
    yield Iceberg(
        catalog=f"sqlite:///{folder}/catalog.db",
        table="flights.messages",
        warehouse=str(folder),
        promote=PROMOTE,
    )


def received(settings: Iceberg) -> Iterator[Received]:
    """Yield all rows of the table, each key's in order, read by the usual client."""
    from pyiceberg.catalog.sql import SqlCatalog

    with closing(SqlCatalog("saf", uri=settings.catalog)) as catalog:
        table = catalog.load_table(settings.table)
        return received_of(table.scan(selected_fields=COLUMNS).to_arrow())
