"""What a capture costs the application: one row, 1,000 rows by one statement, and COPY.

The same statements run in turn at a table without a capture and at one with a capture, in one
session, each in a transaction of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import psycopg

from benchmarks.stage import Stage
from saf.capture.stored import Declaration, put, review

ROWS, MANY = 20_000, 1000
ROUNDS = 5
SINGLE, BULK = 400, 10
"""Statements of a round."""
TABLES = ("bare_orders", "captured_orders")
TABLE = """
DROP TABLE IF EXISTS {table};
CREATE TABLE {table} (
    number bigint PRIMARY KEY, customer text, status text, total numeric(10, 2), placed timestamptz,
    address text, note text, version int);
INSERT INTO {table}
SELECT n, 'customer ' || n % 500, 'open', n % 1000 / 7.0, now(), 'street ' || n, repeat('x', 40), 0
FROM generate_series(1, {rows}) AS n;
"""
ONE = "UPDATE {table} SET version = version + 1 WHERE number = %s"
RANGE = "UPDATE {table} SET version = version + 1 WHERE number BETWEEN %s AND %s"


def run(stage: Stage) -> None:
    """Notes the milliseconds of each statement, without and with a capture, and their ratio."""
    with stage.app.connect(role="bench", autocommit=True) as connection:
        for table in TABLES:
            connection.execute(TABLE.replace("{table}", table).replace("{rows}", str(ROWS)))
        declared = Declaration(table=TABLES[1], service="billing")
        put(connection, review(connection, declared))
        kinds: dict[str, tuple[Callable[[Any, str, int], None], int]] = {
            "one_row": (_one, SINGLE),
            "1000_rows": (_range, BULK),
            "copy_1000": (_copy, BULK),
        }
        taken: dict[tuple[str, str], list[float]] = {}
        for number in range(ROUNDS):
            for kind, (statement, times) in kinds.items():
                for table in TABLES:
                    started = time.perf_counter()
                    for turn in range(times):
                        statement(connection, table, number * times + turn)
                    milliseconds = (time.perf_counter() - started) / times * 1000
                    taken.setdefault((kind, table), []).append(milliseconds)
    for kind in kinds:
        bare, captured = (statistics.median(taken[kind, table]) for table in TABLES)
        stage.note(f"capture_{kind}_bare_ms", taken[kind, TABLES[0]], "ms")
        stage.note(f"capture_{kind}_ms", taken[kind, TABLES[1]], "ms")
        stage.note(f"capture_{kind}_ratio", captured / bare, "to no capture")


def _one(connection: psycopg.Connection[Any], table: str, turn: int) -> None:
    connection.execute(ONE.replace("{table}", table), (turn * 7 % ROWS + 1,))


def _range(connection: psycopg.Connection[Any], table: str, turn: int) -> None:
    first = turn * MANY % ROWS + 1
    connection.execute(RANGE.replace("{table}", table), (first, first + MANY - 1))


def _copy(connection: psycopg.Connection[Any], table: str, turn: int) -> None:
    first = ROWS + turn * MANY + 1
    with (
        connection.cursor() as cursor,
        cursor.copy(f"COPY {table} (number, customer, status, total) FROM STDIN") as copy,
    ):
        for number in range(first, first + MANY):
            copy.write_row((number, f"customer {number}", "open", "10.50"))
