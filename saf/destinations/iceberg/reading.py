"""Reading back: the rows of a source in one version of the table."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa
from pyiceberg.table.snapshots import Operation

from saf.destinations.iceberg.link import Link
from saf.destinations.lake.table import COLUMNS, LakeReading, reading

if TYPE_CHECKING:
    from pyiceberg.table import Table


def read(link: Link) -> LakeReading:
    """Open the newest version of the table for reading."""
    table = link.load()

    def rows(source: UUID) -> pa.Table:
        assert table is not None  # noqa: S101 - not called without a table
        with link.errors():
            of_source = f"source = '{source}'"
            return table.scan(of_source, selected_fields=COLUMNS).to_arrow()

    gone = table is not None and removed(table)
    known = partial(link.known_of, table)
    identity = link.identity_of(table)
    return reading(link.name, identity, rows if table else None, known, removed=gone)


def removed(table: Table) -> bool:
    """Return True if a table's snapshots show that rows may be missing on purpose."""
    removing = (Operation.DELETE, Operation.OVERWRITE)
    return any(
        snapshot.summary and snapshot.summary.operation in removing
        for snapshot in table.snapshots()
    )
