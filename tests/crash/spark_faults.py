"""What goes wrong where Spark has a part: at the moment at which it is worst."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import psycopg

from tests.crash.faults import kill_part
from tests.crash.plan import Fault

if TYPE_CHECKING:
    from tests.crash.rounds import Round

HELD_SECONDS = 10.0
WORKERS = (b"pyspark.daemon", b"-m\0pyspark.sql.")
"""In the commands of the Python processes of streams: of tasks, and of all else."""
STORE = "LOCK TABLE saf.inbox IN SHARE MODE"
MARK = "SELECT FROM saf.cursor FOR UPDATE"
WAITS = """
SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' LIMIT 1
"""


def kill_held(round_: Round, fault: Fault) -> None:
    """A forwarder is held up where it stores or marks, and killed there."""
    stores = list(round_.stores.values())
    dsn, what = (stores[0], STORE) if fault.target % 2 else (round_.app, MARK)
    with dsn.connect(role="crash") as person, contextlib.suppress(psycopg.OperationalError):
        person.execute("SET lock_timeout = '3s'")
        person.execute(what.encode())
        until = time.monotonic() + HELD_SECONDS
        while person.execute(WAITS).fetchone() is None and time.monotonic() < until:
            time.sleep(0.01)
        round_.again(round_.forwarders, fault.target)
        person.rollback()


def kill_stream(round_: Round, fault: Fault) -> None:
    """The driver of the streams, and all that it has started."""
    round_.again(round_.streams, fault.target)


def kill_stream_worker(round_: Round, fault: Fault) -> None:
    """A Python process that the driver of the streams has started."""
    kill_part(round_.streams, fault, WORKERS[fault.target % len(WORKERS)])
