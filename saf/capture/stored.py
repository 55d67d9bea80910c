"""Captures in a database: reviewed, written, listed and removed, in the caller's transaction.

`review` checks a declaration against its table, and returns the SQL that `put` executes. It tries
the SQL at a temporary table of the same columns first, and rolls that back, so that what PostgreSQL
would refuse at the application's first statement is refused here.

The connection's user must own schema saf, or be a superuser, and needs SELECT and TRIGGER on the
table. `put` waits for writers of the table no longer than `LOCK_SECONDS`, because writers that come
later wait behind it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, Literal, TypeVar

import psycopg
from psycopg import sql
from psycopg.abc import QueryNoTemplate
from psycopg.rows import dict_row

from saf.capture import code
from saf.capture.code import TRIGGER, OfTable, Shape
from saf.capture.table import Relation, TableFacts, find, known, oid_of
from saf.config import did_you_mean
from saf.database import fetch, reason_of
from saf.errors import ConfigurationError, InvalidMessage, Unavailable, UsageError
from saf.message import MAX_NAME, check_text

Outcome = Literal["added", "changed", "unchanged"]

W = TypeVar("W", bound="Written")

LOCK_SECONDS = 3.0
LOCK_TIMEOUT = "SELECT set_config('lock_timeout', %(milliseconds)s, true)"
LONGEST_TYPE = MAX_NAME - len(".truncate")
WHOLE_ROW = re.compile(r"\b(?:old|new)\b(?!\s*\.\s*[\w\"])", re.IGNORECASE)
"""Finds ``old`` and ``new`` that are not followed by a column."""

OWNERS = """
SELECT pg_get_userbyid(c.relowner)::text, pg_has_role(c.relowner, 'USAGE')
FROM pg_class c WHERE c.oid = 'saf.outbox'::regclass
"""
WRITTEN = """
capture_id, schema_name AS schema, table_name AS table, from_service, to_service, message_type,
columns, condition, primary_key, digest, created_at, changed_at
"""
"""SQL: columns that captures and adoptions have, by the names of their fields."""
LIST = f"""
SELECT {WRITTEN}, key, compared
FROM saf.capture WHERE adopted IS NULL ORDER BY schema_name, table_name
"""
PUT = """
INSERT INTO saf.capture (schema_name, table_name, from_service, to_service, message_type, key,
                         columns, condition, primary_key, compared, function_name, digest)
VALUES (%(schema)s, %(table)s, %(from_service)s, %(to_service)s, %(message_type)s, %(key)s,
        %(columns)s, %(condition)s, %(primary_key)s, %(compared)s, %(function)s, %(digest)s)
ON CONFLICT (schema_name, table_name) DO UPDATE
SET from_service = excluded.from_service, to_service = excluded.to_service,
    message_type = excluded.message_type, key = excluded.key, columns = excluded.columns,
    condition = excluded.condition, primary_key = excluded.primary_key,
    compared = excluded.compared, function_name = excluded.function_name,
    digest = excluded.digest, changed_at = clock_timestamp()
"""
IS_ADOPTED = """
SELECT adopted IS NOT NULL FROM saf.capture
WHERE schema_name = %(schema)s AND table_name = %(table)s
"""
DELETE = "DELETE FROM saf.capture WHERE capture_id = %(capture_id)s"
DROP = "DROP FUNCTION IF EXISTS saf.{function}() CASCADE"
OWN = "ALTER FUNCTION saf.{function}() OWNER TO {owner}"
REVOKE = "REVOKE ALL ON FUNCTION saf.{function}() FROM PUBLIC"
COMMENT = "COMMENT ON FUNCTION saf.{function}() IS {text}"

# The triggers of a table that call a capture's function and fire for ordinary sessions
TRIGGERS = """
SELECT t.tgname::text FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
WHERE t.tgrelid = %(relation)s AND p.pronamespace = 'saf'::regnamespace
  AND p.proname = %(function)s AND t.tgenabled IN ('O', 'A')
"""
SOURCE_NOW = """
SELECT prosrc FROM pg_proc WHERE pronamespace = 'saf'::regnamespace AND proname = %(function)s
  AND prosecdef AND proconfig IS NOT NULL
  AND proowner = (SELECT relowner FROM pg_class WHERE oid = 'saf.outbox'::regclass)
