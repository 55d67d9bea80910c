"""The SQL of an adoption: its function, its triggers, and the statement that takes old rows.

Names go through `psycopg.sql`; expressions are the operator's SQL, on lines of their own. In all of
them, a row's columns may be written as ``name`` or ``new.name``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from psycopg import sql

from saf.capture import code
from saf.capture.code import OfTable, expression
from saf.capture.table import Relation, TableFacts
from saf.message import MAX_KEY, MAX_NAME

Rows: TypeAlias = Literal["keep", "mark", "delete", "instead"]
ROWS: tuple[Rows, ...] = get_args(Rows)
Field: TypeAlias = Literal[
    "message_id", "to_service", "key", "message_type", "headers", "content_type", "body",
    "deliver_at", "expires_at",
]  # fmt: skip
FIELDS: tuple[Field, ...] = get_args(Field)
"""Fields of a message that a column can have, in the order of saf.outbox."""

SOURCE = """
#variable_conflict use_column
BEGIN
    INSERT INTO saf.outbox ({columns})
    SELECT {values}
    FROM saf_new AS new WHERE {where};{settle}
    RETURN NULL;
END
"""
SETTLE = """
    {settle};"""
SOURCE_INSTEAD = """
#variable_conflict use_column
BEGIN
    INSERT INTO saf.outbox ({columns})
    SELECT {values}
    FROM (SELECT NEW.*) AS new WHERE {where};
    IF FOUND THEN
        RETURN NULL;
    END IF;
    RETURN NEW;
END
"""
INSTEAD = """\
CREATE OR REPLACE TRIGGER {trigger} BEFORE INSERT ON {table}
    FOR EACH ROW EXECUTE FUNCTION saf.{function}()"""
UPDATE = "UPDATE {table} AS new SET {assigned} WHERE ({key}) IN (SELECT {key} FROM {rows})"
DELETE = "DELETE FROM {table} AS new WHERE ({key}) IN (SELECT {key} FROM {rows})"
"""What becomes of rows; no lock is needed before, because the condition is checked again."""

# The condition is checked again for a row that another session has changed since. Such a row is
# not settled, and then the counts differ and the chunk is rolled back.
TAKE = """
WITH pending AS MATERIALIZED (
    SELECT new.* FROM {table} AS new WHERE {where} ORDER BY {order} LIMIT {limit}
), settled AS (
    {settle}
), sent AS (
    INSERT INTO saf.outbox ({columns})
    SELECT {values}
    FROM pending AS new ORDER BY {order}
    RETURNING 1
)
SELECT (SELECT count(*) FROM sent), (SELECT count(*) FROM settled),
       (SELECT count(*) FROM settled AS s (still_pending) WHERE still_pending)
"""
KEPT = "SELECT false FROM pending"

# A row that saf.outbox refuses, by its primary key; nothing of its body is shown
REFUSED = """
SELECT {key}, problem FROM (
    SELECT new.*, CASE
        WHEN {service} IS NULL THEN 'to_service is null'
        WHEN octet_length({service}) NOT BETWEEN 1 AND {longest_name} THEN
            'to_service has ' || octet_length({service}) || ' bytes, not 1 to {longest_name}'
        WHEN octet_length({message_key}) > {longest_key} THEN
            'key has ' || octet_length({message_key}) || ' bytes, more than {longest_key}'
    END AS problem
    FROM {table} AS new WHERE {where}) AS refused
