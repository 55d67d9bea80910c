"""Fields of messages out of the columns of an adopted table, checked by the server.

A field has a column or an expression. A temporary view of each tells its type, the columns that it
reads, and the functions that it calls, because these run with the rights of schema saf's owner.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from saf.capture.rows import FIELDS, Shape
from saf.capture.stored import CALLS, READ
from saf.capture.table import TableFacts, known
from saf.config import did_you_mean
from saf.database import fetch, reason_of
from saf.errors import ConfigurationError, UsageError

PAIR = re.compile(rf"\s*(.+?)\s*=\s*({'|'.join(FIELDS)})\s*(?:,|\Z)", re.DOTALL)
TRY_VIEW = """
CREATE TEMPORARY VIEW saf_try_condition AS SELECT (
{value}
) AS saf_value FROM {table} AS new WHERE (
{value}
) IS NOT NULL
"""
DROP_VIEW = "DROP VIEW pg_temp.saf_try_condition"
# Type of the view's column; of a domain, the type that it is based on
TYPE = """
WITH RECURSIVE base AS (
    SELECT t.oid, t.typname, t.typcategory, t.typtype, t.typbasetype
    FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = 'pg_temp.saf_try_condition'::regclass AND a.attname = 'saf_value'
    UNION ALL
    SELECT t.oid, t.typname, t.typcategory, t.typtype, t.typbasetype
    FROM base b JOIN pg_type t ON t.oid = b.typbasetype WHERE b.typtype = 'd'
)
SELECT typname::text, typcategory::text FROM base WHERE typtype <> 'd'
"""
JSON = ("json", "jsonb")


def pairs(text: str) -> dict[str, str]:
    """Return the fields of ``COLUMN=FIELD`` pairs with commas, each with its column.

    >>> pairs("topic=to_service,aggregateid=key, (payload -> 'a,b')=body")
    {'to_service': 'topic', 'key': 'aggregateid', 'body': "(payload -> 'a,b')"}

    Raises:
        UsageError: it is something else, or a field appears twice.
    """
    found: dict[str, str] = {}
    place = 0
    while place < len(text):
        match = PAIR.match(text, place)
        if match is None:
            rest = text[place:].strip()
            target = rest.rpartition("=")[2].strip()
            raise UsageError(
                f"--map {rest!r}: expected COLUMN=FIELD, e.g. aggregateid=key"
                f"{did_you_mean(target, FIELDS)}; fields are {', '.join(FIELDS)}"
            )
        source, target = match.groups()
        if target in found:
            raise UsageError(f"--map: {target!r} appears twice")
        found[target] = source
        place = match.end()
    return found


def values(
    connection: psycopg.Connection[Any], shape: Shape, table: TableFacts
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the SQL of the values of messages, and the columns that are read.

    ``connection`` is in a transaction that is rolled back.
    """
    read: dict[str, None] = {}

    def checked(label: str, text: str) -> _Checked:
        found = _checked(connection, shape, table, label, text)
        read.update(dict.fromkeys(found.columns))
        return found

    values = {
        "from_service": sql.Literal(shape.from_service).as_string(None),
        "to_service": sql.Literal(shape.to_service).as_string(None),
        "message_type": sql.Literal(shape.message_type).as_string(None),
    }
    content = "'application/octet-stream'"
    for target, source in shape.fields.items():
        label = f"--map {source}={target}"
        if not is_sql(source):
            known(table, source, "--map")
        text = sql_of(source)
        found = checked(label, text)
        values[target] = _value(target, text, found, label)
        checked(label, values[target])
        if target == "body" and found.type != "bytea":
            is_json = found.type in JSON
            content = "'application/json'" if is_json else "'text/plain; charset=utf-8'"
    if shape.condition is not None:
        label = f"--where {shape.condition!r}"
        if checked(label, f"(\n{shape.condition}\n)").type != "bool":
            raise ConfigurationError(f"{label}: expected a condition")
    for column, text in shape.mark.items():
        checked(f"--mark {column}={text}", f"(\n{text}\n)")
    if "content_type" in values:
        content = f"coalesce({values.pop('content_type')}, {content})"
    if "headers" in values:
        values["headers"] = f"saf.with_content_type({values['headers']}, {content})"
    else:
        values["headers"] = f"jsonb_build_object('content-type', {content})"
    ordered = ("message_id", "from_service", "to_service", "key", "message_type", "headers", "body")
    names = [name for name in (*ordered, "deliver_at", "expires_at") if name in values]
    return {name: values[name] for name in names}, tuple(read)


