"""The SQL of a capture: its function, its triggers, and the statement that sends a chunk of rows.

The bodies are written as text from `row_to_json`, not as jsonb, which fails for values that json
accepts (``\\u0000``, numbers with very many digits): a value that the table accepts must never fail
the application's statement. Settings that change how values are written are pinned, so that the
same value is always the same text.

In the function, ``old`` and ``new`` are rows of the transition tables. Where one does not exist, as
``old`` in an insert, it is a row of NULLs. Names go through `psycopg.sql`; the condition is the
operator's SQL, on lines of its own, so that a comment in it cannot swallow what follows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from psycopg import sql

from saf.capture.table import Relation, TableFacts

PINNED = {
    "search_path": "pg_catalog, pg_temp",
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
}
"""Settings of the function: how values are written does not depend on the session."""
EVENTS = ("insert", "update", "delete", "truncate")
TRIGGER = "saf_capture_{}"
BACKFILL = "saf-backfill"
"""Header of the messages of a backfill: its number."""
LONGEST_NAME = 40

COLUMNS = sql.SQL("from_service, to_service, key, message_type, headers, body")

FUNCTION = """\
CREATE OR REPLACE FUNCTION saf.{name}() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
{settings}
AS {source}"""

SOURCE = """
#variable_conflict use_column
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO saf.outbox ({columns})
        SELECT {from_service}, {to_service}, new.{key}::text, {insert}, {headers},
               convert_to('{{"op": "insert", "before": null, "after": ' || {after} || '}}', 'UTF8')
        FROM saf_new AS new LEFT JOIN saf_new AS old ON false
        WHERE {condition};
    ELSIF TG_OP = 'UPDATE' THEN
        -- An update of the key is a delete and an insert; deletes come first.
        INSERT INTO saf.outbox ({columns})
        SELECT {from_service}, {to_service},
               CASE saf_op WHEN 'delete' THEN old.{key}::text ELSE new.{key}::text END,
               {prefix} || saf_op, {headers},
               convert_to('{{"op": "' || saf_op || '", "before": '
                   || CASE saf_op WHEN 'insert' THEN 'null' ELSE {before} END || ', "after": '
                   || CASE saf_op WHEN 'delete' THEN 'null' ELSE {after} END || '}}', 'UTF8')
        FROM saf_old AS old FULL JOIN saf_new AS new ON {same_row}
             JOIN (VALUES ('delete'), ('insert'), ('update')) AS saf_ops (saf_op) ON CASE
                 WHEN new.{first} IS NULL THEN saf_op = 'delete'
                 WHEN old.{first} IS NULL THEN saf_op = 'insert'
                 WHEN old.{key}::text IS DISTINCT FROM new.{key}::text THEN saf_op <> 'update'
                 ELSE saf_op = 'update' AND {changed} END
        WHERE {condition}
        ORDER BY saf_op;
    ELSIF TG_OP = 'DELETE' THEN
        INSERT INTO saf.outbox ({columns})
        SELECT {from_service}, {to_service}, old.{key}::text, {delete}, {headers},
               convert_to('{{"op": "delete", "before": ' || {before} || ', "after": null}}', 'UTF8')
        FROM saf_old AS old LEFT JOIN saf_old AS new ON false
        WHERE {condition};
    ELSE
        RAISE EXCEPTION USING
            ERRCODE = 'feature_not_supported', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
            MESSAGE = format('TRUNCATE of %I.%I is refused: its changes are captured, and a '
                             'TRUNCATE does not tell which rows are gone',
                             TG_TABLE_SCHEMA, TG_TABLE_NAME),
            HINT = 'DELETE sends a message for each row; `saf capture remove` ends the capture.';
    END IF;
    RETURN NULL;
END
"""

CREATE_TRIGGER = """\
CREATE OR REPLACE TRIGGER {trigger} {when} ON {table}
    {tables}FOR EACH STATEMENT EXECUTE FUNCTION saf.{function}()"""
TRANSITIONS = {
    "insert": ("AFTER INSERT", "REFERENCING NEW TABLE AS saf_new "),
    "update": ("AFTER UPDATE", "REFERENCING OLD TABLE AS saf_old NEW TABLE AS saf_new "),
    "delete": ("AFTER DELETE", "REFERENCING OLD TABLE AS saf_old "),
    "truncate": ("BEFORE TRUNCATE", ""),
}

# A chunk never waits for a row lock, so it takes part in no deadlock: rows that are locked by
# others are left over for the next chunk. Ids are drawn after the locks, which last until the
# chunk commits, so no message of the chunk overtakes a live change of its row. A row that another
# session has changed since the snapshot is read again, and sent as it is now.
CHUNK = """
WITH left_over AS MATERIALIZED (
    SELECT {left_over_key} FROM jsonb_array_elements({left_over}::jsonb) AS e (e)
), following AS MATERIALIZED (
    SELECT {table_key} FROM {table} AS t WHERE {after_last} AND {where}
    ORDER BY {order} LIMIT {limit}
), candidate AS MATERIALIZED (
    SELECT * FROM following
    UNION ALL
    SELECT l.* FROM left_over AS l WHERE EXISTS (
        SELECT FROM {table} AS t WHERE {is_left_over} AND {where})
), locked AS MATERIALIZED (
    SELECT t.* FROM {table} AS t JOIN candidate AS c ON {is_candidate}
    WHERE {where} FOR SHARE OF t SKIP LOCKED
), sent AS (
    INSERT INTO saf.outbox ({columns})
    SELECT {from_service}, {to_service}, new.{key}::text, {read}, {headers}::jsonb,
           convert_to('{{"op": "read", "before": null, "after": ' || {after} || '}}', 'UTF8')
    FROM locked AS new LEFT JOIN locked AS old ON false
    WHERE {condition}
    RETURNING 1
)
SELECT (SELECT count(*) FROM sent), (SELECT count(*) FROM following),
       (SELECT {texts} FROM following AS f ORDER BY {last_first} LIMIT 1),
       (SELECT coalesce(jsonb_agg({texts}), '[]') FROM candidate AS f
        WHERE NOT EXISTS (SELECT FROM locked AS t WHERE {is_found}))
