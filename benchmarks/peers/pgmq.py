"""pgmq, its SQL-only install, with a relay as its users write it: read, store, delete; 500 each."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psycopg

from benchmarks.peers import BODY
from benchmarks.peers.by_id import in_batches
from benchmarks.peers.skip_locked import connected, store

NAME, VERSION = "pgmq", "1.1.4"
REQUIRES = ("pgmq==1.1.4", "psycopg[binary]==3.2.13")
LACKS = "order per key, routes, fencing; at least once"
CANNOT: dict[str, str] = {}
SHARE, RELAYS, WARM_UP = 0.3, 2, 0
TABLES = ("pgmq.q_peer", "pgmq.a_peer")
BATCH = 500

SEND = "SELECT pgmq.send('peer', jsonb_build_object('key', :account::text, 'amount', 100))"
FILL = f"""
SELECT pgmq.send_batch('peer', array_agg(
    jsonb_build_object('key', 'order ' || i %% 5000, 'body', {BODY})))
FROM generate_series(1, %s) AS i GROUP BY i / 1000
"""
READ = """
SELECT msg_id, message->>'key', convert_to(message->>'body', 'UTF8')
FROM pgmq.read('peer', 60, %s)
"""
DELETE = "SELECT pgmq.delete('peer', %s::bigint[])"


def prepare(app: str) -> None:
    package = find_spec("pgmq")
    assert package is not None
    assert package.origin is not None
    script = Path(package.origin).parent / "sql" / "pgmq.sql"
    with psycopg.connect(app, autocommit=True) as connection:
        if connection.execute("SELECT to_regnamespace('pgmq')").fetchone() == (None,):
            connection.execute(script.read_bytes())
        connection.execute("SELECT pgmq.create('peer')")


def empty(connection: psycopg.Connection) -> None:
    connection.execute("TRUNCATE pgmq.q_peer")


def add(connection: psycopg.Connection, count: int, size: int) -> None:
    connection.execute(FILL.encode(), [size, count])


def mark(connection: psycopg.Connection) -> Callable[[], None]:
    return in_batches(connection, "SELECT msg_id FROM pgmq.q_peer ORDER BY msg_id", DELETE, BATCH)


def relay(app: str, mom: str, number: int, go_on: Callable[[], bool]) -> None:  # noqa: ARG001 - locks
    with connected(app, mom) as (source, target):
        while _move(source, target) or go_on():
            pass


def _move(source: psycopg.Connection, target: psycopg.Connection) -> bool:
    with source.transaction():
        rows = source.execute(READ, [BATCH], binary=True).fetchall()
    if rows:
        with source.transaction():
            with target.transaction():
                store(target, rows)
            source.execute(DELETE, [[row[0] for row in rows]])
    return bool(rows)
