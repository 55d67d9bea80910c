"""Reading back: the rows of a source in one version of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from uuid import UUID

import pyarrow as pa

from saf.destinations.marks import Known
from saf.destinations.tables import HELD, TableReading

COLUMNS = ("message_id", "shard", "to_service", "to_broker", "key", "created_at")
"""Columns required for each row."""


@dataclass(frozen=True, kw_only=True)
class LakeReading(TableReading):
    """One version of a table."""

    removed: bool
    """True if rows were removed."""

    def purged(self) -> str | None:
        """Return "table" if rows may be missing on purpose, because some were removed."""
        return "table" if self.removed else None


def reading(
    name: str,
    identity: UUID,
    rows: Callable[[UUID], pa.Table] | None,
    known: Callable[[UUID], Known],
    *,
    removed: bool,
) -> LakeReading:
    """Return a reading of a table; ``rows`` gives `COLUMNS` of a source's rows, None: no table."""

    def held(source: UUID) -> pa.Table:
        return HELD.empty_table() if rows is None else _held(rows(source))

    return LakeReading(
        name=name, is_=identity, read=cache(held), knows=cache(known), removed=removed
    )


def _held(rows: pa.Table) -> pa.Table:
    for name in ("message_id", "to_broker"):
        texts = rows[name].to_pylist()
        values = [None if text is None else UUID(text).bytes for text in texts]
        place = rows.column_names.index(name)
        rows = rows.set_column(place, name, pa.array(values, HELD.field(name).type))
    return rows.select(HELD.names).cast(HELD)
