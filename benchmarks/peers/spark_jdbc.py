"""Spark's own way: read and write by JDBC, in two partitions; a column says what was taken.

Rows are claimed by an UPDATE first and marked by another, because a range of ids would lose what
commits late. PostgreSQL's driver is 42.5.5 of Debian.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import psycopg
from psycopg.conninfo import conninfo_to_dict

from benchmarks.peers import BODY
from benchmarks.peers.by_id import in_batches

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, VERSION = "Spark JDBC", "4.3"
REQUIRES = ()
LACKS = "order per key, fencing, dead letters; at least once, and only a whole run at a time"
CANNOT = {
    "consume": "Spark has no consumer that takes messages one after the other",
    "send": "it forwards what the SKIP LOCKED table holds: sending is that row",
}
SHARE, RELAYS, WARM_UP = 0.3, 1, 2
TABLES = ("public.jdbc_outbox",)
PARTITIONS = 2
DRIVER = {"driver": "org.postgresql.Driver"}
TUNED = {"reWriteBatchedInserts": "true", "batchsize": "1000"}

SEND = ""
CREATE = """
CREATE TABLE IF NOT EXISTS jdbc_outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text, headers jsonb,
    body bytea NOT NULL, status text NOT NULL DEFAULT 'pending',
    created_at timestamptz NOT NULL DEFAULT now());
CREATE INDEX IF NOT EXISTS jdbc_outbox_pending ON jdbc_outbox (id) WHERE status <> 'sent'
"""
FILL = f"""
INSERT INTO jdbc_outbox (key, headers, body)
SELECT 'order ' || i %% 5000, '{{"content-type": "application/json"}}', convert_to({BODY}, 'UTF8')
FROM generate_series(1, %s) AS i
"""
CLAIM = "UPDATE jdbc_outbox SET status = 'taken' WHERE status = 'pending'"
TAKEN = "(SELECT id, key, body FROM jdbc_outbox WHERE status = 'taken') AS taken"
MARK = "UPDATE jdbc_outbox SET status = 'sent' WHERE status = 'taken'"
MARK_THESE = "UPDATE jdbc_outbox SET status = 'sent' WHERE id = ANY (%s)"


def prepare(app: str) -> None:
    with psycopg.connect(app, autocommit=True) as connection:
        connection.execute(CREATE)


def empty(connection: psycopg.Connection) -> None:
    connection.execute("TRUNCATE jdbc_outbox")


def add(connection: psycopg.Connection, count: int, size: int) -> None:
    connection.execute(FILL.encode(), [size, count])


def mark(connection: psycopg.Connection) -> Callable[[], None]:
    """All in one statement."""
    return in_batches(connection, "SELECT id FROM jdbc_outbox ORDER BY id", MARK_THESE, 10**9)


def relay(app: str, mom: str, number: int, go_on: Callable[[], bool]) -> None:  # noqa: ARG001 - one
    with psycopg.connect(app, autocommit=True) as source:
        while source.execute(CLAIM).rowcount or go_on():
            parts = [f"id % {PARTITIONS} = {part}" for part in range(PARTITIONS)]
            taken = _session().read.jdbc(_url(app), TAKEN, predicates=parts, properties=DRIVER)
            taken.write.jdbc(_url(mom), "arrived", mode="append", properties=DRIVER | TUNED)
            source.execute(MARK)


@cache
def _session() -> SparkSession:
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", os.environ["FROM_PACKAGE"])
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    atexit.register(spark.stop)
    return spark


def _url(dsn: str) -> str:
    """What JDBC calls what libpq's conninfo says; it knows no unix sockets."""
    given = conninfo_to_dict(dsn)
    return f"jdbc:postgresql://127.0.0.1:{given['port']}/{given['dbname']}?user={given['user']}"
