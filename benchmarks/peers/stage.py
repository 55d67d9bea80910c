"""Systems on the stage: their tables beside saf's, on one durable server; and what they cost."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import psutil
import psycopg

from benchmarks.peers import ARRIVED, PLACE
from benchmarks.peers.environment import PACKAGES, NotInstalled, out_of_package, python
from benchmarks.peers.relays import Failed, Relays
from benchmarks.stage import Stage, execute

SYSTEMS = (
    "saf",
    "skip_locked",
    "pgq",
    "pgmq",
    "pgqueuer",
    "faststream_outbox",
    "procrastinate",
    "spark_jdbc",
)

TABLES = """
SELECT relid::regclass::text FROM pg_stat_user_tables
WHERE schemaname || '.' || relname LIKE ANY (%s)
"""


WAITS = """
SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin))
       - split_part(convert_from(substring(body FROM 1 FOR 24), 'UTF8'), ' ', 1)::numeric
FROM {}
"""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What moving messages took, of the whole machine."""

    messages: int
    seconds: float
    cpu_seconds: float
    wal_bytes: int

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds


class Peer:
    """One system, whose relays run in its own Python and stay between the rounds."""

    def __init__(self, module: str, stage: Stage) -> None:
        self.module: ModuleType = import_module(f"benchmarks.peers.{module}")
        self.name = f"{self.module.NAME} {self.module.VERSION}"
        self._stage = stage
        self._short = module
        self._python = python(self.module.REQUIRES)
        self._file = out_of_package(module) if module in PACKAGES else None
        if module == "spark_jdbc":
            _listen(stage)
        self._there = stage.mom
        self.relays = self._relays()
        self.relays.prepare()

    def count(self, messages: int) -> int:
        """How many of so many messages it gets."""
        relays = int(self.module.RELAYS)
        return relays * max(1, round(messages * float(self.module.SHARE) / relays))

    def fill(self, messages: int, size: int) -> None:
        """So many pending, and nowhere any that has arrived."""
        with self._stage.app.connect(role="application", autocommit=True) as connection:
            self.module.empty(connection)
            if messages:
                self.module.add(connection, messages, size)
            for table in self.tables(connection):
                connection.execute(f"VACUUM ANALYZE {table}".encode())
        for database in (self._stage.mom, self._stage.app):
            execute(database, PLACE, "CHECKPOINT")

    def tables(self, connection: psycopg.Connection) -> list[str]:
        """Those of its tables that are in a database."""
        return [table for (table,) in connection.execute(TABLES, [list(self.module.TABLES)])]

    def warm(self, messages: int, size: int) -> None:
        """Move its share of so many messages, until Java has compiled what is hot."""
        if self.relays.warm:
            return
        some = self.count(messages)
        with suppress(Failed):  # it will fail in its turn again, and be said to
            for _ in range(self.module.WARM_UP):
                self.fill(some, size)
                self.drain(some)
        self.relays.warm = True

    def drain(self, messages: int) -> Cost:
        """Move all that is pending.

        Raises:
            Failed: not as many have arrived.
        """
        self.relays.start()
        cost = measured(self._stage, messages, self.relays.drain)
        if (arrived := self.arrived()) != messages:
            raise Failed(f"{arrived} of {messages} messages have arrived")
        return cost

    def arrived(self) -> int:
        """How many messages are where they were to go."""
        table = getattr(self.module, "ARRIVED", ARRIVED)
        with self._there.connect(role="bench") as connection:
            ((arrived,),) = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchall()
        return int(arrived)

    def waits(self) -> list[float]:
        """Seconds from when each arrived message was written until its arrival was committed."""
        table = getattr(self.module, "ARRIVED", ARRIVED)
        with self._there.connect(role="bench") as connection:
            return [float(wait) for (wait,) in connection.execute(WAITS.format(table).encode())]

    @contextmanager
    def consuming(self) -> Iterator[None]:
        """Its relays move within the application's database: they are consumers there."""
        relays, there = self.relays, self._there
        self._there = self._stage.app
        self.relays = self._relays()
        try:
            yield
        finally:
            self.relays.stop()
            self.relays, self._there = relays, there

    def _relays(self) -> Relays:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "APP": self._stage.app.conninfo,
            "MOM": self._there.conninfo,
            "FROM_PACKAGE": str(self._file or ""),
        }
        return Relays(self._python, self._short, int(self.module.RELAYS), env)


def measured(stage: Stage, messages: int, work: Callable[[], object]) -> Cost:
    """What some work costs the machine, on which nothing else should be going on."""
    before, cpu, started = _wal(stage), _busy(), time.monotonic()
    work()
    seconds = time.monotonic() - started
    return Cost(
        messages=messages,
        seconds=seconds,
        cpu_seconds=_busy() - cpu,
        wal_bytes=_wal(stage) - before,
    )


@contextmanager
def on_stage(folder: Path) -> Iterator[Stage]:
    """The server with its two brokers. Commits have a time, so that arrivals have one."""
    stage = Stage(folder)
    try:
        stage.server.stop()
        stage.server.settings["track_commit_timestamp"] = True
        stage.server.start()
        yield stage
    finally:
        stage.server.stop()


def _listen(stage: Stage) -> None:
    """Have the server listen on this machine, for who knows no unix sockets."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 5432)) == 0:
            raise NotInstalled("JDBC knows no unix sockets, and port 5432 is in use here")
    execute(stage.app, "ALTER SYSTEM SET listen_addresses = '127.0.0.1'")
    stage.server.stop()
    stage.server.start()


def _busy() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def _wal(stage: Stage) -> int:
    with stage.app.connect(role="bench") as connection:
        query = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"
        ((position,),) = connection.execute(query).fetchall()
    return int(position)
