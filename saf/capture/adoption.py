"""Adoptions: an outbox table that another outbox writes; each of its rows is a message.

    saf adopt --table outbox_events --map topic=to_service,aggregateid=key,payload=body --delete

A capture sends what happened to a row; an adoption sends the row, as its columns say. Like a
capture, it is a trigger that an operator has reviewed, part of the writer's transaction, and run
with the rights of the owner of ``saf.outbox``. It is a row of saf.capture as well.

*What becomes of rows* (`Rows`). ``keep``: they stay as they are, which is a trial, or the business
of their writer. ``mark``: they are updated, so that the old relay regards them as sent. ``delete``:
they are deleted in the statement that inserts them, so writers and ``RETURNING`` notice nothing.
``instead``: a trigger before the insert sends them, and no row is written at all.

*Old rows, once, and before the new ones.* `put` creates the trigger, which stops writers until it
commits, and sends the rows that exist in the same transaction. Whatever a writer inserts later has
a later id, so no key's new rows overtake its old ones, and a process that is killed leaves all of
that or none of it. A limit of time (``hold_seconds``) ends it if writers would wait for longer.

With ``mark``, ``delete`` and ``instead``, a row shows that it was sent. So `take` sends most rows
before, in chunks, without stopping anybody: a chunk sends its rows and marks or deletes them in one
transaction, so a killed run continues where it was. `put` then has only the last ones to send. A
relay that holds a lock on its rows until it has marked them may run meanwhile: a chunk whose rows
were changed meanwhile is rolled back and read again, and `put` waits for such transactions.

*Values that saf refuses*, such as a null service, fail the writer's statement: otherwise the
message would be lost silently. Headers that begin with ``saf-`` are left out, because they are
saf's own.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from saf.capture import code, fields, rows, stored
from saf.capture.rows import FIELDS, Rows, Shape
from saf.capture.stored import Capture, Outcome, Written, is_expression
from saf.capture.table import Relation, TableFacts, find, known
from saf.config import did_you_mean
from saf.database import fetch, reason_of
from saf.errors import ConfigurationError, InvalidMessage, Unavailable, UsageError
from saf.message import MAX_NAME, check_text

CHUNK_ROWS = 5000
HOLD_SECONDS = 5.0
"""How long writers wait for old rows, unless an operator allows more."""
MOST_REPEATS = 20
"""Chunks in a row that another relay may spoil."""
REPEAT_SECONDS = 0.1
LIST = f"""
SELECT {stored.WRITTEN}, adopted
FROM saf.capture WHERE adopted IS NOT NULL ORDER BY schema_name, table_name
"""
PUT = """
INSERT INTO saf.capture (schema_name, table_name, from_service, to_service, message_type, columns,
                         condition, primary_key, function_name, digest, adopted)
VALUES (%(schema)s, %(table)s, %(from_service)s, %(to_service)s, %(message_type)s, %(columns)s,
        %(condition)s, %(primary_key)s, %(function)s, %(digest)s, %(adopted)s)
ON CONFLICT (schema_name, table_name) DO UPDATE
SET from_service = excluded.from_service, to_service = excluded.to_service,
    message_type = excluded.message_type, columns = excluded.columns,
    condition = excluded.condition, primary_key = excluded.primary_key,
    digest = excluded.digest, adopted = excluded.adopted, changed_at = clock_timestamp()
"""
ISOLATION = "SELECT current_setting('transaction_isolation')"
LOCK = "LOCK TABLE {table} IN EXCLUSIVE MODE"
LIMIT_NOW = "SELECT current_setting('statement_timeout')"
LIMIT = "SELECT set_config('statement_timeout', %(limit)s, true)"
GENERATED = """
SELECT a.attname::text FROM pg_attribute a
WHERE a.attrelid = %(oid)s AND a.attname = ANY (%(columns)s) AND a.attgenerated <> ''
"""
# The owner's rights, because the function has them
RIGHTS = """
SELECT has_table_privilege(%(owner)s, %(oid)s::oid, %(right)s),
       c.relrowsecurity AND NOT (
           r.rolsuper OR r.rolbypassrls
           OR (NOT c.relforcerowsecurity AND pg_has_role(r.oid, c.relowner, 'USAGE'))),
       format('%%I.%%I', n.nspname, c.relname)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace CROSS JOIN pg_roles r
