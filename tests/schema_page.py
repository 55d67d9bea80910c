"""docs/reference/schema.md: what people and programs may use of the schema saf, from the catalog.

python -m tests.schema_page       # writes the page
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg

from saf.broker.grants import Kind
from saf.broker.migrate import migrate
from saf.columns import SENT
from saf.database import fetch
from saf.testing.databases import embedded_server

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "schema.md"

HEAD = """# The schema saf

This page is for developers and operators who query a broker by SQL. It lists the contents of the
schema `saf`: the columns that programs may insert, the views and functions, and the tables that an
operator may read. `python -m tests.schema_page` writes it from a migrated database and its
COMMENTs.

A role with `saf grant --role operator` may read everything. Write only into `saf.outbox`, and only
the columns below; leave all other writes to saf's commands, which check them. Tables may change
with a revision of the schema; the columns of a message, and the views, change only with a note in
the changelog.
"""

COLUMNS = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
       coalesce(pg_get_expr(d.adbin, d.adrelid), CASE WHEN a.attidentity <> '' THEN 'identity' END),
       coalesce(col_description(a.attrelid, a.attnum), '')
FROM pg_attribute a
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = %(table)s::regclass AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""

# Views, functions that are nobody's trigger, and tables that are not slots of a log
VIEWS = """
SELECT c.relname, obj_description(c.oid, 'pg_class')
FROM pg_class c WHERE c.relnamespace = 'saf'::regnamespace AND c.relkind = 'v' ORDER BY 1
"""
FUNCTIONS = """
SELECT p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
       coalesce(obj_description(p.oid, 'pg_proc'), '')
FROM pg_proc p
WHERE p.pronamespace = 'saf'::regnamespace AND p.prorettype <> 'trigger'::regtype ORDER BY 1, 2
"""
TABLES = """
SELECT c.relname, obj_description(c.oid, 'pg_class')
FROM pg_class c
WHERE c.relnamespace = 'saf'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
  AND c.relname <> 'alembic_version'
ORDER BY 1
"""
CHECKS = """
SELECT conname, pg_get_constraintdef(oid), coalesce(obj_description(oid, 'pg_constraint'), '')
FROM pg_constraint
WHERE conrelid = 'saf.outbox'::regclass AND contype = 'c' ORDER BY 1
"""
MESSAGE = Path(__file__).parent.parent / "migrations" / "baseline" / "message.sql"
COLUMN = re.compile(r"((?:^ +-- .+\n)+) +(\w+)", re.MULTILINE)
"""A column of a message, below the lines of its comment: those columns have no COMMENT."""


def page(connection: psycopg.Connection[Any]) -> str:
    """The page."""
    written = [HEAD, _sending(connection)]
    written.append("## Views\n")
    for name, comment in fetch(connection, VIEWS):
        written.append(f"### saf.{name}\n\n{_sentence(comment)}\n")
        written.append(_columns(connection, name, nulls=False))
    functions = fetch(connection, FUNCTIONS)
    if functions:
        written.append(
            "## Functions\n\nSenders in any language call `saf.send`, `saf.cancel` and "
            "`saf.reschedule`; see [Sending](../sending.md#without-python). Dialogs and receivers "
            "call those of [From SQL](../sql-api.md). Constraints, policies and saf's own programs "
            "call the other functions.\n"
        )
    for name, arguments, result, comment in functions:
        call = f"saf.{name}({arguments}) → {result}"
        written.append(f"- `{call}`{': ' + comment if comment else ''}\n")
    written.append("## Tables\n")
    for name, comment in fetch(connection, TABLES):
        written.append(f"### saf.{name}\n\n{_sentence(comment)}\n")
        written.append(_columns(connection, name))
    return "\n".join(written).strip() + "\n"


def _sending(connection: psycopg.Connection[Any]) -> str:
    columns = {name: rest for name, *rest in fetch(connection, COLUMNS, {"table": "saf.outbox"})}
    texts = {
        name: " ".join(re.split(r"\s+-- ", text)).strip()
        for text, name in COLUMN.findall(MESSAGE.read_text())
    }
    written = [
        "## Send by INSERT\n\nA plain INSERT into `saf.outbox` is a correct send, from any "
        f"language or a trigger. A role with `saf grant --role {Kind.WRITER}` may set these "
        "columns, and no others:\n\n| column | type | default | |\n| --- | --- | --- | --- |"
    ]
    for name in SENT:
        type_, needed, default, _ = columns[name]
        default = f"`{default}`" if default else "required" if needed else ""
        written.append(f"| `{name}` | {type_} | {default} | {texts[name]} |")
    written.append("\nThe database rejects rows that violate one of these constraints:\n")
    for name, definition, comment in fetch(connection, CHECKS):
        written.append(f"- `{name}`{': ' + comment if comment else ''}\n")
        written.append(f"    ```sql\n    {definition}\n    ```\n")
    return "\n".join(written)


def _columns(connection: psycopg.Connection[Any], of: str, *, nulls: bool = True) -> str:
    rows = ["| column | type | default | |", "| --- | --- | --- | --- |"]
    for name, type_, needed, default, comment in fetch(connection, COLUMNS, {"table": f"saf.{of}"}):
        shown = f"`{default}`" if default else ""
        null = ", or NULL" if nulls and not needed else ""
        rows.append(f"| `{name}` | {type_}{null} | {shown} | {comment} |")
    return "\n".join(rows) + "\n"


def _sentence(comment: str) -> str:
    return comment[0].upper() + comment[1:] + "." if comment else ""


def main() -> None:
    """Write the page."""
    with embedded_server() as server:
        broker = server.create_database("catalog")
        migrate(broker)
        with psycopg.connect(broker.conninfo, autocommit=True) as connection:
            PAGE.write_text(page(connection))


if __name__ == "__main__":
    main()