"""
# Triggers that may change rows again before the capture's trigger fires
OTHERS = """
SELECT DISTINCT t.tgname::text FROM pg_trigger t
WHERE t.tgrelid = ANY (%(relations)s) AND NOT t.tgisinternal AND t.tgenabled <> 'D'
  AND t.tgtype & 3 = 1 AND t.tgname NOT LIKE 'saf\\_capture\\_%%' ORDER BY 1
"""

SET = "SELECT set_config(%(name)s, %(value)s, true)"
# Otherwise policies of the table would hide rows, and so leave them out
ALL_ROWS = "SET LOCAL row_security = off"
TRY_PATH = "SET LOCAL search_path = pg_catalog, pg_temp"
TRY_VIEW = """
CREATE TEMPORARY VIEW saf_try_condition AS SELECT (
{condition}
) AS saf_true FROM {table} AS old, {table} AS new WHERE (
{condition}
)
"""
READ = """
SELECT DISTINCT a.attname::text FROM pg_rewrite r JOIN pg_depend d ON d.objid = r.oid
     JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
WHERE r.ev_class = 'pg_temp.saf_try_condition'::regclass AND d.classid = 'pg_rewrite'::regclass
  AND d.refclassid = 'pg_class'::regclass AND d.refobjid = %(oid)s AND d.refobjsubid > 0
ORDER BY 1
"""
# Built-in functions are pinned, so nothing depends on them
CALLS = """
SELECT DISTINCT p.oid::regprocedure::text, pg_get_userbyid(p.proowner)::text
FROM pg_rewrite r JOIN pg_depend d ON d.objid = r.oid
     JOIN pg_proc p ON p.oid = CASE d.refclassid
          WHEN 'pg_proc'::regclass THEN d.refobjid
          WHEN 'pg_operator'::regclass
          THEN (SELECT o.oprcode::oid FROM pg_operator o WHERE o.oid = d.refobjid) END
     JOIN pg_roles o ON o.oid = p.proowner
WHERE r.ev_class = 'pg_temp.saf_try_condition'::regclass AND d.classid = 'pg_rewrite'::regclass
  AND NOT o.rolsuper
  AND p.proowner <> (SELECT relowner FROM pg_class WHERE oid = 'saf.outbox'::regclass)
ORDER BY 1
"""
# row_to_json calls the cast of a column's type to json, if it has one
CASTS = """
SELECT a.attname::text, p.oid::regprocedure::text, pg_get_userbyid(p.proowner)::text
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
     JOIN pg_cast c ON c.castsource IN (t.oid, t.typelem, t.typbasetype)
     JOIN pg_proc p ON p.oid = c.castfunc JOIN pg_roles o ON o.oid = p.proowner
WHERE a.attrelid = %(oid)s AND a.attname = ANY (%(columns)s) AND c.casttarget = 'json'::regtype
  AND NOT o.rolsuper
  AND p.proowner <> (SELECT relowner FROM pg_class WHERE oid = 'saf.outbox'::regclass)
"""
TRY_TABLE = "CREATE TEMPORARY TABLE saf_try (LIKE {table}) ON COMMIT DROP"
TRY = (
    "INSERT INTO pg_temp.saf_try SELECT * FROM pg_temp.saf_try WHERE false",
    "UPDATE pg_temp.saf_try SET {key} = {key} WHERE false",
    "DELETE FROM pg_temp.saf_try WHERE false",
)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A capture as an operator declares it; None stands for a default."""

    table: str
    """Name of the table, as in SQL."""
    service: str
    key: str | None = None
    """Column whose text is the key. Default: the primary key, if it is one column."""
    columns: tuple[str, ...] | None = None
    """Columns of the bodies. Default: all that the table has now."""
    condition: str | None = None
    """SQL expression about ``old`` and ``new``. Default: all rows."""
    from_service: str | None = None
    message_type: str | None = None
    """Beginning of the message types. Default: the table's name."""


@dataclass(frozen=True, kw_only=True)
class Written(OfTable):
    """Triggers that a database has, and their function: a capture, or an adoption."""

    capture_id: int
    digest: str
    """SHA-256 of the function's source as it was written."""
    created_at: datetime
    changed_at: datetime


@dataclass(frozen=True, kw_only=True)
class Capture(Shape, Written):
    """A capture that a database has."""


