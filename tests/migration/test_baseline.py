"""What the schema and the library both say: each knows only a part, and they agree."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import get_args

import psycopg
import pytest

from saf.broker.migrate import migrate
from saf.columns import MESSAGE
from saf.database import Dsn, fetch
from saf.destinations.settings import Quality
from saf.dialogs.contracts import SENDERS, VALIDATIONS
from saf.dialogs.statements import State
from saf.log.ring import SLOT_ROWS, SLOTS
from saf.log.shards import MAX_SHARDS, shard_expression
from saf.message import Row
from saf.routing import matching
from saf.setaside.lane import NO_BROKER, Kind
from tests.pipeline import connect

NewDatabase = Callable[[str], Dsn]

COLUMNS = """
SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
WHERE attrelid = %(table)s::regclass AND attnum > 0 ORDER BY attnum
"""
COMPUTED = """
SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef
WHERE (adrelid, adnum) IN (SELECT attrelid, attnum FROM pg_attribute
                           WHERE attrelid = %(table)s::regclass AND attname = %(column)s)
"""
CHECK = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = %(name)s"


def test_what_send_writes_is_columns_of_a_message() -> None:
    names = [column.name for column in MESSAGE]
    assert set(Row._fields) <= set(names)
    assert [name for name in names if name in Row._fields] == list(Row._fields)


@pytest.mark.every_postgresql
@pytest.mark.parametrize(
    "table", ["outbox", "inbox", "outbox_7", "inbox_0", "parked", "dead_letter", "held"]
)
def test_each_table_of_messages_has_the_columns_of_a_message_in_order(app: Dsn, table: str) -> None:
    longer = {"timestamptz": "timestamp with time zone"}
    expected = [(column.name, longer.get(column.type, column.type)) for column in MESSAGE]
    with connect(app) as connection:
        columns = fetch(connection, COLUMNS, {"table": f"saf.{table}"})
    at = columns.index(expected[0])
    assert columns[at : at + len(expected)] == expected


@pytest.mark.parametrize("log", ["outbox", "inbox"])
def test_a_row_draws_its_transaction_id_before_its_id(app: Dsn, log: str) -> None:
    with connect(app) as connection:
        columns = fetch(connection, COLUMNS, {"table": f"saf.{log}"})
    assert [name for name, _ in columns][:3] == ["txid", "id", "shard"]


@pytest.mark.every_postgresql
@pytest.mark.parametrize("log", ["outbox", "inbox"])
def test_a_log_has_the_slots_that_the_library_walks_through(app: Dsn, log: str) -> None:
    with connect(app) as connection:
        ((key,),) = fetch(connection, f"SELECT pg_get_partkeydef('saf.{log}'::regclass)")
        slots = fetch(
            connection,
            "SELECT relname, pg_get_expr(relpartbound, oid) FROM pg_class "
            "WHERE relispartition AND relkind = 'r' AND starts_with(relname, %(log)s) ORDER BY 1",
            {"log": log},
        )
    assert key == f"LIST ((((id / {SLOT_ROWS}) % ({SLOTS})::bigint)))"
    assert slots == [(f"{log}_{n}", f"FOR VALUES IN ('{n}')") for n in range(SLOTS)]


@pytest.mark.parametrize("number", [1, 64, MAX_SHARDS])
def test_a_log_computes_shards_as_the_library_does(new_database: NewDatabase, number: int) -> None:
    dsn = new_database("shards")
    migrate(dsn, shards=number)
    with connect(dsn) as connection:
        connection.execute(
            'CREATE TABLE computed (key text COLLATE "C", message_id uuid, '
            f"shard smallint GENERATED ALWAYS AS ({shard_expression(number)}) STORED)"
        )
        of_library, *of_logs = (
            fetch(connection, COMPUTED, {"table": table, "column": "shard"})
            for table in ("computed", "saf.outbox", "saf.inbox")
        )
        assert of_logs == [of_library] * 2
        with pytest.raises(psycopg.errors.CheckViolation):
            connection.execute("UPDATE saf.broker SET shards = %s", [MAX_SHARDS + 1])


def words(sql: str) -> set[str]:
    """The words that an expression compares with."""
    return {*re.findall(r"'(\w+)'", sql)}


CHOICES: dict[str, Iterable[str]] = {
    "parked_lane_possible": Kind,
    "backoff_lane_possible": Kind,
    "route_quality": get_args(Quality),
    "router_kind": (matching.SQL, matching.ARROW, matching.PYTHON, matching.FUNCTION),
    "router_once_per": (matching.MESSAGE, matching.KEY),
    "router_mode": (matching.REDIRECT, matching.FORWARD),
    "message_type_validation": VALIDATIONS,
    "contract_message_sent_by": SENDERS,
}


def test_columns_take_the_words_that_the_library_writes(app: Dsn) -> None:
    with connect(app) as connection:
        for name, choices in CHOICES.items():
            ((check,),) = fetch(connection, CHECK, {"name": name})
            assert words(check) == {*choices}, name
        state = {"table": "saf.conversation", "column": "state"}
        ((computed,),) = fetch(connection, COMPUTED, state)
        assert words(computed) == {*State}


def test_a_lane_without_a_broker_is_the_same_to_the_schema(app: Dsn) -> None:
    with connect(app) as connection:
        for table in ("parked", "backoff", "taken_out"):
            column = {"table": f"saf.{table}", "column": "broker"}
            assert fetch(connection, COMPUTED, column) == [(f"'{NO_BROKER}'::uuid",)]


def test_each_table_and_view_says_what_it_is(app: Dsn) -> None:
    with connect(app) as connection:
        silent = fetch(
            connection,
            "SELECT relname FROM pg_class WHERE relnamespace = 'saf'::regnamespace "
            "AND relkind IN ('r', 'p', 'v') AND NOT relispartition "
            "AND relname <> 'alembic_version' AND obj_description(oid, 'pg_class') IS NULL",
        )
    assert silent == []
