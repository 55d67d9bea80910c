"""PgQ with a relay by hand: COPY a batch, and note its number at the destination with it.

One queue for each relay, because each consumer of a queue gets everything. The PL-only install is
what a server without its C module has.
"""

from __future__ import annotations

import os
from pathlib import Path

import psycopg

NAME, VERSION = "PgQ + COPY", "3.5"
REQUIRES = ("psycopg[binary]==3.2.13",)
LACKS = "routes, fencing; order per key only with one consumer a queue"
SHARE = 1.0
RELAYS = 2
ROWS_A_TICK = 50_000

SEND = "SELECT pgq.insert_event('peer0', 'order', '{\"amount\": 100}', :account::text, '', '', '')"
FILL = """
SELECT pgq.insert_event('peer' || %s, 'order', rpad('{"order": ' || i, %s, 'x'),
                        'order ' || i %% 5000, '{"content-type": "application/json"}', '', '')
FROM generate_series(1, %s) AS i
"""
TICK = "SELECT pgq.force_tick('peer' || %s), pgq.ticker('peer' || %s)"
NEXT = "SELECT pgq.next_batch('peer' || %s, 'relay')"
READ = """
COPY (SELECT ev_id, ev_extra1, convert_to(ev_data, 'UTF8') FROM pgq.get_batch_events({}))
TO STDOUT (FORMAT binary)
"""
STORE = "COPY arrived (id, key, body) FROM STDIN (FORMAT binary)"
NOTE = "INSERT INTO arrived_batch VALUES (%s, %s) ON CONFLICT DO NOTHING RETURNING batch"


def prepare(app: str) -> None:
    script = Path(os.environ["PGQ_SQL"]).read_text()
    with psycopg.connect(app, autocommit=True) as connection:
        if connection.execute("SELECT to_regnamespace('pgq')").fetchone() == (None,):
            connection.execute(script.encode())


def fill(app: str, count: int, size: int) -> None:
    with psycopg.connect(app, autocommit=True) as connection:
        for number in range(RELAYS):
            queue = f"peer{number}"
            if connection.execute(
                "SELECT FROM pgq.queue WHERE queue_name = %s", [queue]
            ).fetchone():
                connection.execute("SELECT pgq.drop_queue(%s, true)", [queue])
            connection.execute("SELECT pgq.create_queue(%s)", [queue])
            connection.execute("SELECT pgq.register_consumer(%s, 'relay')", [queue])
            left = count // RELAYS
            while left > 0:
                connection.execute(FILL, [number, size, min(left, ROWS_A_TICK)])
                connection.execute(TICK, [number, number])
                left -= ROWS_A_TICK


def relay(app: str, mom: str, number: int) -> None:
    with psycopg.connect(app, autocommit=True) as source, psycopg.connect(mom) as target:
        while (batch := source.execute(NEXT, [number]).fetchone()) != (None,):
            assert batch is not None
            known = target.execute(NOTE, [number, batch[0]]).fetchone()
            if known is not None:
                with (
                    source.cursor().copy(READ.format(batch[0])) as out,
                    target.cursor().copy(STORE) as into,
                ):
                    for block in out:
                        into.write(block)
            target.commit()
            source.execute("SELECT pgq.finish_batch(%s)", [batch[0]])
