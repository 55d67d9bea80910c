"""Who reads the stream of Redis in a soak, and trims what it has read.

    python -m tests.soak.reader REDIS STREAM

How far it is, is in the ledger's database, in the transaction that hears.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import psycopg
import redis

from saf.signals import stop_on_signals
from tests.soak.ledger import Said, hear

LAST = "SELECT last FROM soak.read WHERE stream = %s"
READ = """
INSERT INTO soak.read VALUES (%s, %s) ON CONFLICT (stream) DO UPDATE SET last = excluded.last
"""
AT_ONCE, WAIT_MILLISECONDS = 500, 500
TRIMMED_EVERY = 50
"""Rounds after which what was read is removed."""


def run(dsn: str, address: str, stream: str, stopping: threading.Event) -> None:
    """Read until it is told to stop."""
    client: Any = redis.Redis.from_url(address)
    with psycopg.connect(dsn, application_name="reader", autocommit=True) as connection:
        found = connection.execute(LAST, [stream]).fetchone()
        last, rounds = found[0] if found else "0", 0
        while not stopping.is_set():
            got = client.xread({stream: last}, count=AT_ONCE, block=WAIT_MILLISECONDS)
            for _, entries in got:
                last = entries[-1][0].decode()
                with connection.transaction():
                    hear(connection, "events", [Said.of(one[b"body"]) for _, one in entries])
                    connection.execute(READ, [stream, last])
            rounds += 1
            if rounds % TRIMMED_EVERY == 0:
                client.xtrim(stream, minid=last, approximate=True)
    client.close()


if __name__ == "__main__":
    stop = threading.Event()
    with stop_on_signals(stop.set):
        run(os.environ["SOAK_MOM"], sys.argv[1], sys.argv[2], stop)
