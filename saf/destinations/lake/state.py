"""What a table knows of one source: its marks, and the epochs of its shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

from saf.destinations.marks import NOTHING, ONCE, Known, Mark, Place

NEVER = -1
"""The number of a time that is not known."""
START = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, kw_only=True)
class State:
    """What a table knows of one source."""

    marks: Mapping[Place, Mark] = field(default_factory=dict)
    epochs: Mapping[int, int] = field(default_factory=dict)

    def known(self, identity: UUID) -> Known:
        """Return it for repairs."""
        return Known(destination=identity, marks=self.marks, epochs=self.epochs)


def number_of(moment: datetime | None) -> int:
    """Return a time as microseconds since 1970."""
    return (moment - START) // MICROSECOND if moment else NEVER


def mark_of(lane: str, batch: int, position: int, opened_at: int) -> Mark:
    """Return a mark as it was before its numbers were written."""
    if not batch:
        return NOTHING
    moment = None if opened_at == NEVER else START + opened_at * MICROSECOND
    # nobody waits for the answer to at_most_once; see `saf.destinations.places.last_of`
    return Mark.of(batch, position, moment, not lane.startswith(ONCE))