WHERE c.oid = %(oid)s AND r.rolname = %(owner)s
"""
# They fire after saf's trigger, which would have sent a row that they change
LATER = """
SELECT t.tgname::text FROM pg_trigger t
WHERE t.tgrelid = %(oid)s AND NOT t.tgisinternal AND t.tgenabled <> 'D'
  AND t.tgtype & 7 = 7 AND t.tgname > 'saf_capture_insert' ORDER BY 1
"""
TRY_INSERT: Mapping[bool, str] = {
    False: "INSERT INTO pg_temp.saf_try SELECT * FROM pg_temp.saf_try WHERE false",
    # a trigger for each row fires only for a row; it does so before the constraints are checked
    True: "INSERT INTO pg_temp.saf_try DEFAULT VALUES",
}
ORDERED = {
    f"pg_catalog.{name}" for name in ("int2", "int4", "int8", "numeric", "timestamptz", "timestamp")
}
"""Types of primary keys that rise with time."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """An adoption as an operator declares it; None stands for a default."""

    table: str
    """Name of the table, as in SQL."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of messages; each has a column, or an expression in parentheses."""
    service: str | None = None
    message_type: str | None = None
    from_service: str | None = None
    condition: str | None = None
    """SQL expression about the columns. Default: all rows."""
    rows: Rows | None = None
    """Default: keep."""
    mark: Mapping[str, str] = field(default_factory=dict)
    """Columns to set when a row was sent, with SQL expressions."""
    order: str | None = None
    """Column of the order of old rows. Default: the primary key, if it rises with time."""
    old: bool = True
    """False: existing rows are left to the old relay."""


@dataclass(frozen=True, kw_only=True)
class Adoption(Shape, Written):
    """An adoption that a database has."""


@dataclass(frozen=True, kw_only=True)
class Review:
    """An adoption that can be written, and the SQL that writes it."""

    shape: Shape
    table: TableFacts
    owner: str
    """Owner of schema saf's outbox, with whose rights the function runs."""
    values: Mapping[str, str]
    """Columns of saf.outbox, with the SQL of their values."""
    source: str
    """Source of the function."""
    others: tuple[str, ...]
    """Triggers of the application that fire after each row: they may change rows again."""

    @property
    def statements(self) -> tuple[str, ...]:
        """The statements of `put` that change the schema, for people."""
        written = [
            code.function(self.shape, self.source),
            *stored.owned(self.shape, self.owner),
            *rows.triggers(self.shape, self.table),
        ]
        return tuple(f"{statement.as_string(None)};" for statement in written)


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """What was done."""

    outcome: Outcome
    messages: int
    """Old rows that were sent."""


def check_fields(declared: Declared) -> None:
    """Check a declaration without its table.

    Raises:
        ConfigurationError: says what is missing, or does not fit together.
    """
    fields = {*declared.fields}
    for name, option, given in (
        ("to_service", "--service", declared.service),
        ("message_type", "--type", declared.message_type),
    ):
        if name in fields and given is not None:
            raise ConfigurationError(f"{option} and --map …={name}: give one of them")
    if "to_service" not in fields and declared.service is None:
        raise ConfigurationError(
            "no service: give --service, or the column that has it, e.g. --map topic=to_service"
        )
    if "body" not in fields:
        raise ConfigurationError("no body: give its column, e.g. --map payload=body")
    if unknown := sorted(fields - {*FIELDS}):
        raise ConfigurationError(
            f"{unknown[0]!r} is not a field of messages{did_you_mean(unknown[0], FIELDS)}, only "
            f"{', '.join(FIELDS)}"
        )
    if (declared.rows == "mark") != bool(declared.mark):
        raise ConfigurationError("rows are marked by --mark COLUMN=SQL, and by nothing else")
    if declared.mark and declared.condition is None:
        raise ConfigurationError(
            "--mark needs --where, an expression that is true until a row is marked, e.g. "
            f'--where "{min(declared.mark)} IS NULL"'
        )


