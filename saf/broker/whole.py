"""Completeness of a broker: saf's own rows exist, are visible, and can be changed.

Tools that do not know saf damage a broker in ways that the schema's revision does not show:

    rows          somebody truncated or deleted saf's own rows, as test cleaners do, or copied
                  the schema without its data
    policies      row-level security hides rows from this login, so messages would be skipped
    publications  a publication (``FOR ALL TABLES``, as Debezium creates it) publishes a table
                  without a replica identity, so PostgreSQL refuses to update or delete its rows;
                  migrations give a replica identity to each table except the slots of the logs
    search_path   schema saf comes first for an application, because its role is called saf (the
                  default path begins with "$user"): the application's tables are created there

Each check is one query of the catalogs and of saf's smallest tables. Any saf grant allows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import psycopg
from psycopg import sql

from saf.database import fetch
from saf.errors import ConfigurationError, RowsGone, UsageError

SCHEMA = "saf"

# Streams may be an outbox's only readers. Reading a table's size needs no right on the table; the
# size is 0 after TRUNCATE and in a copy without data.
ROWS = """
SELECT 'saf.broker has no row' AS what, '' AS reader WHERE NOT EXISTS (SELECT FROM saf.broker)
UNION ALL
SELECT format('saf.%s is empty', c.relname), '' FROM pg_class c
WHERE c.oid IN ('saf.timeline'::regclass, 'saf.actual_key'::regclass)
  AND pg_relation_size(c.oid) = 0
UNION ALL
SELECT 'saf.subscription lacks ''forwarder'' of the outbox', 'outbox/forwarder' WHERE NOT EXISTS (
    SELECT FROM saf.subscription WHERE log = 'outbox' AND (name = 'forwarder' OR stream))
UNION ALL
SELECT format('saf.cursor has %s of the %s rows of subscription %L', count(c.shard), b.shards,
              s.name), format('%s/%s', s.log, s.name)
FROM saf.broker b CROSS JOIN saf.subscription s LEFT JOIN saf.cursor c USING (subscription_id)
GROUP BY b.shards, s.subscription_id, s.name, s.log
HAVING count(c.shard) <> b.shards
   AND (count(c.shard) > 0 OR (s.log, s.name) = ('outbox', 'forwarder'))
"""
"""SQL: saf's missing rows, in words, and the reader that lacks them; no row if complete."""

# saf's own two policies restrict who sends as which service, and hide nothing; see
# `saf.broker.senders`
POLICIES = """
SELECT c.relname::text,
       coalesce(string_agg(quote_ident(p.polname), ', ' ORDER BY p.polname), 'none'),
       session_user::text
FROM pg_class c LEFT JOIN pg_policy p ON p.polrelid = c.oid
WHERE c.relnamespace = 'saf'::regnamespace AND c.relrowsecurity AND row_security_active(c.oid)
GROUP BY c.relname
HAVING c.relname <> 'outbox'
    OR array_agg(p.polname ORDER BY p.polname) <> '{outbox_read,outbox_sender}'
    OR bool_or(p.polname = 'outbox_read' AND pg_get_expr(p.polqual, p.polrelid) <> 'true')
ORDER BY 1
"""
"""SQL: tables whose policies may hide rows from this login, the policies, and the login."""

BOTH = f"""
SELECT NULL, gone.* FROM ({ROWS}) AS gone UNION ALL SELECT p.* FROM ({POLICIES}) AS p
"""
"""SQL: both questions in one round trip."""

# A publication names tables, and of a partitioned table either it or its partitions
WITHOUT_IDENTITY = """
SELECT c.relname, c.relispartition FROM pg_class c
WHERE c.relnamespace = 'saf'::regnamespace AND c.relkind = 'r' AND NOT (
    c.relreplident = 'f'
    OR c.relreplident IN ('d', 'i') AND EXISTS (
        SELECT FROM pg_index i WHERE i.indrelid = c.oid
        AND CASE c.relreplident WHEN 'd' THEN i.indisprimary ELSE i.indisreplident END))
AND EXISTS (
    SELECT FROM pg_publication_tables t
    JOIN pg_publication p ON p.pubname = t.pubname AND (p.pubupdate OR p.pubdelete)
    WHERE t.schemaname = 'saf' AND (
        t.tablename = c.relname
        OR c.relispartition AND t.tablename = split_part(c.relname, '_', 1)))
ORDER BY 1
"""
"""SQL: published tables without a replica identity; whether each is a slot of a log."""

