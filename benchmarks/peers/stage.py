"""Peers on the stage: their tables beside saf's, on the same durable server; and what they cost."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import psutil

from benchmarks.peers import PLACE, RELAYS
from benchmarks.peers.environment import pgq_sql, python
from benchmarks.stage import Stage, execute

ROOT = Path(__file__).parents[2]
PEERS = ("skip_locked", "pgq", "pgmq", "pgqueuer", "faststream_outbox", "procrastinate")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What moving messages took, of the whole machine."""

    messages: int
    seconds: float
    cpu_seconds: float
    wal_bytes: int


class Peer:
    """One peer, in its own Python."""

    def __init__(self, module: str, stage: Stage) -> None:
        self.module: ModuleType = import_module(f"benchmarks.peers.{module}")
        self.name = f"{self.module.NAME} {self.module.VERSION}"
        self._stage = stage
        self._short = module
        self._python = python(self.module.REQUIRES)
        self._env = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "APP": stage.app.conninfo,
            "MOM": stage.mom.conninfo,
        }
        if module == "pgq":
            self._env["PGQ_SQL"] = str(pgq_sql())
        self._call("prepare")

    def count(self, messages: int) -> int:
        """How many of so many messages it gets."""
        return RELAYS * max(1, round(messages * float(self.module.SHARE) / RELAYS))

    def fill(self, messages: int, size: int) -> None:
        """So many pending, and nowhere any that has arrived."""
        self._call("fill", str(messages), str(size))
        execute(self._stage.mom, PLACE, "CHECKPOINT")
        execute(self._stage.app, "CHECKPOINT")

    def drain(self, messages: int) -> Cost:
        """Move all, by two relays.

        Raises:
            RuntimeError: not as many have arrived.
        """
        relays = [
            subprocess.Popen(
                self._command("relay", str(number)), env=self._env, cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for number in range(RELAYS)
        ]  # fmt: skip
        for one in relays:
            assert one.stdout is not None
            if one.stdout.readline() != "ready\n":
                raise RuntimeError(f"{self.name}: its relay did not start")

        def go() -> None:
            for one in relays:
                assert one.stdin is not None
                one.stdin.write("go\n")
                one.stdin.flush()
            for one in relays:
                assert one.stdout is not None
                one.stdout.readline()

        cost = measured(self._stage, messages, go)
        if any(one.wait() for one in relays):
            raise RuntimeError(f"{self.name}: a relay failed")
        with self._stage.mom.connect(role="bench") as connection:
            ((arrived,),) = connection.execute("SELECT count(*) FROM arrived").fetchall()
        if arrived != messages:
            raise RuntimeError(f"{self.name}: {arrived} of {messages} messages have arrived")
        return cost

    def _call(self, *arguments: str) -> None:
        subprocess.run(self._command(*arguments), env=self._env, cwd=ROOT, check=True)

    def _command(self, *arguments: str) -> list[str]:
        return [str(self._python), "-m", "benchmarks.peers.run", self._short, *arguments]


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
    """The server with its two brokers."""
    stage = Stage(folder)
    try:
        yield stage
    finally:
        stage.server.stop()


def _busy() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def _wal(stage: Stage) -> int:
    with stage.app.connect(role="bench") as connection:
        query = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"
        ((position,),) = connection.execute(query).fetchall()
    return int(position)
