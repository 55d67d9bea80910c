"""A processor for tests that checks its memory against the database, and programs that run it."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import psycopg

import saf
from saf.database import Dsn
from tests.pipeline import connect
from tests.receivers import SUBSCRIPTION, effect, prepare

TABLES = """
CREATE TABLE life (
    number bigint GENERATED ALWAYS AS IDENTITY, key text, what text, pid int, seen int);
CREATE TABLE stale (key text)
"""


def prepare_processors(mom: Dsn) -> None:
    prepare(mom)
    with connect(mom) as connection:
        connection.execute(TABLES)


class Counter(saf.Processor):
    """Its messages are 1, 2, 3 …; it remembers the last and keeps it in the table balance, too."""

    last: int

    def activate(self, connection: psycopg.Connection[Any]) -> None:
        self.last = self.stored(connection)
        self.note(connection, "activate")

    @saf.handles()
    def count(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        if self.stored(connection) != self.last:
            connection.execute("INSERT INTO stale VALUES (%s)", [self.key])
            self.last = self.stored(connection)
        self.last += 1
        assert int(message.body) == self.last, f"{message} out of order"
        connection.execute(
            "INSERT INTO balance VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET last = %s",
            [self.key, self.last, self.last],
        )
        effect(connection, message)

    def passivate(self, connection: psycopg.Connection[Any]) -> None:
        self.note(connection, "passivate")

    def stored(self, connection: psycopg.Connection[Any]) -> int:
        found = connection.execute("SELECT last FROM balance WHERE key = %s", [self.key]).fetchone()
        return found[0] if found else 0

    def note(self, connection: psycopg.Connection[Any], what: str) -> None:
        connection.execute(
            "INSERT INTO life (key, what, pid, seen) VALUES (%s, %s, %s, %s)",
            [self.key, what, os.getpid(), self.last],
        )


class Unlucky(Counter):
    """Now and then a handler fails, or takes its whole transaction along."""

    @saf.handles()
    def count(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        super().count(message, connection)
        chance = random.random()
        if chance < 0.02:
            raise ZeroDivisionError
        if chance < 0.03:
            connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")


class Poisoned(Counter):
    """A message may kill the process."""

    @saf.handles()
    def count(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        if message.body == b"poison":
            os.killpg(0, signal.SIGKILL)
        super().count(message, connection)


def lives(mom: Dsn, what: str, key: str | None = None) -> list[tuple[str, int]]:
    """Key and process of what instances have noted, in order."""
    with connect(mom) as connection:
        rows = connection.execute(
            "SELECT key, pid FROM life WHERE what = %s AND key = coalesce(%s, key) ORDER BY number",
            [what, key],
        ).fetchall()
    return [(key, pid) for key, pid in rows]


def stale(mom: Dsn) -> list[Any]:
    """The keys of instances whose memory was not what the database holds."""
    with connect(mom) as connection:
        return connection.execute("SELECT key FROM stale").fetchall()


# Programs, for tests.processes


def member(mom: Dsn, processor: type[saf.Processor], options: dict[str, Any]) -> None:
    """Run until SIGTERM."""
    policy = saf.Policy(max_attempts=1000, first_wait_seconds=0.01, longest_wait_seconds=0.05)
    saf.Processors(mom, SUBSCRIPTION, processor, **{"policy": policy, **options}).run()