WHERE problem IS NOT NULL LIMIT 1
"""


@dataclass(frozen=True, kw_only=True)
class Shape(OfTable):
    """What an adoption sends, checked against its table."""

    to_service: str | None
    """Service of all messages; None: a field has it."""
    message_type: str | None
    """Type of all messages; None: a field has it, or there is none."""
    from_service: str | None
    fields: Mapping[str, str]
    condition: str | None
    rows: Rows
    mark: Mapping[str, str]
    order: str | None
    old: bool
    columns: tuple[str, ...]
    """Columns that the function reads."""
    primary_key: tuple[str, ...]

    @property
    def events(self) -> tuple[str, ...]:
        """Events that have a trigger."""
        return ("insert",)

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of the function: also that no policy hides rows from it, and that rows are found
        by their primary key, however many a session's first statement had."""
        more = {"row_security": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
        return {**code.PINNED, **more}

    @property
    def read(self) -> tuple[str, ...]:
        """Columns without which the function fails."""
        settled = self.primary_key if self.rows in ("mark", "delete") else ()
        return tuple(dict.fromkeys((*self.columns, *settled, *self.mark)))


def source(shape: Shape, values: Mapping[str, str]) -> str:
    """Return the source of the trigger's function; ``values`` are by column of saf.outbox."""
    if shape.rows == "instead":
        return _filled(SOURCE_INSTEAD, shape, values).as_string(None)
    settle = ""
    if shape.rows != "keep":
        rows = sql.SQL("saf_new AS new WHERE {}").format(expression(shape.condition))
        settle = sql.SQL(SETTLE).format(settle=_settled(shape, rows)).as_string(None)
    return _filled(SOURCE, shape, values, settle=sql.SQL(settle)).as_string(None)


def triggers(shape: Shape, table: TableFacts) -> list[sql.Composed]:
    """Return the statements that create, or replace, the triggers of a table and its partitions."""
    if shape.rows != "instead":
        return [
            trigger
            for relation in table.relations
            for trigger in code.triggers(shape, relation, shape.events)
        ]
    # PostgreSQL copies a trigger for each row to the partitions
    return [instead(shape, table.relations[0])]


def instead(shape: Shape, relation: Relation) -> sql.Composed:
    """Return the statement that creates the trigger that sends rows instead of writing them."""
    return sql.SQL(INSTEAD).format(
        trigger=sql.Identifier(code.TRIGGER.format("insert")),
        table=sql.Identifier(relation.schema, relation.name),
        function=sql.Identifier(shape.function),
    )


def take(shape: Shape, values: Mapping[str, str], limit: int | None) -> sql.Composed:
    """Return the statement that sends old rows, and marks or deletes them; None: all of them.

    It returns how many rows were sent, how many were settled, and how many are still pending.
    """
    names = [*([] if shape.order is None else [shape.order]), *shape.primary_key]
    where = expression(shape.condition)
    settle: sql.Composable = sql.SQL(KEPT)
    if shape.rows != "keep":
        still = where if shape.rows == "mark" else sql.SQL("false")
        settle = sql.SQL("{} AND {} RETURNING {}").format(
            _settled(shape, sql.SQL("pending")), where, still
        )
    return _filled(
        TAKE,
        shape,
        values,
        table=sql.Identifier(shape.schema, shape.table),
        order=sql.SQL(", ").join(map(sql.Identifier, dict.fromkeys(names))),
        limit=sql.SQL("ALL") if limit is None else sql.Literal(limit),
        settle=settle,
    )


def refused(shape: Shape, values: Mapping[str, str]) -> sql.Composed:
    """Return the query for a row that saf.outbox refuses: its primary key, and the reason."""
    key = sql.SQL(" || ', ' || ").join(
        sql.SQL("{}::text").format(sql.Identifier(name)) for name in shape.primary_key
    )
    return sql.SQL(REFUSED).format(
        key=key,
        service=sql.SQL(values["to_service"]),
        message_key=sql.SQL(values.get("key", "NULL::text")),
        longest_name=sql.Literal(MAX_NAME),
        longest_key=sql.Literal(MAX_KEY),
        table=sql.Identifier(shape.schema, shape.table),
        where=expression(shape.condition),
    )


def _filled(
    text: str, shape: Shape, values: Mapping[str, str], **more: sql.Composable
) -> sql.Composed:
    return sql.SQL(text).format(
        columns=sql.SQL(", ").join(map(sql.Identifier, values)),
        values=sql.SQL(",\n           ").join(map(sql.SQL, values.values())),
        where=expression(shape.condition),
        **more,
    )


def _settled(shape: Shape, rows: sql.Composable) -> sql.Composed:
    """Return the statement that marks or deletes rows."""
    parts: dict[str, sql.Composable] = {
        "table": sql.Identifier(shape.schema, shape.table),
        "key": sql.SQL(", ").join(map(sql.Identifier, shape.primary_key)),
        "rows": rows,
    }
    if shape.rows != "mark":
        return sql.SQL(DELETE).format(**parts)
    assigned = sql.SQL(", ").join(
        sql.SQL("{} = {}").format(sql.Identifier(column), expression(text))
        for column, text in shape.mark.items()
    )
    return sql.SQL(UPDATE).format(**parts, assigned=assigned)