@dataclass(frozen=True, kw_only=True)
class Review:
    """A capture that can be written, and the SQL that writes it."""

    shape: Shape
    table: TableFacts
    owner: str
    """Owner of schema saf's outbox, with whose rights the function runs."""
    source: str
    """Source of the function."""
    others: tuple[str, ...]
    """Triggers of the application that fire after each row: they may change rows again."""

    @property
    def statements(self) -> tuple[str, ...]:
        """The statements of `put` that change the schema, for people."""
        written = [
            code.function(self.shape, self.source),
            *(owned(self.shape, self.owner)),
            *(
                trigger
                for relation in self.table.relations
                for trigger in code.triggers(self.shape, relation)
            ),
        ]
        return tuple(f"{statement.as_string(None)};" for statement in written)


def review(connection: psycopg.Connection[Any], declared: Declaration) -> Review:
    """Check a declaration, and return what would be written; changes nothing.

    Raises:
        ConfigurationError: the table cannot be captured so, or the user may not do it; says why.
        UsageError: a name cannot be used.
    """
    for name, value, longest in (
        ("service", declared.service, MAX_NAME),
        ("from_service", declared.from_service, MAX_NAME),
        ("message_type", declared.message_type, LONGEST_TYPE),
    ):
        if value is not None:
            try:
                check_text(name, value, longest)
            except InvalidMessage as error:
                raise UsageError(str(error)) from None
    with connection.transaction():
        owner = owner_of_outbox(connection)
        table = find(connection, declared.table)
        shape = _shape(declared, table)
        with rolled_back(connection):
            connection.execute(TRY_PATH)
            read = _condition(connection, shape, table)
            shape = replace(shape, compared=_compared(shape, read))
            _check_casts(connection, shape, table)
        source = code.source(shape).as_string(connection)
        _try(connection, shape, source, owner)
        relations = [relation.oid for relation in table.relations]
        others = fetch(connection, OTHERS, {"relations": relations})
    return Review(
        shape=shape,
        table=table,
        owner=owner,
        source=source,
        others=tuple(name for (name,) in others),
    )


def put(connection: psycopg.Connection[Any], reviewed: Review) -> Outcome:
    """Write what was reviewed, in a transaction: the function, its triggers, and its row.

    Raises:
        Unavailable: other sessions have locked the table for too long.
    """
    shape = reviewed.shape
    new = code.digest(reviewed.source)
    with connection.transaction(), briefly(connection, shape.called):
        names = {"schema": shape.schema, "table": shape.table}
        if fetch(connection, IS_ADOPTED, names) == [(True,)]:
            raise ConfigurationError(
                f"table {shape.called!r} is adopted, so its rows are messages already: `saf "
                "capture remove` ends the adoption"
            )
        before = next((item for item in listed(connection) if item.called == shape.called), None)
        found = fetch(connection, SOURCE_NOW, {"function": shape.function})
        missing = missing_triggers(connection, shape, reviewed.table)
        same = before is not None and before.digest == new and _shape_of(before) == shape
        if same and found == [(reviewed.source,)] and not any(missing.values()):
            return "unchanged"
        params = {field.name: getattr(shape, field.name) for field in fields(Shape)}
        lists = {name: list(params[name]) for name in ("columns", "primary_key")}
        compared = None if shape.compared is None else list(shape.compared)
        params |= {**lists, "compared": compared, "function": shape.function, "digest": new}
        connection.execute(PUT, params)
        if before is not None and before.function != shape.function:
            drop(connection, before.function)
        create_function(
            connection,
            shape,
            code.function(shape, reviewed.source),
            reviewed.owner,
            f"sends the changes of {shape.called}",
        )
        for relation, events in missing.items():
            for trigger in code.triggers(shape, relation, events):
                connection.execute(trigger)
        return "added" if before is None else "changed"


def missing_triggers(
    connection: psycopg.Connection[Any], shape: OfTable, table: TableFacts
) -> dict[Relation, list[str]]:
    """Return the events that have no trigger that fires, by table and partition."""
    missing: dict[Relation, list[str]] = {}
    for relation in table.relations:
        params = {"relation": relation.oid, "function": shape.function}
        names = {name for (name,) in fetch(connection, TRIGGERS, params)}
        missing[relation] = [one for one in shape.events if TRIGGER.format(one) not in names]
    return missing


def create_function(
    connection: psycopg.Connection[Any],
    shape: OfTable,
    created: sql.Composed,
    owner: str,
    comment: str,
) -> None:
    """Create or replace a trigger's function, which belongs to an owner, and nobody may call."""
    connection.execute(created)
    for statement in owned(shape, owner):
        connection.execute(statement)
    function = sql.Identifier(shape.function)
    connection.execute(sql.SQL(COMMENT).format(function=function, text=sql.Literal(comment)))


