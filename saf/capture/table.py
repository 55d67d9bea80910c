"""A table of the application, as the catalog knows it.

`find` returns a table that can be captured, or raises an error that says why it cannot be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from saf.config import did_you_mean
from saf.database import fetch
from saf.errors import ConfigurationError, UsageError

FIND = "SELECT to_regclass(CAST(%(name)s AS text))::oid"
NAMES = """
SELECT n.nspname::text, c.relname::text
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %(oid)s
"""
FACTS = """
SELECT c.relkind::text, c.relpersistence::text, c.relispartition,
       EXISTS (SELECT FROM pg_inherits i WHERE c.relkind <> 'p' AND i.inhparent = c.oid),
       pg_get_userbyid(c.relowner)::text,
       (SELECT array_agg(a.attname::text ORDER BY k.place)
        FROM pg_constraint p CROSS JOIN unnest(p.conkey) WITH ORDINALITY AS k (number, place)
             JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number
        WHERE p.conrelid = c.oid AND p.contype = 'p'),
       EXISTS (SELECT FROM pg_constraint p
               WHERE p.conrelid = c.oid AND p.contype = 'p' AND p.condeferrable)
FROM pg_class c WHERE c.oid = %(oid)s
"""
# A type by the names of its catalog row, because format_type depends on the search_path
COLUMNS = """
SELECT a.attname::text, format('%%I.%%I', n.nspname, t.typname), a.attgenerated::text
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
     JOIN pg_namespace n ON n.oid = t.typnamespace
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
# With the partitions at all levels, because a statement that names a partition fires only the
# partition's own triggers
RELATIONS = """
SELECT n.nspname::text, c.relname::text, c.relkind::text, c.oid,
       has_table_privilege(c.oid, 'SELECT'), has_table_privilege(c.oid, 'TRIGGER')
FROM (SELECT CAST(%(oid)s AS oid) AS relid UNION SELECT relid FROM pg_partition_tree(%(oid)s)) AS r
     JOIN pg_class c ON c.oid = r.relid JOIN pg_namespace n ON n.oid = c.relnamespace
ORDER BY c.oid <> %(oid)s, 1, 2
"""

TABLE, PARTITIONED = "r", "p"
VIRTUAL = "v"


@dataclass(frozen=True, kw_only=True)
class Relation:
    """A table, or one of its partitions."""

    schema: str
    name: str
    oid: int


@dataclass(frozen=True, kw_only=True)
class TableFacts:
    """A table that can be captured."""

    oid: int
    schema: str
    name: str
    columns: Mapping[str, str]
    """Types of its columns, with their schemas; without virtual columns."""
    virtual: frozenset[str]
    """Virtual generated columns, whose values a trigger does not get."""
    primary_key: tuple[str, ...]
    relations: tuple[Relation, ...]
    """The table, and its partitions."""

    @property
    def called(self) -> str:
        """Its schema and name, for people."""
        return f"{self.schema}.{self.name}"


def find(connection: psycopg.Connection[Any], name: str) -> TableFacts:
    """Return a table, by its name as in SQL.

    Raises:
        ConfigurationError: it does not exist, or cannot be captured.
    """
    oid = oid_of(connection, name)
    if oid is None:
        raise ConfigurationError(
            f"no table {name!r} in database {connection.info.dbname!r}: write it as in SQL, with "
            "its schema, e.g. sales.orders"
        )
    return of(connection, oid)


def oid_of(connection: psycopg.Connection[Any], name: str) -> int | None:
    """Return the oid of a table, by its name as in SQL; None: it does not exist."""
    try:
        with connection.transaction():
            ((oid,),) = fetch(connection, FIND, {"name": name})
    except (psycopg.errors.InvalidName, psycopg.errors.SyntaxError):
        raise UsageError(f"{name!r} is not the name of a table: write it as in SQL") from None
    except (psycopg.errors.FeatureNotSupported, psycopg.errors.InsufficientPrivilege):
        return None  # in another database, or in a schema that this user may not use
    return None if oid is None else int(oid)


def of(connection: psycopg.Connection[Any], oid: int) -> TableFacts:
    """Return a table, by its oid; raises like `find`."""
    ((schema, name),) = fetch(connection, NAMES, {"oid": oid})
    ((kind, persistence, is_partition, has_children, owner, primary_key, deferrable),) = fetch(
        connection, FACTS, {"oid": oid}
    )
    called = f"{schema}.{name}"
    relations = fetch(connection, RELATIONS, {"oid": oid})
    reasons = _reasons(
        kind=kind,
        persistence=persistence,
        schema=schema,
        is_partition=is_partition,
        has_children=has_children,
        primary_key=primary_key,
        deferrable=deferrable,
        foreign=[row[1] for row in relations if row[2] not in (TABLE, PARTITIONED)],
    )
    for reason in reasons:
        raise ConfigurationError(f"table {called!r} cannot be captured: {reason}")
    for part_schema, part, _, _, may_select, may_trigger in relations:
        if not (may_select and may_trigger):
            raise ConfigurationError(
                f"user {connection.info.user!r} may not capture table '{part_schema}.{part}': let "
                f"its owner, {owner!r}, run GRANT SELECT, TRIGGER ON {part_schema}.{part} TO "
                f"{connection.info.user}"
            )
    columns = fetch(connection, COLUMNS, {"oid": oid})
    return TableFacts(
        oid=oid,
        schema=schema,
        name=name,
        columns={column: type_ for column, type_, made in columns if made != VIRTUAL},
        virtual=frozenset(column for column, _, made in columns if made == VIRTUAL),
        primary_key=tuple(primary_key),
        relations=tuple(Relation(schema=row[0], name=row[1], oid=row[3]) for row in relations),
    )


def _reasons(
    *,
    kind: str,
    persistence: str,
    schema: str,
    is_partition: bool,
    has_children: bool,
    primary_key: list[str] | None,
    deferrable: bool,
    foreign: list[str],
) -> Iterator[str]:
    """Yield the reasons for which a table cannot be captured."""
    if schema in ("saf", "pg_catalog", "information_schema"):
        yield "it does not belong to the application"
    if kind not in (TABLE, PARTITIONED):
        yield "only tables have triggers for statements with the changed rows"
    if foreign:
        yield f"partition {foreign[0]!r} is a foreign table, which has no triggers for statements"
    if persistence != "p":
        yield "it is temporary or unlogged, so it may lose rows without any statement"
    if is_partition:
        yield "it is a partition; capture the partitioned table"
    if has_children:
        yield "other tables inherit from it; use partitions"
    if primary_key is None:
        yield "it has no primary key, by which old and new rows are matched: add one"
    if deferrable:
        yield "its primary key is deferrable, so two rows may have the same for a while"


def known(table: TableFacts, name: str, option: str) -> str:
    """Return a column's name if the table has it.

    Raises:
        ConfigurationError: it does not have the column, or triggers do not get its value.
    """
    if name in table.virtual:
        raise ConfigurationError(
            f"{option} {name!r}: a virtual generated column of table {table.called!r}, whose value "
            "a trigger does not get; use a stored one"
        )
    if name not in table.columns:
        raise ConfigurationError(
            f"{option} {name!r}: no column of table {table.called!r}"
            f"{did_you_mean(name, table.columns)}, only {', '.join(table.columns)}"
        )
    return name
