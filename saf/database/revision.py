"""The schema's revision: library and database must mean the same tables."""

from __future__ import annotations

from typing import Any

import psycopg

from saf.database.asking import fetch
from saf.errors import RowsGone, SchemaMismatch, SchemaMissing

REVISION = "0036"
"""The Alembic revision of the schema that this library reads and writes."""

SCHEMA_REVISION = "SELECT version_num FROM saf.alembic_version"
# Not to_regclass: for a user without USAGE on the schema it fails, and with it the transaction.
HAS_SCHEMA = """
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'saf' AND c.relname = 'alembic_version')
"""
# A downgrade to nothing leaves Alembic's table behind, without a row
HAS_TABLES = HAS_SCHEMA.replace("alembic_version", "broker")


def check_schema(connection: psycopg.Connection[Any]) -> None:
    """Make sure that the library and the database mean the same schema.

    It asks first whether the table exists, because a failed query would abort the caller's
    transaction.

    Raises:
        SchemaMissing, SchemaMismatch, RowsGone: the error names the command that mends it.
    """
    ((exists,),) = fetch(connection, HAS_SCHEMA)
    found = fetch(connection, SCHEMA_REVISION) if exists else []
    tables = exists and not found and fetch(connection, HAS_TABLES) == [(True,)]
    require_revision(connection.info.dbname, found[0][0] if found else None, tables=tables)


def require_revision(database: str, found: str | None, *, tables: bool = False) -> None:
    """Raise unless ``found``, the revision read from ``database``, is the library's own.

    If no revision is found although the ``tables`` exist, rows are gone.
    """
    if found is None and tables:
        raise RowsGone(database, ["saf.alembic_version is empty"])
    if found is None:
        raise SchemaMissing(database)
    if found != REVISION:
        raise SchemaMismatch(database, found, REVISION)