# Different messages may have the same id
IDENTIFY = (
    "CREATE UNIQUE INDEX saf_identity_{slot} ON saf.{slot} (id, message_id, txid)",
    "ALTER TABLE saf.{slot} REPLICA IDENTITY USING INDEX saf_identity_{slot}",
)
FORGET = (
    "ALTER TABLE saf.{slot} REPLICA IDENTITY DEFAULT",
    "DROP INDEX saf.saf_identity_{slot}",
)

PUBLISHED_DELETES = """
SELECT p.pubname, pg_has_role(p.pubowner, 'USAGE'), concat_ws(
    ', ', CASE WHEN pubinsert THEN 'insert' END, CASE WHEN pubupdate THEN 'update' END,
    CASE WHEN pubtruncate THEN 'truncate' END)
FROM pg_publication p
WHERE p.pubdelete AND EXISTS (
    SELECT FROM pg_publication_tables t
    WHERE t.pubname = p.pubname AND t.schemaname = 'saf'
      AND split_part(t.tablename, '_', 1) IN ('outbox', 'inbox'))
ORDER BY 1
"""
"""SQL: publications that publish the logs' deletes; whether this login may alter them; the other
operations that they publish."""

PUBLISH = "ALTER PUBLICATION {name} SET (publish = {what})"

# The role's setting in this database, else in all databases, else the database's setting, else that
# of all roles, else the server's. PostgreSQL skips schemas that are missing or that the role may
# not use.
FIRST = """
WITH setting AS (
    SELECT setrole, setdatabase, substr(one, length('search_path=') + 1) AS path
    FROM pg_db_role_setting, unnest(setconfig) AS one
    WHERE one LIKE 'search_path=%' AND setdatabase IN (
        0, (SELECT oid FROM pg_database WHERE datname = current_database()))
), paths AS (
    SELECT r.oid, r.rolname, coalesce(
        (SELECT path FROM setting WHERE setrole IN (0, r.oid)
         ORDER BY setrole = r.oid DESC, setdatabase <> 0 DESC LIMIT 1),
        (SELECT CASE WHEN source = 'configuration file' THEN reset_val ELSE boot_val END
         FROM pg_settings WHERE name = 'search_path')) AS path
    FROM pg_roles r WHERE r.rolcanlogin
)
SELECT rolname, path FROM paths WHERE 'saf' = (
    SELECT nspname FROM unnest(string_to_array(path, ',')) WITH ORDINALITY AS part (name, place)
    JOIN pg_namespace n
      ON nspname = replace(btrim(name, ' "'), '$user', rolname)
     AND has_schema_privilege(paths.oid, n.oid, 'USAGE')
    ORDER BY place LIMIT 1)
ORDER BY rolname
"""
"""SQL: logins whose search_path begins with schema saf, and their search_path."""

SHOWN = 3
"""Logins named in a report."""


def missing(connection: psycopg.Connection[Any]) -> list[str]:
    """Return saf's missing rows, in words."""
    return [what for what, _ in fetch(connection, ROWS)]


def narrowed(connection: psycopg.Connection[Any]) -> list[tuple[str, str]]:
    """Return tables whose policies may hide rows from this login, and the policies."""
    return [(table, names) for table, names, _ in fetch(connection, POLICIES)]


def without_identity(connection: psycopg.Connection[Any]) -> list[str]:
    """Return published tables that lack the replica identity that updates and deletes need.

    The logs' slots are left out: only repairs update their rows; see `updatable_logs`.
    """
    return [table for table, is_slot in fetch(connection, WITHOUT_IDENTITY) if not is_slot]


