"""PgQ with a relay by hand: COPY a batch, and note its number at the destination with it.

One queue for each relay, because each consumer of a queue gets everything. The PL-only install is
what a server without its C module has. A relay that finds nothing ticks, where others leave it to a
daemon that ticks once a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psycopg

from benchmarks.peers import BODY

NAME, VERSION = "PgQ + COPY", "3.5"
REQUIRES = ("psycopg[binary]==3.2.13",)
LACKS = "routes, fencing; order per key only with one consumer a queue"
CANNOT: dict[str, str] = {}
SHARE, RELAYS, WARM_UP = 0.5, 2, 0
TABLES = ("pgq.%",)
ROWS_A_TICK = 50_000

SEND = "SELECT pgq.insert_event('peer0', 'order', '{\"amount\": 100}', :account::text, '', '', '')"
FILL = f"""
SELECT pgq.insert_event('peer' || %s, 'order', {BODY},
                        'order ' || i %% 5000, '{{"content-type": "application/json"}}', '', '')
FROM generate_series(1, %s) AS i
"""
TICK = "SELECT pgq.force_tick('peer' || %s), pgq.ticker('peer' || %s)"
NEXT = "SELECT pgq.next_batch('peer' || %s, 'relay')"
READ = """
COPY (SELECT ev_id, ev_extra1, convert_to(ev_data, 'UTF8') FROM pgq.get_batch_events({}))
TO STDOUT (FORMAT binary)
"""
STORE = "COPY arrived (id, key, body) FROM STDIN (FORMAT binary)"
FINISH = "SELECT pgq.finish_batch(%s)"
NOTE = "INSERT INTO arrived_batch VALUES (%s, %s) ON CONFLICT DO NOTHING RETURNING batch"


def prepare(app: str) -> None:
    script = Path(os.environ["FROM_PACKAGE"]).read_text()
    with psycopg.connect(app, autocommit=True) as connection:
        if connection.execute("SELECT to_regnamespace('pgq')").fetchone() == (None,):
            connection.execute(script.encode())


def empty(connection: psycopg.Connection) -> None:
    for number in range(RELAYS):
        queue = f"peer{number}"
        known = "SELECT queue_name FROM pgq.queue WHERE queue_name = %s"
        if connection.execute(known, [queue]).fetchone():
            connection.execute("SELECT pgq.drop_queue(%s, true)", [queue])
        connection.execute("SELECT pgq.create_queue(%s)", [queue])
        connection.execute("SELECT pgq.register_consumer(%s, 'relay')", [queue])


def add(connection: psycopg.Connection, count: int, size: int) -> None:
    """Half to each queue; a tick after as many as one batch should be."""
    for number in range(RELAYS):
        left = (count + number) // RELAYS
        while left > 0:
            connection.execute(FILL.encode(), [number, size, min(left, ROWS_A_TICK)])
            if left >= ROWS_A_TICK:
                connection.execute(TICK, [number, number])
            left -= ROWS_A_TICK


def mark(connection: psycopg.Connection) -> Callable[[], None]:
    """Take and finish each batch."""
    for number in range(RELAYS):
        connection.execute(TICK, [number, number])

    def work() -> None:
        for number in range(RELAYS):
            while (batch := _next(connection, number)) is not None:
                connection.execute(FINISH, [batch])

    return work


def relay(app: str, mom: str, number: int, go_on: Callable[[], bool]) -> None:
    with psycopg.connect(app, autocommit=True) as source, psycopg.connect(mom) as target:
        while _move(source, target, number) or go_on():
            pass


def _move(source: psycopg.Connection, target: psycopg.Connection, number: int) -> bool:
    batch = _next(source, number)
    if batch is None:
        source.execute(TICK, [number, number])
        batch = _next(source, number)
    if batch is None:
        return False
    moved = 0
    with target.transaction():
        if target.execute(NOTE, [number, batch]).fetchone() is not None:
            into = target.cursor()
            with (
                source.cursor().copy(READ.format(batch)) as out,
                into.copy(STORE) as copy,
            ):
                for block in out:
                    copy.write(block)
            moved = into.rowcount
    source.execute(FINISH, [batch])
    return moved > 0


def _next(connection: psycopg.Connection, number: int) -> int | None:
    ((batch,),) = connection.execute(NEXT, [number]).fetchall()
    return None if batch is None else int(batch)
