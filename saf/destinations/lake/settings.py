"""Settings shared by all tables of a lakehouse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, SecretStr

from saf.columns import IN_TABLES
from saf.destinations import Capabilities
from saf.destinations.lake.state import DAY
from saf.destinations.linked import LinkedSettings

S3 = ("s3://", "s3a://")
NOT_TESTED = ("saf tests only object stores that speak S3", "your own test of yours")
MANY_FILES = 1_000
SMALL_BYTES = 8 << 20
"""A table with more than `MANY_FILES` files below this average size is worth compacting."""
NOT_IN_NAMES = " ,;{}()\n\t="

ColumnType = Literal["string", "long", "double", "boolean", "timestamp"]
Secrets = Mapping[str, SecretStr]


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