def remove(connection: psycopg.Connection[Any], capture: Written) -> None:
    """Remove a capture, with its function, its triggers and its backfills, in a transaction.

    Raises:
        Unavailable: other sessions have locked the table for too long.
    """
    with connection.transaction(), briefly(connection, capture.called):
        owner_of_outbox(connection)
        drop(connection, capture.function)
        connection.execute(DELETE, {"capture_id": capture.capture_id})


def listed(connection: psycopg.Connection[Any]) -> list[Capture]:
    """Return the captures of a database, sorted by table."""
    return [Capture(**row) for row in written(connection, LIST)]


def written(connection: psycopg.Connection[Any], query: QueryNoTemplate) -> list[dict[str, Any]]:
    """Return rows of saf.capture as fields, in which arrays are tuples."""
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(query).fetchall()
    return [
        {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
        for row in rows
    ]


def named(connection: psycopg.Connection[Any], name: str) -> Capture:
    """Return the capture of a table, by its name as in SQL, also if the table is gone.

    Raises:
        ConfigurationError: the table has no capture.
    """
    return one_of(connection, listed(connection), name)


def one_of(connection: psycopg.Connection[Any], captures: Sequence[W], name: str) -> W:
    """Return one of some captures by its table; otherwise like `named`."""
    oid = oid_of(connection, name)
    if oid is not None:
        found = [item for item in captures if oid_of(connection, item.quoted) == oid]
    else:
        found = [item for item in captures if name in (item.table, item.called, item.quoted)]
    if len(found) == 1:
        return found[0]
    tables = [item.called for item in captures]
    if found:
        raise ConfigurationError(f"{name!r} may be {' or '.join(item.called for item in found)}")
    raise ConfigurationError(
        f"table {name!r} has no capture{did_you_mean(name, tables)}, only "
        f"{', '.join(tables) or 'none'}"
    )


def command(shape: Shape) -> list[str]:
    """Return the words of the command that writes a capture again, without `saf`."""
    words = ["capture", "add", shape.quoted, "--service", shape.to_service, "--key", shape.key]
    words += ["--columns", ",".join(shape.columns), "--type", shape.message_type]
    if shape.from_service is not None:
        words += ["--from", shape.from_service]
    if shape.condition is not None:
        words += ["--when", shape.condition]
    return words


def typed(shape: Shape) -> str:
    """Return the command that writes a capture again, as typed in a shell."""
    return shlex.join(("saf", *command(shape)))


def is_expression(text: str, option: str) -> str:
    """Return an operator's SQL expression, stripped.

    Raises:
        UsageError: it is empty, or has a character that PostgreSQL does not accept.
    """
    if not text.strip() or "\0" in text:
        raise UsageError(f"{option} {text!r}: expected an SQL expression")
    return text.strip()


def _shape(declared: Declaration, table: TableFacts) -> Shape:
    columns = tuple(table.columns) if declared.columns is None else declared.columns
    for name in columns:
        known(table, name, "--columns")
    if twice := {name for name in columns if columns.count(name) > 1}:
        raise ConfigurationError(f"--columns: {min(twice)!r} appears twice")
    key = declared.key
    if key is None:
        if len(table.primary_key) > 1:
            raise ConfigurationError(
                f"the primary key of table {table.called!r} has several columns: choose the one "
                f"that is the key of messages, e.g. --key {table.primary_key[0]}"
            )
        key = table.primary_key[0]
    condition = declared.condition
    return Shape(
        schema=table.schema,
        table=table.name,
        to_service=declared.service,
        from_service=declared.from_service,
        message_type=_message_type(declared, table),
        key=known(table, key, "--key"),
        columns=columns,
        condition=None if condition is None else is_expression(condition, "--when"),
        primary_key=table.primary_key,
        compared=None,
    )


def _message_type(declared: Declaration, table: TableFacts) -> str:
    return table.name if declared.message_type is None else declared.message_type


def _compared(shape: Shape, read: Sequence[str] | None) -> tuple[str, ...] | None:
    if read is None:
        return None
    return tuple(dict.fromkeys((*shape.columns, shape.key, *read)))


def _condition(
    connection: psycopg.Connection[Any], shape: Shape, table: TableFacts
) -> Sequence[str] | None:
    """Check the condition, and return the columns that it reads; None: the whole row."""
    if shape.condition is None:
        return ()
    view = sql.SQL(TRY_VIEW).format(
        condition=sql.SQL(shape.condition),
        table=sql.Identifier(shape.schema, shape.table),
    )
    try:
        # in the extended protocol, which takes one statement only
        connection.execute(view, binary=True)
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(f"--when cannot be checked: {reason_of(error)}") from None
    except psycopg.Error as error:
        raise ConfigurationError(
            f"--when {shape.condition!r}: {reason_of(error)} (write columns as new.name or "
            "old.name, and names of other schemas with their schema)"
        ) from None
    for called, owner in fetch(connection, CALLS):
        raise ConfigurationError(
            f"--when calls {called}, which {owner!r} may change, and would run with the rights of "
            "the owner of schema saf: let that owner, or a superuser, own the function"
        )
    read = [name for (name,) in fetch(connection, READ, {"oid": table.oid})]
    for name in read:
        known(table, name, "--when")
    if virtual := [
        name
        for name in sorted(table.virtual)
        if re.search(rf"\b{re.escape(name)}\b", shape.condition)
    ]:
        known(table, virtual[0], "--when")
    return None if WHOLE_ROW.search(shape.condition) else read


def _check_casts(connection: psycopg.Connection[Any], shape: Shape, table: TableFacts) -> None:
    params = {"oid": table.oid, "columns": list(shape.columns)}
    for column, called, owner in fetch(connection, CASTS, params):
        raise ConfigurationError(
            f"--columns {column!r}: its type is cast to json by {called}, which {owner!r} may "
            "change, and would run with the rights of the owner of schema saf"
        )


def _try(connection: psycopg.Connection[Any], shape: Shape, source: str, owner: str) -> None:
    """Write the function, and fire its triggers at an empty table of the same columns."""
    table = sql.Identifier(shape.schema, shape.table)
    trial = replace(shape, table="saf_try", schema="pg_temp")
    relation = Relation(schema="pg_temp", name="saf_try", oid=0)
    key = sql.Identifier(shape.primary_key[0])
    try:
        with rolled_back(connection):
            connection.execute(sql.SQL(TRY_TABLE).format(table=table))
            connection.execute(code.function(trial, source))
            for statement in owned(trial, owner):
                connection.execute(statement)
            for statement in code.triggers(trial, relation):
                connection.execute(statement)
            for text in TRY:
                connection.execute(sql.SQL(text).format(key=key))
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            f"table {shape.called!r} cannot be captured by {connection.info.user!r}: "
            f"{reason_of(error)}"
        ) from None
    except (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError) as error:
        raise ConfigurationError(
            f"table {shape.called!r} cannot be captured so: {reason_of(error)}"
        ) from None