"""


@dataclass(frozen=True, kw_only=True)
class OfTable:
    """A table of the application that has triggers of saf, and their function."""

    schema: str
    table: str

    @property
    def called(self) -> str:
        """The table's schema and name, for people."""
        return f"{self.schema}.{self.table}"

    @property
    def quoted(self) -> str:
        """The table's name as in SQL."""
        return sql.Identifier(self.schema, self.table).as_string(None)

    @property
    def function(self) -> str:
        """Name of the trigger's function in schema saf.

        >>> OfTable(schema="public", table="Orders 1").function
        'capture_orders_1_9a3e23'
        """
        readable = re.sub(r"[^a-z0-9]+", "_", self.table.lower())[:LONGEST_NAME]
        unique = hashlib.sha256(f"{self.schema}\0{self.table}".encode()).hexdigest()[:6]
        return f"capture_{readable}_{unique}"

    @property
    def events(self) -> tuple[str, ...]:
        """Events that have a trigger."""
        return EVENTS

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of the function."""
        return PINNED


@dataclass(frozen=True, kw_only=True)
class Shape(OfTable):
    """What a capture sends, checked against its table."""

    to_service: str
    from_service: str | None
    message_type: str
    """Beginning of the message types."""
    key: str
    columns: tuple[str, ...]
    condition: str | None
    primary_key: tuple[str, ...]
    compared: tuple[str, ...] | None
    """Columns of which an update must change one; None: any column of the row."""

    @property
    def read(self) -> tuple[str, ...]:
        """Columns without which the function fails."""
        named = (*self.columns, self.key, *self.primary_key, *(self.compared or ()))
        return tuple(dict.fromkeys(named))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a chunk of a backfill begins."""

    backfill_id: int
    where: str | None
    """The operator's expression about the table's columns; None: all rows."""
    limit: int
    """Most rows that were not read before."""
    last_key: Sequence[str] | None = None
    """Primary key up to which rows were read, as texts; None: none was read."""
    left_over: Sequence[Sequence[str]] = ()
    """Primary keys of rows before it that were locked."""


def headers(backfill: int | None = None) -> dict[str, str]:
    """Return the headers of messages: of a change, or of a backfill."""
    marked = {} if backfill is None else {BACKFILL: str(backfill)}
    return {"content-type": "application/json", **marked}


def source(shape: Shape) -> sql.Composed:
    """Return the source of the trigger's function."""
    return sql.SQL(SOURCE).format(
        columns=COLUMNS,
        **_message(shape),
        headers=sql.SQL("{}::jsonb").format(sql.Literal(json.dumps(headers()))),
        insert=sql.Literal(f"{shape.message_type}.insert"),
        delete=sql.Literal(f"{shape.message_type}.delete"),
        prefix=sql.Literal(f"{shape.message_type}."),
        before=_json("old", shape.columns),
        same_row=_each("old.{0} = new.{0}", shape.primary_key, " AND "),
        first=sql.Identifier(shape.primary_key[0]),
        changed=_changed(shape.compared),
        condition=expression(shape.condition),
    )


def function(shape: OfTable, source_text: str) -> sql.Composed:
    """Return the statement that creates the function."""
    settings = [
        sql.SQL("SET {} = {}").format(sql.Identifier(name), _setting(name, value))
        for name, value in shape.settings.items()
    ]
    return sql.SQL(FUNCTION).format(
        name=sql.Identifier(shape.function),
        settings=sql.SQL("\n").join(settings),
        source=dollar_quoted(source_text),
    )


