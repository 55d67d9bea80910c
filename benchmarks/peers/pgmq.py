"""pgmq, its SQL-only install, with a relay as its users write it: read, store, delete; 500 each."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import psycopg

from benchmarks.peers.skip_locked import store

NAME, VERSION = "pgmq", "1.1.4"
REQUIRES = ("pgmq==1.1.4", "psycopg[binary]==3.2.13")
LACKS = "order per key, routes, fencing; at least once"
SHARE = 0.3
BATCH = 500

SEND = "SELECT pgmq.send('peer', jsonb_build_object('key', :account::text, 'amount', 100))"
FILL = """
SELECT pgmq.send_batch('peer', array_agg(
    jsonb_build_object('key', 'order ' || i %% 5000, 'body', rpad('', %s, 'x'))))
FROM generate_series(1, %s) AS i GROUP BY i / 1000
"""
READ = """
SELECT msg_id, message->>'key', convert_to(message->>'body', 'UTF8')
FROM pgmq.read('peer', 60, %s)
"""


def prepare(app: str) -> None:
    package = find_spec("pgmq")
    assert package is not None
    assert package.origin is not None
    script = Path(package.origin).parent / "sql" / "pgmq.sql"
    with psycopg.connect(app, autocommit=True) as connection:
        if connection.execute("SELECT to_regnamespace('pgmq')").fetchone() == (None,):
            connection.execute(script.read_bytes())


def fill(app: str, count: int, size: int) -> None:
    with psycopg.connect(app, autocommit=True) as connection:
        connection.execute("SELECT pgmq.drop_queue('peer')")
        connection.execute("SELECT pgmq.create('peer')")
        connection.execute(FILL, [size, count])
        connection.execute("VACUUM ANALYZE pgmq.q_peer")


def relay(app: str, mom: str, number: int) -> None:  # noqa: ARG001 - they share by the locks
    with psycopg.connect(app) as source, psycopg.connect(mom) as target:
        while rows := source.execute(READ, [BATCH], binary=True).fetchall():
            source.commit()
            store(target, rows)
            target.commit()
            source.execute("SELECT pgmq.delete('peer', %s::bigint[])", [[row[0] for row in rows]])
            source.commit()