def owner_of_outbox(connection: psycopg.Connection[Any]) -> str:
    """Return the owner of the outbox, if the user may act as it."""
    ((owner, may),) = fetch(connection, OWNERS)
    if not may:
        raise ConfigurationError(
            f"user {connection.info.user!r} may not change captures in database "
            f"{connection.info.dbname!r}: let {owner!r}, who owns schema saf, do it"
        )
    return str(owner)


def owned(shape: OfTable, owner: str) -> list[sql.Composed]:
    """Return the statements that give a function to its owner, and its rights to nobody else."""
    function = sql.Identifier(shape.function)
    return [
        sql.SQL(OWN).format(function=function, owner=sql.Identifier(owner)),
        sql.SQL(REVOKE).format(function=function),
    ]


def drop(connection: psycopg.Connection[Any], function: str) -> None:
    """Drop a function, with its triggers."""
    connection.execute(sql.SQL(DROP).format(function=sql.Identifier(function)))


def _shape_of(capture: Capture) -> Shape:
    return Shape(**{field.name: getattr(capture, field.name) for field in fields(Shape)})


def pin(connection: psycopg.Connection[Any]) -> None:
    """Write values as the trigger does, and read all rows, in the connection's transaction."""
    for name, value in code.PINNED.items():
        connection.execute(SET, {"name": name, "value": value})
    connection.execute(ALL_ROWS)


@contextmanager
def rolled_back(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Run a block of which nothing stays."""
    with connection.transaction():
        yield
        raise psycopg.Rollback


@contextmanager
def briefly(connection: psycopg.Connection[Any], called: str) -> Iterator[None]:
    """Wait for locks only briefly, in the connection's transaction."""
    milliseconds = str(round(LOCK_SECONDS * 1000))
    connection.execute(LOCK_TIMEOUT, {"milliseconds": milliseconds})
    try:
        yield
    except psycopg.errors.LockNotAvailable:
        raise Unavailable(
            f"table {called!r}", f"other sessions had it locked for {LOCK_SECONDS:g} s; try again"
        ) from None
