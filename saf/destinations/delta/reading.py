"""Reading back: the rows of a source in one version of the table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa
import pyarrow.dataset as ds

from saf.destinations.delta.link import Link, removed
from saf.destinations.delta.marks import state_of
from saf.destinations.lake.reading import COLUMNS, reading
from saf.destinations.lake.state import State
from saf.destinations.marks import Known
from saf.destinations.reading import Reading

if TYPE_CHECKING:
    from saf.destinations.delta import Delta


@contextmanager
def read(name: str, settings: Delta) -> Iterator[Reading]:
    """Open the newest version of the table for reading."""
    link = Link(name, settings)
    table = link.load()
    identity = link.identity()

    def known(source: UUID) -> Known:
        if table is None:
            return State().known(identity)
        with link.errors():
            return state_of(source, link.log().at(table.version())).known(identity)

    def rows(source: UUID) -> pa.Table:
        assert table is not None  # noqa: S101 - not called without a table
        with link.errors():
            of_source = ds.field("source") == str(source)
            return table.to_pyarrow_dataset().to_table(columns=[*COLUMNS], filter=of_source)

    with link.errors():
        gone = table is not None and removed(table)
    yield reading(name, identity, rows if table else None, known, removed=gone)