def review(connection: psycopg.Connection[Any], declared: Declared) -> Review:
    """Check a declaration, and return what would be written; changes nothing.

    Raises:
        ConfigurationError: the table cannot be adopted so, or the user may not do it; says why.
        UsageError: a name cannot be used.
    """
    for name in ("service", "from_service", "message_type"):
        if (value := getattr(declared, name)) is not None:
            try:
                check_text(name, value, MAX_NAME)
            except InvalidMessage as error:
                raise UsageError(str(error)) from None
    check_fields(declared)
    with connection.transaction():
        owner = stored.owner_of_outbox(connection)
        table = find(connection, declared.table)
        shape = _shape(declared, table)
        _before(connection, shape)
        with stored.rolled_back(connection):
            connection.execute(stored.TRY_PATH)
            values, columns = fields.values(connection, shape, table)
        shape = replace(shape, columns=columns)
        _check_rights(connection, shape, table, owner)
        _check_instead(connection, shape, table)
        source = rows.source(shape, values)
        _try(connection, shape, values, owner)
        relations = [relation.oid for relation in table.relations]
        others = fetch(connection, stored.OTHERS, {"relations": relations})
    return Review(
        shape=shape,
        table=table,
        owner=owner,
        values=values,
        source=source,
        others=tuple(name for (name,) in others),
    )


