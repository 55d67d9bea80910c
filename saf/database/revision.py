"""The schema's revision: library and database must use the same tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from saf.database.asking import fetch
from saf.errors import RowsGone, SchemaMismatch, SchemaMissing

REVISION = "0036"
"""The Alembic revision of the schema that this library reads and writes."""

SCHEMA_REVISION = "SELECT version_num FROM saf.alembic_version"
# Not to_regclass: for a user without USAGE on the schema it fails, and with it the transaction.
# Alembic's table outlives a downgrade to the beginning.
HAS_SCHEMA = """
SELECT count(*) = 2
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'saf' AND c.relname IN ('alembic_version', 'broker')
"""


def check_schema(connection: psycopg.Connection[Any]) -> None:
    """Check that the library and the database have the same schema.

    It first checks that the table exists, because a failed query would abort the caller's
    transaction.

    Raises:
        SchemaMissing, SchemaMismatch, RowsGone: the error names the command that repairs it.
    """
    ((exists,),) = fetch(connection, HAS_SCHEMA)
    found = fetch(connection, SCHEMA_REVISION) if exists else []
    require_schema(connection.info.dbname, exists, found)


def require_schema(database: str, exists: object, found: Sequence[Sequence[Any]]) -> None:
    """Raise unless ``database`` has the library's own revision.

    ``exists`` is the answer to `HAS_SCHEMA`, and ``found`` the rows of `SCHEMA_REVISION`.
    """
    if not exists:
        raise SchemaMissing(database)
    if not found:
        raise RowsGone(database, ["saf.alembic_version is empty"])
    ((revision,),) = found
    require_revision(database, revision)


def require_revision(database: str, found: str) -> None:
    """Raise unless ``found``, the revision read from ``database``, is the library's own."""
    if found != REVISION:
        raise SchemaMismatch(database, found, REVISION)
