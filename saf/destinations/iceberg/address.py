"""Addresses of Iceberg catalogs, without a login.

sqlite:///folder/catalog.db        a file of this machine, also sqlite:////absolute/path
postgresql://host:5432/database    a database, with libpq's parameters after a ?
https://host/path                  a REST catalog
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

SQLITE = "sqlite:///"


def parse(text: str) -> str:
    """Parse an address; return it with the absolute path of a file.

    >>> parse("postgresql://db1/lake")
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


def is_sql(catalog: str) -> bool:
    """Return True if a catalog is in a database."""
    return not catalog.startswith("http")


def file_of(catalog: str) -> Path | None:
    """Return a catalog's file; None if the catalog is not in a file."""
    return Path(catalog.removeprefix(SQLITE)) if catalog.startswith(SQLITE) else None


def libpq(catalog: str) -> dict[str, str]:
    """Return libpq's parameters for a catalog in PostgreSQL.

    >>> libpq("postgresql://db1:5433/lake?sslmode=require")
    {'host': 'db1', 'port': '5433', 'dbname': 'lake', 'sslmode': 'require'}
    """
    url = urlsplit(catalog)
    parameters = {
        "host": url.hostname or "",
        "port": str(url.port or ""),
        "dbname": unquote(url.path.removeprefix("/")),
    }
    options = {name: values[-1] for name, values in parse_qs(url.query).items()}
    return {name: value for name, value in (parameters | options).items() if value}


def place(catalog: str) -> str:
    """Return the part of an address that identifies the catalog, without other parameters.

    >>> place("postgresql://db1/lake?sslmode=require&port=5433")
    'postgresql:db1:5433/lake'
    """
    if file := file_of(catalog):
        return file.resolve().as_uri()
    if not is_sql(catalog):
        return catalog
    parameters = {"host": "", "port": "5432", "dbname": ""} | libpq(catalog)
    return f"postgresql:{parameters['host']}:{parameters['port']}/{parameters['dbname']}"
