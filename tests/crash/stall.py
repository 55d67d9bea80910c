"""What is in the way when nothing moves: sessions, owners, members and lanes, as the database
sees them, and where the forwarders are in their code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psycopg

from saf.database import Dsn

SESSIONS = """
SELECT pid, application_name, state, wait_event, pg_blocking_pids(pid) AS blocked_by,
       clock_timestamp() - xact_start AS in_transaction,
       left(regexp_replace(query, '\\s+', ' ', 'g'), 80) AS query
FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
ORDER BY xact_start
"""
OWNERS = """
SELECT s.name, c.owner, count(*) AS shards, min(c.batch), max(c.batch), min(c.position),
       max(c.epoch), count(c.open) AS open
FROM saf.cursor c JOIN saf.subscription s USING (subscription_id) GROUP BY 1, 2 ORDER BY 1, 2
"""
MEMBERS = """
SELECT s.name, m.member_id, m.lease_until - clock_timestamp() AS left, m.stopping
FROM saf.member m JOIN saf.subscription s USING (subscription_id)
"""
LANES = """
SELECT destination, kind, subject, attempts, next_attempt_at - clock_timestamp() AS due_in,
       left(error, 100)
FROM saf.backoff
"""
PARKED = "SELECT destination, kind, subject, count(*) FROM saf.parked GROUP BY 1, 2, 3"
PREPARED = "SELECT gid, clock_timestamp() - prepared AS since FROM pg_prepared_xacts"
WRITING_SECONDS = 0.3

STACKS = "saf-stacks"


def listen() -> None:
    """Let this process write its threads' stacks, at SIGUSR1, to a file in its memory."""
    faulthandler.register(signal.SIGUSR1, os.memfd_create(STACKS), all_threads=True)


def describe(databases: Iterable[Dsn], listening: Iterable[BaseProcess]) -> list[str]:
    """Lines for a person, with the stacks of processes that `listen`."""
    lines: list[str] = []
    for database in databases:
        lines.append(f"at {database.database}")
        try:
            with psycopg.connect(database.conninfo, autocommit=True) as connection:
                lines += _rows(connection)
        except psycopg.OperationalError as error:
            lines.append(f"  {error}")
    for process in listening:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(process.pid or 0, signal.SIGUSR1)
            time.sleep(WRITING_SECONDS)
            lines += [f"process {process.pid}", *_stacks(process.pid)]
    return lines


def _stacks(process: int | None) -> list[str]:
    files = Path(f"/proc/{process}/fd").iterdir()
    return [
        line
        for file in files
        if STACKS in str(file.readlink())
        for line in file.read_text().splitlines()
    ]


def _rows(connection: psycopg.Connection[tuple[object, ...]]) -> Iterator[str]:
    for question in (SESSIONS, OWNERS, MEMBERS, LANES, PARKED, PREPARED):
        cursor = connection.execute(question)
        names = [column.name for column in cursor.description or ()]
        for row in cursor:
            yield "  " + ", ".join(f"{n} {v}" for n, v in zip(names, row, strict=True))
