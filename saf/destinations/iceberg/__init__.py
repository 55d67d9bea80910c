"""The kind ``iceberg``: a table of Apache Iceberg, to which messages are appended exactly once.

    [destinations.lake]
    kind = "iceberg"
    catalog = "postgresql://db.example.com/lake"    # or sqlite:///…, or https://… of a REST catalog
    username = "saf"
    password = "${LAKE_PASSWORD}"
    table = "shop.messages"
    warehouse = "/data/lake"                        # or s3://bucket/lake

    [destinations.lake.promote]                     # members of JSON bodies that get a column
    amount = "double"

`saf.destinations.iceberg.table` describes how a chunk is stored, `saf.destinations.lake.columns`
the rows, `saf.destinations.iceberg.marks` where the marks are, and why there. The client is the
extra ``iceberg``, the package pyiceberg: no JVM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from saf.destinations import Destination
from saf.destinations.iceberg.address import is_sql, parse
from saf.destinations.lake.settings import LakeSettings
from saf.destinations.queues import client_needed
from saf.destinations.reading import Reading
from saf.destinations.settings import Guarantee

if TYPE_CHECKING:
    from saf.destinations.iceberg.link import Link


def _table(text: str) -> str:
    if not all(text.split(".")) or "." not in text:
        raise ValueError(f"{text!r} is not a table with its namespace, such as shop.messages")
    return text


def _warehouse(text: str) -> str:
    if text.startswith("file:") or not text:
        raise ValueError(f"{text!r} is neither a folder nor an address such as s3://bucket/lake")
    return text.rstrip("/") if "://" in text else str(Path(text).absolute())


class Iceberg(LakeSettings):
    """Settings of a table of Apache Iceberg."""

    kind: Literal["iceberg"] = "iceberg"
    catalog: Annotated[str, AfterValidator(parse)]
    """Catalog, which knows where the table's newest version is: `sqlite:///catalog.db`, a file of
    this machine; `postgresql://host/database`; or `https://…`, a REST catalog."""
    table: Annotated[str, AfterValidator(_table)]
    """Table, with its namespace: `shop.messages`. It is created at the first message."""
    warehouse: Annotated[str, AfterValidator(_warehouse)] | None = None
    """Place of tables that saf creates: an existing folder, or an address such as
    `s3://bucket/lake`; at a REST catalog, the catalog's name for the warehouse."""
    catalog_name: str = "saf"
    """Name of the catalog in the tables of its database, which several catalogs can share."""
    username: str | None = None
    """User name at the catalog's database."""
    password: SecretStr | None = None
    """The user's password."""
    properties: dict[str, SecretStr] = Field(default_factory=dict)
    """More properties for pyiceberg, such as `token` or `credential` of a REST catalog, or
    `s3.access-key-id`; all of their values count as secret."""

    @model_validator(mode="after")
    def _has_a_warehouse(self) -> Self:
        if is_sql(self.catalog) and self.warehouse is None:
            raise ValueError("warehouse: a catalog in a database needs a folder or an address")
        return self

    @property
    def folder(self) -> Path | None:
        """Warehouse, if it is on this machine."""
        warehouse = self.warehouse if is_sql(self.catalog) else None
        return None if warehouse is None or "://" in warehouse else Path(warehouse)

    def open(self, name: str, *, keep: bool = False) -> Destination:  # noqa: ARG002 - nothing to keep
        """Return the table as a destination; see `DestinationSettings.open`."""
        with client_needed(name, "iceberg"):
            from saf.destinations.iceberg.table import Table  # needs Arrow, which drivers lack
        return Table(name, self)

    @contextmanager
    def connected(self, name: str) -> Iterator[Link]:
        """Open a link; see `LinkedSettings.connected`."""
        with client_needed(name, "iceberg"):
            from saf.destinations.iceberg.link import Link
        link = Link(name, self)
        try:
            yield link
        finally:
            link.close()

    @contextmanager
    def reading(self, name: str) -> Iterator[Reading]:
        """Open the table for reading; see `DestinationSettings.reading`."""
        with self.connected(name) as link:
            from saf.destinations.iceberg.table import read

            yield read(link)

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Raise if messages must not be stored there; see `DestinationSettings.problems`."""
        with self.connected(name) as link:
            from saf.destinations.iceberg.making import check

            table = link.load()
            if table is not None:
                check(link, table)
        yield from ()

    def probe(self, name: str) -> Iterator[tuple[str, str]]:
        """Write a file to an object store; see `DestinationSettings.probe`."""
        with self.connected(name) as link:
            from saf.destinations.iceberg.probing import probe

            yield from probe(link)

    def guarantee(self, name: str) -> Guarantee:
        """Return the promise of the table's place; see `DestinationSettings.guarantee`."""
        with self.connected(name) as link:
            from saf.destinations.iceberg.probing import guarantee

            return guarantee(link)