def take(
    connection: psycopg.Connection[Any],
    reviewed: Review,
    stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Send old rows in chunks while writers continue; return how many. `put` sends the last ones.

    ``connection`` is in autocommit. Does nothing if rows do not show that they were sent.

    Raises:
        ConfigurationError: a row cannot be sent, or `Declared.mark` leaves rows pending.
        Unavailable: another relay takes the same rows, or has locked them for too long.
    """
    shape = reviewed.shape
    if not shape.old or shape.rows == "keep":
        return 0
    sent = repeats = 0
    last = CHUNK_ROWS
    while last == CHUNK_ROWS and not stopping():
        try:
            with connection.transaction(), stored.briefly(connection, shape.called):
                last = _take(connection, reviewed, CHUNK_ROWS)
        except _Changed:
            repeats += 1
            if repeats == MOST_REPEATS:
                raise Unavailable(
                    f"table {shape.called!r}",
                    "another relay changes the rows that are read: stop it, or try again",
                ) from None
            time.sleep(REPEAT_SECONDS)
            continue
        repeats = 0
        sent += last
    return sent


def put(
    connection: psycopg.Connection[Any], reviewed: Review, hold_seconds: float = HOLD_SECONDS
) -> Adopted:
    """Write what was reviewed, and send the old rows, in a transaction that stops writers.

    Raises:
        ConfigurationError: a row cannot be sent, the old rows take longer than ``hold_seconds``,
            or the table has a capture, or another form of adoption. Nothing is changed.
        Unavailable: other sessions have locked the table for too long.
    """
    shape = reviewed.shape
    new = code.digest(reviewed.source)
    with connection.transaction(), stored.briefly(connection, shape.called):
        # otherwise the snapshot could be older than the lock, and rows could be missed
        if fetch(connection, ISOLATION) != [("read committed",)]:
            raise ConfigurationError("a table is adopted in a READ COMMITTED transaction only")
        before = _before(connection, shape)
        missing = stored.missing_triggers(connection, shape, reviewed.table)
        found = fetch(connection, stored.SOURCE_NOW, {"function": shape.function})
        same = before is not None and before.digest == new and _shape_of(before) == shape
        if same and found == [(reviewed.source,)] and not any(missing.values()):
            return Adopted(outcome="unchanged", messages=0)
        table = sql.Identifier(shape.schema, shape.table)
        if shape.rows != "keep" and shape.old:
            # it also waits for a relay that holds locks on its rows
            connection.execute(sql.SQL(LOCK).format(table=table))
        connection.execute(PUT, _row(shape, new))
        stored.create_function(
            connection,
            shape,
            code.function(shape, reviewed.source),
            reviewed.owner,
            f"sends the rows of {shape.called}",
        )
        if any(missing.values()):
            for trigger in rows.triggers(shape, reviewed.table):
                connection.execute(trigger)
        messages = 0
        if shape.old and (before is None or shape.rows != "keep"):
            with _held(connection, shape, hold_seconds):
                messages = _take(connection, reviewed, None)
        return Adopted(outcome="added" if before is None else "changed", messages=messages)


def listed(connection: psycopg.Connection[Any]) -> list[Adoption]:
    """Return the adoptions of a database, sorted by table."""
    rows = stored.written(connection, LIST)
    adopted = [row.pop("adopted") for row in rows]
    return [
        Adoption(**row, **{**more, "fields": _in_order(more["fields"])})
        for row, more in zip(rows, adopted, strict=True)
    ]


def every(connection: psycopg.Connection[Any]) -> list[Capture | Adoption]:
    """Return the captures and adoptions of a database, sorted by table."""
    found: list[Capture | Adoption] = [*stored.listed(connection), *listed(connection)]
    return sorted(found, key=lambda item: (item.schema, item.table))


def command(shape: Shape) -> list[str]:
    """Return the words of the command that writes an adoption again, without `saf`."""
    words = ["adopt", "--table", shape.quoted]
    for target, source in shape.fields.items():
        words += ["--map", f"{source}={target}"]
    options = {
        "--service": shape.to_service,
        "--type": shape.message_type,
        "--from": shape.from_service,
        "--where": shape.condition,
        "--order": shape.order,
    }
    for option, value in options.items():
        words += [] if value is None else [option, value]
    for column, value in shape.mark.items():
        words += ["--mark", f"{column}={value}"]
    words += [] if shape.rows == "mark" else [f"--{shape.rows}"]
    return words if shape.old else [*words, "--new-only"]


def typed(shape: Shape) -> str:
    """Return the command that writes an adoption again, as typed in a shell."""
    return shlex.join(("saf", *command(shape)))


def _shape(declared: Declared, table: TableFacts) -> Shape:
    where = declared.condition
    for column in declared.mark:
        known(table, column, "--mark")
    return Shape(
        schema=table.schema,
        table=table.name,
        to_service=declared.service,
        message_type=declared.message_type,
        from_service=declared.from_service,
        fields=_in_order(declared.fields),
        condition=None if where is None else is_expression(where, "--where"),
        rows=declared.rows or "keep",
        mark={
            column: is_expression(text, f"--mark {column}")
            for column, text in sorted(declared.mark.items())
        },
        order=_order(declared, table),
        old=declared.old,
        columns=(),
        primary_key=table.primary_key,
    )


def _in_order(fields: Mapping[str, str]) -> dict[str, str]:
    return {name: fields[name] for name in FIELDS if name in fields}


def _order(declared: Declared, table: TableFacts) -> str | None:
    """Return the column of the order of old rows; None: the primary key, or no old rows."""
    if declared.order is not None:
        return known(table, declared.order, "--order")
    first = table.primary_key[0]
    if declared.old and (len(table.primary_key) > 1 or table.columns[first] not in ORDERED):
        raise ConfigurationError(
            f"the primary key of table {table.called!r} ({', '.join(table.primary_key)}) does not "
            "tell in which order rows were written: name a column that does, e.g. --order "
            "created_at; or leave existing rows to the old relay with --new-only"
        )
    return None


def _check_rights(
    connection: psycopg.Connection[Any], shape: Shape, table: TableFacts, owner: str
) -> None:
    if shape.rows == "keep":
        return
    right = "UPDATE" if shape.rows == "mark" else "DELETE"
    if shape.old:
        _may(connection, table, right, connection.info.user)
    if shape.rows == "instead":
        return
    for needed in ("SELECT", right):
        _may(connection, table, needed, owner)
    ((_, hidden, _),) = fetch(
        connection, RIGHTS, {"oid": table.oid, "owner": owner, "right": right}
    )
    if hidden:
        raise ConfigurationError(
            f"row-level security of table {table.called!r} hides rows from {owner!r}, who owns "
            f"schema saf and could not {shape.rows} them: let that owner bypass it, or choose "
            "--keep"
        )


def _may(connection: psycopg.Connection[Any], table: TableFacts, right: str, role: str) -> None:
    ((may, _, name),) = fetch(connection, RIGHTS, {"oid": table.oid, "owner": role, "right": right})
    if not may:
        raise ConfigurationError(
            f"{role!r} needs {right} on table {table.called!r}: let its owner run GRANT {right} ON "
            f"{name} TO {sql.Identifier(role).as_string(None)}"
        )


def _check_instead(connection: psycopg.Connection[Any], shape: Shape, table: TableFacts) -> None:
    if shape.rows != "instead":
        return
    params = {"oid": table.oid, "columns": list(shape.columns)}
    for (column,) in fetch(connection, GENERATED, params):
        raise ConfigurationError(
            f"--instead: {column!r} is a generated column, whose value does not exist before the "
            "row: use --delete"
        )
    for (name,) in fetch(connection, LATER, params):
        raise ConfigurationError(
            f"--instead: trigger {name!r} of table {table.called!r} fires after saf's trigger, so "
            "its changes would not be sent: use --delete"
        )


def _try(
    connection: psycopg.Connection[Any], shape: Shape, values: Mapping[str, str], owner: str
) -> None:
    """Write the function, fire its trigger at a table of the same columns, and take no old row."""
    trial = replace(shape, table="saf_try", schema="pg_temp")
    relation = Relation(schema="pg_temp", name="saf_try", oid=0)
    table = sql.Identifier(shape.schema, shape.table)
    instead = shape.rows == "instead"
    try:
        with stored.rolled_back(connection):
            connection.execute(sql.SQL(stored.TRY_TABLE).format(table=table))
            connection.execute(code.function(trial, rows.source(shape, values)))
            for statement in stored.owned(trial, owner):
                connection.execute(statement)
            triggers = (
                [rows.instead(trial, relation)]
                if instead
                else code.triggers(trial, relation, trial.events)
            )
            for trigger in triggers:
                connection.execute(trigger)
            connection.execute(TRY_INSERT[instead])
    except psycopg.Error as error:
        if instead and isinstance(error, psycopg.IntegrityError):
            return  # of the row without values, which comes this far only if the function is right
        raise ConfigurationError(
            f"table {shape.called!r} cannot be adopted so: {reason_of(error)}"
        ) from None


class _Changed(Exception):
    """Rows were changed by another session while they were sent."""


def _take(connection: psycopg.Connection[Any], reviewed: Review, limit: int | None) -> int:
    """Send old rows, and settle them, in the connection's transaction; return how many."""
    shape = reviewed.shape
    statement = rows.take(shape, reviewed.values, limit)
    stored.pin(connection)
    try:
        with (
            connection.transaction(),
            psycopg.Cursor(connection, row_factory=tuple_row) as cursor,
        ):
            cursor.execute(statement, binary=True)
            ((sent, settled, still),) = cursor.fetchall()
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            f"rows of table {shape.called!r} cannot be taken: {reason_of(error)}"
        ) from None
    except (psycopg.IntegrityError, psycopg.DataError) as error:
        # the server's text would show values of the row
        raise _refused(connection, reviewed, error) from None
    if sent != settled:
        raise _Changed
    if still:
        raise ConfigurationError(
            f"--where {shape.condition!r} is still true for rows that --mark has marked, so they "
            "would be sent again: nothing was taken"
        )
    return int(sent)