@contextmanager
def updatable_logs(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Allow updates of the logs for a block of a transaction that has locked them.

    Slots of the logs have no replica identity, because an index on the id would cost each send.
    REPLICA IDENTITY FULL does not help: PostgreSQL 18 refuses it for a generated column such as
    the shard. So published slots get such an index for the length of the block. Rows must be
    unique; see `deletable_doubles`.
    """
    slots = [slot for slot, is_slot in fetch(connection, WITHOUT_IDENTITY) if is_slot]
    for slot, statement in product(slots, IDENTIFY):
        connection.execute(statement.format(slot=slot).encode())
    yield
    for slot, statement in product(slots, FORGET):
        connection.execute(statement.format(slot=slot).encode())


@contextmanager
def deletable_doubles(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Allow deletes from the logs for a block of a transaction that has locked them.

    Two identical rows have no identity, so the publications stop publishing deletes for the length
    of the block. Other transactions do not see the change.

    Raises:
        UsageError: this login may not alter a publication.
    """
    found = fetch(connection, PUBLISHED_DELETES)
    for name, may_alter, _ in found:
        if not may_alter:
            raise UsageError(
                f"publication {name!r} publishes deletes of saf's logs, which have messages twice: "
                "PostgreSQL lets nobody delete one of two rows that are the same. Run this as the "
                f"owner of the publication or as a superuser, or drop the publication first"
            )
    for name, _, others in found:
        _publish(connection, name, others)
    yield
    for name, _, others in found:
        _publish(connection, name, ", ".join(filter(None, (others, "delete"))))


def _publish(connection: psycopg.Connection[Any], name: str, what: str) -> None:
    query = sql.SQL(PUBLISH).format(name=sql.Identifier(name), what=sql.Literal(what))
    connection.execute(query)


def first_for(connection: psycopg.Connection[Any]) -> tuple[str, str] | None:
    """Return a problem and its cure if some login's search_path begins with schema saf."""
    found = fetch(connection, FIRST)
    if not found:
        return None
    role, path = found[0]
    others = ", ".join(repr(name) for name, _ in found[1:SHOWN])
    what = (
        f"schema saf is the first in the search_path of role {role!r} ({path})"
        f"{f', and of {others}' if others else ''}: objects created without a schema land "
        "among saf's tables, and its own Alembic finds saf's version there"
    )
    cure = sql.SQL("ALTER ROLE {} SET search_path = public").format(sql.Identifier(role))
    if role == SCHEMA:
        return what, f"use another role, such as saf_owner, or {cure.as_string(connection)}"
    return what, cure.as_string(connection)


def policies_cure(table: str) -> str:
    """Return the cure for policies of a table that hide rows."""
    if table == "outbox":
        return (
            "As the owner, DROP POLICY each of saf.outbox but outbox_read and outbox_sender, which "
            "`saf sender` needs"
        )
    return f"As the owner, ALTER TABLE saf.{table} DISABLE ROW LEVEL SECURITY"


def refuse(found: Sequence[Sequence[Any]], database: str, *, reader: str = "") -> None:
    """Raise if some of saf's own rows are missing or may be hidden from the login.

    Args:
        found: the rows of `BOTH`, or of `POLICIES`.
        database: the database's name for the error.
        reader: log and subscription, as in ``outbox/forwarder``. Rows that only another reader
            needs are not an error here; `missing` returns all.

    Raises:
        RowsGone: some of saf's own rows are missing.
        ConfigurationError: row-level security applies to the login.
    """
    for table, policies, login in found:
        if table is not None:
            raise ConfigurationError(
                f"database {database!r}: row-level security of saf.{table} applies to user "
                f"{login!r} (policies: {policies}), so messages could be hidden and passed over. "
                f"{policies_cure(table)}"
            )
    gone = [what for _, what, owner in found if owner in ("", reader)]
    if gone:
        raise RowsGone(database, gone)
