"""What the logs accept; an outbox is checked by a function, and nobody gets around it."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from saf.database import Dsn
from saf.message import FIRST_MOMENT, LAST_DAY, MAX_HEADERS, MAX_KEY, MAX_NAME
from tests.pipeline import connect


def insert(connection: psycopg.Connection[Any], log: str = "outbox", **columns: Any) -> None:
    row = {"to_service": "billing", "body": b"", **columns}
    connection.execute(
        f"INSERT INTO saf.{log} ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})",
        list(row.values()),
    )


def headers_of(size: int) -> str:
    """Headers that have so many bytes as text."""
    return '{"x": "' + "x" * (size - len('{"x": ""}')) + '"}'


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("addressed", {"to_service": ""}),
    ("possible", {"txid": str(2**63)}),
    ("in_calendar", {"deliver_at": "infinity"}),
    ("in_calendar", {"expires_at": "0044-03-15 BC"}),
    ("in_calendar", {"created_at": LAST_DAY}),
    ("bounded", {"to_service": "s" * (MAX_NAME + 1)}),
    ("bounded", {"key": "k" * (MAX_KEY + 1)}),
    ("bounded", {"headers": headers_of(MAX_HEADERS + 1)}),
    ("bounded", {"headers": '{"n": [' + ", ".join(["1e100000"] * 11) + "]}"}),
]


@pytest.mark.every_postgresql
@pytest.mark.parametrize("log", ["outbox", "inbox"])
def test_what_a_log_refuses_is_told_by_the_name_of_a_constraint(app: Dsn, log: str) -> None:
    with connect(app) as connection:
        for name, columns in WRONG:
            with pytest.raises(psycopg.errors.CheckViolation) as refused:
                insert(connection, log, **columns)
            said = refused.value.diag
            assert (said.schema_name, said.constraint_name) == ("saf", f"{log}_{name}")
            assert (said.table_name or "").rstrip("_01234567") == log


def test_a_sender_with_operators_of_its_own_gets_no_further(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("CREATE SCHEMA evil")
        connection.execute(
            "CREATE FUNCTION evil.octet_length(text) RETURNS int LANGUAGE sql AS 'SELECT 0'"
        )
        for operator, type_ in (
            *((one, "int4") for one in ("<", "<=", ">", ">=", "<>", "=")),
            *((one, "xid8") for one in ("<", "<=", ">", ">=")),
            *((one, "timestamptz") for one in ("<", "<=", ">", ">=")),
        ):
            connection.execute(
                f"CREATE FUNCTION evil.yes({type_}, {type_}) RETURNS boolean LANGUAGE sql "
                "AS 'SELECT true'"
                if operator == "<"
                else "SELECT"
            )
            connection.execute(
                f"CREATE OPERATOR evil.{operator} "
                f"(LEFTARG = {type_}, RIGHTARG = {type_}, FUNCTION = evil.yes)"
            )
        connection.execute("SET search_path = evil, pg_catalog, public")
        for name, columns in WRONG:
            if name != "addressed":
                with pytest.raises(psycopg.errors.CheckViolation, match=f"outbox_{name}"):
                    insert(connection, **columns)


RIGHT: list[dict[str, Any]] = [
    {},
    {"key": "k" * MAX_KEY, "to_service": "s" * MAX_NAME},
    {"headers": '{"n": 1}', "deliver_at": "9999-12-30", "expires_at": FIRST_MOMENT},
    {"headers": json.dumps({"large": "x" * 10_000})},
    {"headers": headers_of(MAX_HEADERS)},
]


@pytest.mark.every_postgresql
@pytest.mark.parametrize("log", ["outbox", "inbox"])
def test_what_is_within_the_limits_is_accepted(app: Dsn, log: str) -> None:
    with connect(app) as connection:
        for columns in RIGHT:
            insert(connection, log, **columns)


def test_a_common_message_is_not_examined(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(
            "CREATE OR REPLACE FUNCTION saf.examine(txid xid8, to_service text, key text, "
            "headers jsonb, created_at timestamptz, deliver_at timestamptz, "
            "expires_at timestamptz) RETURNS boolean LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'examined'; END $$"
        )
        insert(connection, key="k", headers='{"content-type": "application/json"}')
        insert(connection)
        with pytest.raises(psycopg.errors.RaiseException, match="examined"):
            insert(connection, headers=json.dumps({"large": "x" * 1000}))
