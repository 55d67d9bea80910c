"""The relay that most teams write: a status column, SKIP LOCKED, an UPDATE; batches of 500."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from benchmarks.peers import BODY
from benchmarks.peers.by_id import in_batches

NAME, VERSION = "SKIP LOCKED", "by hand"
REQUIRES = ("psycopg[binary]==3.2.13",)
LACKS = "order per key, routes, fencing; at least once"
CANNOT: dict[str, str] = {}
SHARE, RELAYS, WARM_UP = 0.3, 2, 0
TABLES = ("public.relayed",)
BATCH = 500

CREATE = """
CREATE TABLE IF NOT EXISTS relayed (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key text,
    headers jsonb,
    body bytea NOT NULL,
    status text NOT NULL DEFAULT 'pending',
    created_at timestamptz NOT NULL DEFAULT now());
CREATE INDEX IF NOT EXISTS relayed_pending ON relayed (id) WHERE status = 'pending'
"""
SEND = """
INSERT INTO relayed (key, headers, body)
VALUES (:account::text, '{"content-type": "application/json"}', '\\x7b22616d6f756e74223a3130307d')
"""
FILL = f"""
INSERT INTO relayed (key, headers, body)
SELECT 'order ' || i %% 5000, '{{"content-type": "application/json"}}', convert_to({BODY}, 'UTF8')
FROM generate_series(1, %s) AS i
"""
TAKE = """
SELECT id, key, body FROM relayed WHERE status = 'pending'
ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
"""
MARK = "UPDATE relayed SET status = 'sent' WHERE id = ANY (%s)"


def prepare(app: str) -> None:
    with psycopg.connect(app, autocommit=True) as connection:
        connection.execute(CREATE)


def empty(connection: psycopg.Connection) -> None:
    connection.execute("TRUNCATE relayed")


def add(connection: psycopg.Connection, count: int, size: int) -> None:
    connection.execute(FILL.encode(), [size, count])


def mark(connection: psycopg.Connection) -> Callable[[], None]:
    return in_batches(connection, "SELECT id FROM relayed ORDER BY id", MARK, BATCH)


def relay(app: str, mom: str, number: int, go_on: Callable[[], bool]) -> None:  # noqa: ARG001 - locks
    with connected(app, mom) as (source, target):
        while _move(source, target) or go_on():
            pass


def _move(source: psycopg.Connection, target: psycopg.Connection) -> bool:
    with source.transaction():
        rows = source.execute(TAKE, [BATCH], binary=True).fetchall()
        if rows:
            with target.transaction():
                store(target, rows)
            source.execute(MARK, [[row[0] for row in rows]])
    return bool(rows)


@contextmanager
def connected(app: str, mom: str) -> Iterator[tuple[psycopg.Connection, psycopg.Connection]]:
    """Connections to both. In one database it is one, and storing and marking one transaction."""
    with psycopg.connect(app) as source:
        if mom == app:
            yield source, source
            return
        with psycopg.connect(mom) as target:
            yield source, target


def store(target: psycopg.Connection, rows: list[tuple[int, str, bytes]]) -> None:
    """By COPY, the quickest way that psycopg has."""
    with target.cursor().copy("COPY arrived (id, key, body) FROM STDIN (FORMAT binary)") as copy:
        copy.set_types(["int8", "text", "bytea"])
        for row in rows:
            copy.write_row(row)