def _refused(
    connection: psycopg.Connection[Any], reviewed: Review, error: psycopg.Error
) -> ConfigurationError:
    """Return an error that names a row by its primary key, and shows nothing else of it."""
    shape = reviewed.shape
    statement = rows.refused(shape, reviewed.values)
    what = f"{type(error).__name__}, SQLSTATE {error.sqlstate}"
    where = "a row"
    try:
        with connection.transaction(), psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            found = cursor.execute(statement, binary=True).fetchall()
    except psycopg.Error:
        found = []
    for called, problem in found:
        where, what = f"the row with {', '.join(shape.primary_key)} {called}", problem
    return ConfigurationError(
        f"{where} of table {shape.called!r} cannot be a message ({what}): nothing of its "
        "transaction was done. Repair it, or leave such rows out with --where"
    )


@contextmanager
def _held(connection: psycopg.Connection[Any], shape: Shape, seconds: float) -> Iterator[None]:
    """Limit how long writers wait for old rows, in the connection's transaction."""
    ((before,),) = fetch(connection, LIMIT_NOW)
    connection.execute(LIMIT, {"limit": f"{round(seconds * 1000)}ms"})
    try:
        yield
    except psycopg.errors.QueryCanceled:
        way = (
            "raise --hold at a time when writers may wait, choose fewer rows with --where, or let "
            "rows be marked or deleted, so that most are sent before"
            if shape.rows == "keep"
            else "run it again, or raise --hold at a time when writers may wait"
        )
        raise ConfigurationError(
            f"the old rows of table {shape.called!r} could not be sent within {seconds:g} s, while "
            f"its writers wait: it is not adopted. To continue, {way}"
        ) from None
    except _Changed:
        raise Unavailable(
            f"table {shape.called!r}", "its rows were changed meanwhile; try again"
        ) from None
    connection.execute(LIMIT, {"limit": before})


