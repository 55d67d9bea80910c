"""An outbox is checked by a function: it says what is wrong, and nobody gets around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from alembic import command

from saf.broker.migrate import config
from saf.database import Dsn, fetch
from saf.log.checks import ACCEPT, EXAMINE
from tests.pipeline import connect

NewDatabase = Callable[[str], Dsn]

VALID = """
SELECT conname, convalidated FROM pg_constraint
WHERE conrelid = 'saf.outbox'::regclass AND contype = 'c' ORDER BY 1
"""
CHECKS = ["outbox_addressed", "outbox_bounded", "outbox_in_calendar", "outbox_possible"]


def insert(connection: psycopg.Connection[Any], **columns: Any) -> None:
    row = {"to_service": "billing", "body": b"", **columns}
    connection.execute(
        f"INSERT INTO saf.outbox ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})",
        list(row.values()),
    )


WRONG = [
    ("outbox_addressed", {"to_service": ""}),
    ("outbox_possible", {"txid": str(2**63)}),
    ("outbox_in_calendar", {"deliver_at": "infinity"}),
    ("outbox_in_calendar", {"expires_at": "0044-03-15 BC"}),
    ("outbox_bounded", {"to_service": "s" * 256}),
    ("outbox_bounded", {"key": "k" * 1025}),
    ("outbox_bounded", {"headers": '{"n": [' + ", ".join(["1e100000"] * 11) + "]}"}),
]


@pytest.mark.every_postgresql
@pytest.mark.parametrize(("constraint", "columns"), WRONG)
def test_what_an_outbox_refuses_is_told_by_the_name_of_a_constraint(
    app: Dsn, constraint: str, columns: dict[str, Any]
) -> None:
    with connect(app) as connection:
        with pytest.raises(psycopg.errors.CheckViolation, match=constraint) as refused:
            insert(connection, **columns)
        said = refused.value.diag
        assert (said.constraint_name, said.schema_name, said.table_name) == (
            constraint,
            "saf",
            "outbox",
        )


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
        for constraint, columns in WRONG:
            if constraint != "outbox_addressed":
                with pytest.raises(psycopg.errors.CheckViolation, match=constraint):
                    insert(connection, **columns)


@pytest.mark.parametrize(("name", "body"), [("accept", ACCEPT), ("examine", EXAMINE)])
def test_the_functions_are_the_library_s(app: Dsn, name: str, body: str) -> None:
    with connect(app) as connection:
        ((there,),) = fetch(
            connection,
            "SELECT prosrc FROM pg_proc WHERE oid = %(name)s::regproc",
            {"name": f"saf.{name}"},
        )
    assert " ".join(there.split()) in " ".join(body.split())


RIGHT = [
    {},
    {"key": "k" * 1024, "to_service": "s" * 255},
    {"headers": '{"n": 1}', "deliver_at": "9999-12-30", "expires_at": "0001-01-01 00:00:00+00"},
    {"headers": json.dumps({"large": "x" * 10_000})},
]


@pytest.mark.every_postgresql
@pytest.mark.parametrize("columns", RIGHT)
def test_what_is_within_the_limits_is_accepted(app: Dsn, columns: dict[str, Any]) -> None:
    with connect(app) as connection:
        insert(connection, **columns)


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


@pytest.mark.parametrize("too_long", [False, True])
def test_rows_that_are_there_are_looked_at_up_and_down(
    new_database: NewDatabase, too_long: bool
) -> None:
    dsn = new_database("older")
    command.upgrade(config(dsn), "0020")
    with connect(dsn) as connection:
        insert(connection)
        if too_long:
            connection.execute("ALTER TABLE saf.outbox DROP CONSTRAINT outbox_bounded")
            insert(connection, key="k" * 2000)
            connection.execute(
                "ALTER TABLE saf.outbox ADD CONSTRAINT outbox_bounded "
                "CHECK (octet_length(key) <= 1024) NOT VALID"
            )
    command.upgrade(config(dsn), "0021")
    with connect(dsn) as connection:
        assert fetch(connection, VALID) == [("outbox_bounded", not too_long)]
    command.downgrade(config(dsn), "0020")
    with connect(dsn) as connection:
        assert fetch(connection, VALID) == [
            (name, not (too_long and name == "outbox_bounded")) for name in CHECKS
        ]