@dataclass(frozen=True)
class _Checked:
    """What is known about an expression."""

    type: str
    category: str
    columns: tuple[str, ...]


def _checked(
    connection: psycopg.Connection[Any], shape: Shape, table: TableFacts, label: str, text: str
) -> _Checked:
    """Check an expression about a table's columns.

    Raises:
        ConfigurationError: it is none, or calls what others may change.
    """
    view = sql.SQL(TRY_VIEW).format(
        value=sql.SQL(text), table=sql.Identifier(shape.schema, shape.table)
    )
    try:
        # in the extended protocol, which takes one statement only
        connection.execute(view, binary=True)
    except psycopg.Error as error:
        raise ConfigurationError(
            f"{label}: {reason_of(error)} (write names of other schemas with their schema)"
        ) from None
    for called, owner in fetch(connection, CALLS):
        raise ConfigurationError(
            f"{label} calls {called}, which {owner!r} may change, and would run with the rights of "
            "the owner of schema saf: let that owner, or a superuser, own the function"
        )
    ((type_, category),) = fetch(connection, TYPE)
    columns = [name for (name,) in fetch(connection, READ, {"oid": table.oid})]
    for name in columns:
        known(table, name, label)
    connection.execute(DROP_VIEW)
    return _Checked(type_, category, tuple(columns))


def _value(target: str, text: str, found: _Checked, label: str) -> str:
    """Return the SQL of a field's value."""
    type_, is_text = found.type, found.category == "S"
    match target:
        case "message_id" if type_ == "uuid":
            return f"coalesce({text}, gen_random_uuid())"
        case "body" if type_ == "bytea":
            return f"coalesce({text}, '')"
        case "body" if is_text or type_ in JSON:
            return f"coalesce(convert_to({text}::text, 'UTF8'), '')"
        case "headers" if is_text or type_ in JSON:
            json_text = f"nullif(btrim({text}), '')" if is_text else text
            return (
                "(SELECT jsonb_object_agg(saf_h.key, saf_h.value) "
                f"FROM jsonb_each({json_text}::jsonb) AS saf_h "
                "WHERE left(lower(saf_h.key), 4) <> 'saf-')"
            )
        case "deliver_at" | "expires_at" if type_ in ("timestamptz", "timestamp"):
            return f"{text}::timestamptz"
        case "to_service" | "key" | "message_type" | "content_type":
            return f"{text}::text"
    expected = {
        "message_id": "uuid",
        "body": "text, json, jsonb or bytea",
        "headers": "jsonb, json or text",
    }.get(target, "timestamptz")
    raise ConfigurationError(
        f"{label}: its type is {type_}, expected {expected}; an expression in parentheses may "
        f'convert it, e.g. --map "(name::{expected.partition(",")[0]})={target}"'
    )


def is_sql(source: str) -> bool:
    """Return whether a field has an expression, and not a column."""
    return source.startswith("(") and source.endswith(")")


def sql_of(source: str) -> str:
    r"""Return the SQL of a column or an expression.

    >>> sql_of("Payload"), sql_of("(lower(a))")
    ('new."Payload"', '(\nlower(a)\n)')
    """
    if is_sql(source):
        return f"(\n{source[1:-1]}\n)"
    return f"new.{sql.Identifier(source).as_string(None)}"
