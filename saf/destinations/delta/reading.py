"""Reading back: the rows of a source in one version of the table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable

from saf.destinations.delta.link import Link, removed
from saf.destinations.delta.marks import State, known_of, state_of
from saf.destinations.marks import Known
from saf.destinations.reading import Reading
from saf.destinations.tables import HELD, TableReading

if TYPE_CHECKING:
    from saf.destinations.delta import Delta

COLUMNS = ["message_id", "shard", "to_service", "to_broker", "key", "created_at"]


@dataclass(frozen=True, kw_only=True)
class DeltaReading(TableReading):
    """One version of a table."""

    deleted: bool
    """Whether somebody has removed rows."""

    def purged(self) -> str | None:
        """Say that rows may be missing on purpose, if somebody has removed some."""
        return "table" if self.deleted else None


@contextmanager
def read(name: str, settings: Delta) -> Iterator[Reading]:
    """Open the newest version of the table for reading."""
    link = Link(name, settings)
    table = link.load()
    identity = link.identity()

    def known(source: UUID) -> Known:
        if table is None:
            return known_of(identity, State())
        with link.errors():
            return known_of(identity, state_of(source, link.log().at(table.version())))

    def held(source: UUID) -> pa.Table:
        if table is None:
            return HELD.empty_table()
        with link.errors():
            return _held(table, source)

    with link.errors():
        deleted = table is not None and removed(table)
    yield DeltaReading(
        name=name, is_=identity, read=cache(held), knows=cache(known), deleted=deleted
    )


def _held(table: DeltaTable, source: UUID) -> pa.Table:
    rows = table.to_pyarrow_dataset().to_table(
        columns=COLUMNS, filter=ds.field("source") == str(source)
    )
    for name in ("message_id", "to_broker"):
        texts = rows[name].to_pylist()
        values = [None if text is None else UUID(text).bytes for text in texts]
        place = rows.column_names.index(name)
        rows = rows.set_column(place, name, pa.array(values, HELD.field(name).type))
    return rows.select(HELD.names).cast(HELD)