def triggers(
    shape: OfTable, relation: Relation, events: Iterable[str] = EVENTS
) -> list[sql.Composed]:
    """Return the statements that create, or replace, the triggers of a table or partition."""
    return [
        sql.SQL(CREATE_TRIGGER).format(
            trigger=sql.Identifier(TRIGGER.format(event)),
            when=sql.SQL(TRANSITIONS[event][0]),
            table=sql.Identifier(relation.schema, relation.name),
            tables=sql.SQL(TRANSITIONS[event][1]),
            function=sql.Identifier(shape.function),
        )
        for event in events
    ]


def chunk(shape: Shape, table: TableFacts, begin: Place) -> sql.Composed:
    """Return the statement that sends the next rows.

    Its values are literals: a statement with parameters could have no ``%`` in a name.
    """
    keys = [sql.Identifier(f"saf_key_{number}") for number in range(len(shape.primary_key))]
    columns = [sql.SQL("t.{}").format(sql.Identifier(name)) for name in shape.primary_key]
    types = [sql.SQL(table.columns[name]) for name in shape.primary_key]
    last = [
        sql.SQL("CAST({} AS {})").format(sql.Literal(text), type_)
        for text, type_ in zip(begin.last_key or (), types, strict=False)
    ]
    comma = sql.SQL(", ")
    after_last = sql.SQL("ROW({}) > ROW({})").format(comma.join(columns), comma.join(last))
    return sql.SQL(CHUNK).format(
        columns=COLUMNS,
        **_message(shape),
        table=sql.Identifier(shape.schema, shape.table),
        where=expression(begin.where),
        condition=expression(shape.condition),
        left_over=sql.Literal(json.dumps(begin.left_over)),
        limit=sql.Literal(begin.limit),
        headers=sql.Literal(json.dumps(headers(begin.backfill_id))),
        read=sql.Literal(f"{shape.message_type}.read"),
        left_over_key=comma.join(
            sql.SQL("CAST(e.e ->> {} AS {}) AS {}").format(sql.Literal(number), type_, key)
            for number, (type_, key) in enumerate(zip(types, keys, strict=True))
        ),
        table_key=comma.join(
            sql.SQL("{} AS {}").format(*pair) for pair in zip(columns, keys, strict=True)
        ),
        after_last=sql.SQL("true") if begin.last_key is None else after_last,
        order=comma.join(columns),
        is_left_over=_equal(columns, keys, "l"),
        is_candidate=_equal(columns, keys, "c"),
        is_found=_equal(columns, keys, "f"),
        texts=sql.SQL("jsonb_build_array({})").format(
            comma.join(sql.SQL("f.{}::text").format(key) for key in keys)
        ),
        last_first=comma.join(sql.SQL("f.{} DESC").format(key) for key in keys),
    )


def dollar_quoted(text: str) -> sql.SQL:
    """Return a text as an SQL literal that people can read.

    >>> dollar_quoted("a").as_string(None), dollar_quoted("$saf$").as_string(None)
    ('$saf$a$saf$', '$saf1$$saf$$saf1$')
    """
    tag, number = "$saf$", 0
    while tag in text:
        number += 1
        tag = f"$saf{number}$"
    return sql.SQL(f"{tag}{text}{tag}")


def digest(source_text: str) -> str:
    """Return the digest that a row of saf.capture has of its function's source."""
    return hashlib.sha256(source_text.encode()).hexdigest()


def _message(shape: Shape) -> dict[str, sql.Composable]:
    return {
        "from_service": sql.Literal(shape.from_service),
        "to_service": sql.Literal(shape.to_service),
        "key": sql.Identifier(shape.key),
        "after": _json("new", shape.columns),
    }


def _json(row: str, columns: Sequence[str]) -> sql.Composed:
    """Return the columns of a row as the text of a JSON object, in their order."""
    values = _each(f"{row}.{{0}}", columns, ", ")
    return sql.SQL("row_to_json((SELECT r FROM (SELECT {}) AS r))::text").format(values)


def _changed(columns: Sequence[str] | None) -> sql.Composable:
    """Return whether one of the columns changed, bit by bit: not all types can be compared."""
    if columns is None:
        return sql.SQL("old.* OPERATOR(pg_catalog.*<>) new.*")
    return sql.SQL("ROW({})::record OPERATOR(pg_catalog.*<>) ROW({})::record").format(
        _each("old.{0}", columns, ", "), _each("new.{0}", columns, ", ")
    )


def _each(form: str, names: Iterable[str], between: str) -> sql.Composed:
    return sql.SQL(between).join(sql.SQL(form).format(sql.Identifier(name)) for name in names)


def _equal(
    columns: Sequence[sql.Composable], keys: Sequence[sql.Composable], row: str
) -> sql.Composed:
    return sql.SQL(" AND ").join(
        sql.SQL(f"{{}} = {row}.{{}}").format(*pair) for pair in zip(columns, keys, strict=True)
    )


def expression(text: str | None) -> sql.SQL:
    """Return a condition on lines of its own; none is true."""
    return sql.SQL("true" if text is None else f"(\n{text}\n)")


def _setting(name: str, value: str) -> sql.SQL:
    return sql.SQL(value if name == "search_path" else f"'{value}'")
