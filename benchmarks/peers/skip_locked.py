"""The relay that most teams write: a status column, SKIP LOCKED, an UPDATE; batches of 500."""

from __future__ import annotations

import psycopg

NAME, VERSION = "SKIP LOCKED", "by hand"
REQUIRES = ("psycopg[binary]==3.2.13",)
LACKS = "order per key, routes, fencing; at least once"
SHARE = 0.3
BATCH = 500

TABLES = """
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
FILL = """
INSERT INTO relayed (key, headers, body)
SELECT 'order ' || i %% 5000, '{"content-type": "application/json"}',
       convert_to(rpad('{"order": ' || i, %s, 'x'), 'UTF8')
FROM generate_series(1, %s) AS i
"""
TAKE = """
SELECT id, key, body FROM relayed WHERE status = 'pending'
ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
"""
MARK = "UPDATE relayed SET status = 'sent' WHERE id = ANY (%s)"


def prepare(app: str) -> None:
    with psycopg.connect(app, autocommit=True) as connection:
        connection.execute(TABLES)


def fill(app: str, count: int, size: int) -> None:
    with psycopg.connect(app, autocommit=True) as connection:
        connection.execute("TRUNCATE relayed")
        connection.execute(FILL, [size, count])
        connection.execute("VACUUM ANALYZE relayed")


def relay(app: str, mom: str, number: int) -> None:  # noqa: ARG001 - they share by the locks
    with psycopg.connect(app) as source, psycopg.connect(mom) as target:
        while rows := source.execute(TAKE, [BATCH], binary=True).fetchall():
            store(target, rows)
            target.commit()
            source.execute(MARK, [[row[0] for row in rows]])
            source.commit()


def store(target: psycopg.Connection, rows: list[tuple[int, str, bytes]]) -> None:
    """By COPY, the quickest way that psycopg has."""
    with target.cursor().copy("COPY arrived (id, key, body) FROM STDIN (FORMAT binary)") as copy:
        copy.set_types(["int8", "text", "bytea"])
        for row in rows:
            copy.write_row(row)