def _before(connection: psycopg.Connection[Any], shape: Shape) -> Adoption | None:
    """Return the adoption that the table has.

    Raises:
        ConfigurationError: it has a capture, or an adoption that does something else with rows.
    """
    if any(item.called == shape.called for item in stored.listed(connection)):
        raise ConfigurationError(
            f"table {shape.called!r} is captured, so its rows would be sent twice: `saf capture "
            "remove` ends the capture"
        )
    before = next((item for item in listed(connection) if item.called == shape.called), None)
    if before is not None and before.rows != shape.rows:
        raise ConfigurationError(
            f"table {shape.called!r} is adopted with --{before.rows}, and rows that it has were "
            f"sent under that rule: to change it to --{shape.rows}, remove the adoption first "
            "(`saf capture remove`)"
        )
    return before


def _row(shape: Shape, digest: str) -> dict[str, Any]:
    names = ("fields", "rows", "mark", "order", "old")
    adopted = {name: getattr(shape, name) for name in names}
    return {
        "schema": shape.schema,
        "table": shape.table,
        "from_service": shape.from_service,
        "to_service": shape.to_service,
        "message_type": shape.message_type,
        "columns": list(shape.columns),
        "condition": shape.condition,
        "primary_key": list(shape.primary_key),
        "function": shape.function,
        "digest": digest,
        "adopted": json.dumps(adopted),
    }


def _shape_of(adoption: Adoption) -> Shape:
    return Shape(**{name: getattr(adoption, name) for name in Shape.__dataclass_fields__})
