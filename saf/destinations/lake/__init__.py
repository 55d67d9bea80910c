"""Shared by all kinds of a lakehouse: settings, and a table's knowledge of a source.

A table knows the marks of a source, and the epochs of the source's shards. A mark is stored as
whole numbers: `numbers_of` names them in a fixed order, and `mark_of` reads them back. A time is a
number of microseconds since 1970, in UTC; `NEVER` stands for an unknown time.

A kind adds how its format commits, and where it keeps these numbers: `saf.destinations.delta`,
`saf.destinations.iceberg`. `saf.destinations.lake.table` stores in commits, and needs Arrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, ClassVar, Literal
from uuid import UUID

from pydantic import AfterValidator, Field, SecretStr

from saf.columns import IN_TABLES
from saf.destinations import Capabilities
from saf.destinations.marks import NOTHING, ONCE, Known, Mark, Place
from saf.destinations.settings import LinkedSettings

S3 = ("s3://", "s3a://")
NOT_TESTED = ("saf tests only object stores that speak S3", "your own test of yours")
MANY_FILES = 1_000
SMALL_BYTES = 8 << 20
"""A table with more than `MANY_FILES` files below this average size is worth compacting."""
NOT_IN_NAMES = " ,;{}()\n\t="

ColumnType = Literal["string", "long", "double", "boolean", "timestamp"]
Secrets = Mapping[str, SecretStr]

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


def _promoted(fields: dict[str, str]) -> dict[str, str]:
    for name in fields:
        if name.lower() in {*IN_TABLES, DAY}:
            raise ValueError(f"{name!r}: each table has such a column already")
        if not name or set(name) & set(NOT_IN_NAMES):
            raise ValueError(f"{name!r} cannot be the name of a column")
    if len({name.lower() for name in fields}) < len(fields):
        raise ValueError("the names of two columns differ in more than upper and lower case")
    return fields


class LakeSettings(LinkedSettings):
    """Base class for the settings of tables of a lakehouse."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        exactly_once=True, fences=True, reads_back=True, takes_dialogs=False
    )

    partition_by: Literal["day", "service", "nothing"] = "day"
    """Partitioning of the table's files: by the day of `created_at` in UTC; by the service,
    `to_service`; or none."""
    promote: Annotated[dict[str, ColumnType], AfterValidator(_promoted)] = Field(
        default_factory=dict
    )
    """Members of bodies that are JSON objects, each with the type of its own column. Missing
    columns are added to the table; a value of another type becomes NULL."""

    @property
    def has_day(self) -> bool:
        """Return True if rows have the column `DAY`."""
        return False

    def probe(self, name: str) -> Iterator[tuple[str, str]]:
        """Write to the table's object store; see `DestinationSettings.probe`."""
        with self.connected(name) as link:
            yield from link.probe()


def untested(address: str) -> Iterator[tuple[str, str]]:
    """Yield a finding about an object store that saf is not tested with."""
    if not address.startswith(S3):
        yield NOT_TESTED


def compactable(files: int, size: int, cure: str) -> Iterator[tuple[str, str]]:
    """Yield a finding about a table of many small files, which have ``size`` bytes in total."""
    if files > MANY_FILES and size / files < SMALL_BYTES:
        average = f"{size // files >> 10:,} KiB on average"
        yield f"its {files:,} files have {average}, which makes reading slow", cure


def said(secrets: Secrets) -> dict[str, str]:
    """Return the plain values of secrets, for a client."""
    return {name: value.get_secret_value() for name, value in secrets.items()}


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
