"""State of a lakehouse table: its knowledge of one source, and names that saf gives to its parts.

A table knows the marks of a source, and the epochs of the source's shards. A mark is stored as
whole numbers: `numbers_of` names them in a fixed order, and `mark_of` reads them back. A time is a
number of microseconds since 1970, in UTC; `NEVER` stands for an unknown time.

Where the numbers are stored differs by kind; this module stores nothing. See
`saf.destinations.delta.log` and `saf.destinations.iceberg.marks`.

Besides the columns of messages, a table may have a column that partitions it by `DAY`, and the
properties `DESTINATION` and `ARCHIVE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from saf.destinations.marks import NOTHING, ONCE, Known, Mark, Place

DAY = "day"
"""Column that partitions a Delta table by day: the date of created_at, in UTC."""
DESTINATION = "saf.destination"
"""Table property that contains the table's identity."""
ARCHIVE = "saf.archive"
"""Table property of an archive of logs, which is not a destination."""

NEVER = -1
"""Number that stands for an unknown time."""
START = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, kw_only=True)
class State:
    """A table's knowledge of one source: its marks, and the epochs of its shards."""

    marks: Mapping[Place, Mark] = field(default_factory=dict)
    epochs: Mapping[int, int] = field(default_factory=dict)

    def known(self, identity: UUID) -> Known:
        """Return the marks and epochs for repairs."""
        return Known(destination=identity, marks=self.marks, epochs=self.epochs)


def numbers_of(mark: Mark) -> dict[str, int]:
    """Return the numbers that a table stores for a mark, by name."""
    numbers = {
        "batch": mark.batch,
        "position": mark.position,
        "opened_at": _number(mark.opened_at),
    }
    return numbers | ({"set_aside_at": _number(mark.set_aside_at)} if mark.set_aside_at else {})


def mark_of(
    lane: str, batch: int, position: int, opened_at: int, set_aside_at: int = NEVER
) -> Mark:
    """Return the mark whose numbers `numbers_of` has returned."""
    if not batch:
        return replace(NOTHING, set_aside_at=_moment(set_aside_at))
    # no task waits for at_most_once's answer; see `saf.destinations.places.last_of`
    answered = not lane.startswith(ONCE)
    return Mark.of(batch, position, _moment(opened_at), answered, _moment(set_aside_at))


def _number(moment: datetime | None) -> int:
    return (moment - START) // MICROSECOND if moment else NEVER


def _moment(number: int) -> datetime | None:
    return None if number == NEVER else START + number * MICROSECOND
