"""The schema saf in Django's databases: how it comes there, and how tests empty it.

`bring` migrates by `saf.broker.migrate` on a connection of its own, because a migration is one
transaction. A database that has this library's revision is left alone, so that a role without the
right to migrate may run ``manage.py migrate``.

`empty` truncates the tables of messages, and of rows about messages. The rows of the broker, of
services and routes, and the cursors of readers stay: without them, the next send or receive would
be refused. Ids continue, as cursors need.
"""

from __future__ import annotations

import re
from typing import Any

from django.db import connections, router
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo

from saf.database import Dsn, check_schema, fetch, unavailable_if_lost
from saf.errors import SchemaMismatch, SchemaMissing
from saf.transaction import below_django

LABEL = "saf"

CONTENT = (
    "outbox",
    "inbox",
    "parked",
    "backoff",
    "rejecting",
    "taken_out",
    "dead_letter",
    "dropped",
    "audit",
    "conversation",
    "conversation_group",
    "fragment",
    "resolved_conversation",
    "route_choice",
    "route_share",
    "kept_result",
    "dispatched",
    "attempt",
    "webhook",
)
"""Tables that `empty` truncates. All other tables keep their rows."""

# A partitioned table has no file, and its partitions are tables of the schema too. A file of length
# 0 has no rows, and truncating it takes as long as truncating a full one.
FILLED = """
SELECT c.relname FROM pg_class c
WHERE c.relnamespace = to_regnamespace('saf') AND c.relkind = 'r'
  AND regexp_replace(c.relname, '_[0-7]$', '') = ANY (%(tables)s::text[])
  AND pg_relation_size(c.oid) > 0
ORDER BY 1
"""
TRUNCATE = "TRUNCATE {}"


def lives_in(using: str) -> bool:
    """Return whether saf's schema belongs into a database: PostgreSQL, and its router agrees."""
    is_postgresql = connections[using].vendor == "postgresql"
    return is_postgresql and bool(router.allow_migrate(using, LABEL))


def bring(using: str) -> bool:
    """Bring the schema to this library's revision; return whether that changed anything.

    Raises:
        ConfigurationError, SchemaMismatch, RowsGone, Unavailable: as `saf.broker.migrate.migrate`.
    """
    raw = below_django(connections[using])
    try:
        with unavailable_if_lost(f"database {raw.info.dbname!r}"):
            check_schema(raw)
    except (SchemaMissing, SchemaMismatch):
        from saf.broker.migrate import migrate  # imports Alembic

        migrate(dsn(using))
        return True
    return False


def dsn(using: str) -> Dsn:
    """Return the database of an alias, for saf's own connections: with the same login and role."""
    connection: Any = connections[using]
    keywords = {option.keyword.decode() for option in Conninfo.get_defaults()}
    parts = {
        name: value
        for name, value in connection.get_connection_params().items()
        if name in keywords and value is not None
    }
    if role := connection.settings_dict["OPTIONS"].get("assume_role"):
        escaped = re.sub(r"([\\ ])", r"\\\1", role)
        parts["options"] = f"{parts.get('options', '')} -c role={escaped}".strip()
    return Dsn(make_conninfo("", **parts))


def empty(using: str) -> None:
    """Delete all messages and all rows about messages; keep the broker, services and routes."""
    raw = below_django(connections[using])
    tables = {name for (name,) in fetch(raw, FILLED, {"tables": list(CONTENT)})}
    if tables:
        if "conversation_group" in tables:
            tables.add("conversation")  # refers to it, and so must be named even if it is empty
        names = sql.SQL(", ").join(sql.Identifier("saf", name) for name in sorted(tables))
        raw.execute(sql.SQL(TRUNCATE).format(names))
