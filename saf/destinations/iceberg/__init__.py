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

A catalog's address has no login:

    sqlite:///folder/catalog.db        a file of this machine, also sqlite:////absolute/path
    postgresql://host:5432/database    a database, with libpq's parameters after a ?
    https://host/path                  a REST catalog

`saf.destinations.iceberg.table` describes how a chunk is stored, `saf.destinations.lake.table`
the rows, `saf.destinations.iceberg.marks` where the marks are, and why there. The client is the
extra ``iceberg``, the package pyiceberg: no JVM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from saf.destinations.lake import LakeSettings

if TYPE_CHECKING:
    from saf.destinations.iceberg.link import Link


SQLITE = "sqlite:///"


def _catalog(text: str) -> str:
    """Parse a catalog's address; return it with the absolute path of a file.

    >>> _catalog("postgresql://db1/lake")
    'postgresql://db1/lake'

    Raises:
        ValueError: the address is invalid.
    """
    url = urlsplit(text)
    if "@" in url.netloc or "password" in parse_qs(url.query):
        raise ValueError("give a login by username = … and password = …, not in the address")
    if text.startswith(SQLITE) and len(text) > len(SQLITE) and not url.query:
        return SQLITE + str(Path(text.removeprefix(SQLITE)).absolute())
    if url.scheme == "postgresql" or (url.scheme in ("http", "https") and url.hostname):
        return text.rstrip("/")
    raise ValueError(
        f"{text!r} is not an address of a catalog, such as sqlite:///catalog.db, "
        "postgresql://host/database or https://host"
    )


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

    client: ClassVar[str | None] = "pyiceberg"
    stores: ClassVar[tuple[str, str]] = ("table", "Table")

    kind: Literal["iceberg"] = "iceberg"
    catalog: Annotated[str, AfterValidator(_catalog)]
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
        if self.in_database and self.warehouse is None:
            raise ValueError("warehouse: a catalog in a database needs a folder or an address")
        return self

    @property
    def in_database(self) -> bool:
        """Return True if the catalog is in a database."""
        return not self.catalog.startswith("http")

    @property
    def catalog_file(self) -> Path | None:
        """The catalog's file; None if the catalog is not in a file."""
        file = self.catalog.removeprefix(SQLITE)
        return Path(file) if file != self.catalog else None

    @property
    def catalog_parameters(self) -> dict[str, str]:
        """libpq's parameters for a catalog in PostgreSQL.

        >>> lake = Iceberg(catalog="postgresql://db1:5433/lake?sslmode=require", table="a.b",
        ...                warehouse="/lake")
        >>> lake.catalog_parameters
        {'host': 'db1', 'port': '5433', 'dbname': 'lake', 'sslmode': 'require'}
        """
        url = urlsplit(self.catalog)
        parameters = {
            "host": url.hostname or "",
            "port": str(url.port or ""),
            "dbname": unquote(url.path.removeprefix("/")),
        }
        options = {name: values[-1] for name, values in parse_qs(url.query).items()}
        return {name: value for name, value in (parameters | options).items() if value}

    @property
    def catalog_place(self) -> str:
        """The part of the catalog's address that identifies it, without other parameters.

        >>> Iceberg(catalog="postgresql://db1/lake?sslmode=require&port=5433", table="a.b",
        ...         warehouse="/lake").catalog_place
        'postgresql:db1:5433/lake'
        """
        if file := self.catalog_file:
            return file.resolve().as_uri()
        if not self.in_database:
            return self.catalog
        parameters = {"host": "", "port": "5432", "dbname": ""} | self.catalog_parameters
        return f"postgresql:{parameters['host']}:{parameters['port']}/{parameters['dbname']}"

    @property
    def folder(self) -> Path | None:
        """Warehouse, if it is on this machine."""
        warehouse = self.warehouse if self.in_database else None
        return None if warehouse is None or "://" in warehouse else Path(warehouse)

    @contextmanager
    def connected(self, name: str) -> Iterator[Link]:
        """Open a link; see `LinkedSettings.connected`."""
        link: Link = self._module(name, "link").Link(name, self)
        try:
            yield link
        finally:
            link.close()

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Raise if messages must not be stored there; see `DestinationSettings.problems`."""
        with self.connected(name) as link:
            from saf.destinations.iceberg.table import check

            table = link.load()
            if table is not None:
                check(link, table)
        yield from ()
