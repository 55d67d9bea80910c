"""What goes wrong in a round, and how it is done."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from saf.broker.embedded import EmbeddedServer
from saf.database import Dsn
from tests.crash.consumers import CONSUMED
from tests.crash.forwarders import LEASE_SECONDS
from tests.crash.plan import QUALITIES, Fault

if TYPE_CHECKING:
    from tests.crash.rounds import Round, Started

TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname IN ('app', 'mom', 'other') AND application_name <> 'saf crash'
"""


def kill_forwarder(round_: Round, fault: Fault) -> None:
    round_.again(round_.forwarders, fault.target)


def kill_driver(round_: Round, fault: Fault) -> None:
    """The JVM of a Spark job."""
    kill_part(round_.forwarders, fault, b"java")


def kill_worker(round_: Round, fault: Fault) -> None:
    """A Python process that Spark has started: a worker, or what forks the workers."""
    kill_part(round_.forwarders, fault, b"pyspark.daemon")


def kill_writer(round_: Round, fault: Fault) -> None:
    round_.again(round_.writers, fault.target)


def kill_listener(round_: Round, fault: Fault) -> None:
    round_.again(round_.listeners, fault.target)


def crash_source(round_: Round, _: Fault) -> None:
    _crash(round_.site.source)


def crash_mom(round_: Round, _: Fault) -> None:
    _crash(round_.site.mom)


def kill_consumer(round_: Round, fault: Fault) -> None:
    round_.again(round_.consumers, fault.target)


def kill_router(round_: Round, fault: Fault) -> None:
    """One that serves a hub."""
    round_.again(round_.routers, fault.target)


def kill_pooler(round_: Round, _: Fault) -> None:
    if round_.site.pooler:
        round_.site.pooler.kill()


def stop_forwarder(round_: Round, fault: Fault) -> None:
    """Past its lease; the others, or a new one, take over."""
    stopped = round_.forwarders[fault.target % len(round_.forwarders)][0]
    if _is_young(stopped):
        return
    with _stopped(stopped):
        round_.forwarders.append(round_.start_forwarder(skewed=False))
        time.sleep(LEASE_SECONDS + fault.lasts)


def stop_consumer(round_: Round, fault: Fault) -> None:
    """Past its lease, if it has one; the others take over what they may."""
    stop_one(round_.consumers, fault)


def stop_router(round_: Round, fault: Fault) -> None:
    """Past its lease."""
    stop_one(round_.routers, fault)


def lose_answer(round_: Round, fault: Fault) -> None:
    round_.site.proxy.lose_answer()
    time.sleep(fault.lasts)
    round_.site.proxy.lose_answer(False)


def terminate_source(round_: Round, fault: Fault) -> None:
    _terminate(round_.app, fault.lasts)


def terminate_mom(round_: Round, fault: Fault) -> None:
    _terminate(round_.stores["mom"], fault.lasts)


def disk_full(round_: Round, fault: Fault) -> None:
    """Not a byte is left where the inbox grows."""
    _fill(round_, round_.site.mom, fault.lasts)


def disk_full_source(round_: Round, fault: Fault) -> None:
    """Not a byte is left where the outbox grows."""
    _fill(round_, round_.site.source, fault.lasts)


def service_unknown(round_: Round, fault: Fault) -> None:
    """The stores forget a service for a while: one that nobody receives, as they refuse others."""
    received = CONSUMED if round_.plan.consumers else ()
    known = [service for service in QUALITIES if service not in received]
    service = known[fault.target % len(known)]
    with _each(round_.stores.values()) as execute:
        execute("DELETE FROM saf.service WHERE name = %s", service)
        time.sleep(fault.lasts)
        execute("INSERT INTO saf.service VALUES (%s)", service)


def route_gone(round_: Round, fault: Fault) -> None:
    """No route leads from a service for a while."""
    service = list(QUALITIES)[fault.target % len(QUALITIES)]
    with _each([round_.app]) as execute:
        execute("UPDATE saf.route SET enabled = false WHERE service = %s", service)
        time.sleep(fault.lasts)
        execute("UPDATE saf.route SET enabled = true WHERE service = %s", service)


def kill_part(started: list[Started], fault: Fault, command: bytes) -> None:
    """One of the processes in whose command this is, that one of these has started."""
    group = started[fault.target % len(started)][0].pid if started else None
    parts = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(folder.name)
            if os.getpgid(pid) == group and command in (folder / "cmdline").read_bytes():
                parts.append(pid)
    if parts:
        with contextlib.suppress(ProcessLookupError):
            os.kill(sorted(parts)[fault.target % len(parts)], signal.SIGKILL)


def _is_young(process: BaseProcess) -> bool:
    """Whether it has no group of its own yet."""
    assert process.pid is not None
    return os.getpgid(process.pid) != process.pid


@contextmanager
def _stopped(process: BaseProcess) -> Iterator[None]:
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGCONT)


@contextmanager
def all_stopped(group: list[Started]) -> Iterator[None]:
    """Of a group, all that have begun."""
    with contextlib.ExitStack() as stack:
        for process, _ in group:
            if not _is_young(process):
                stack.enter_context(_stopped(process))
        yield


def stop_one(group: list[Started], fault: Fault) -> None:
    """One of a group, past its lease."""
    process = group[fault.target % len(group)][0]
    if not _is_young(process):
        with _stopped(process):
            time.sleep(LEASE_SECONDS + fault.lasts)


def _fill(round_: Round, server: EmbeddedServer, seconds: float) -> None:
    if disk := round_.site.disks.get(server):
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        time.sleep(seconds)
        filler.unlink()


def _crash(server: EmbeddedServer) -> None:
    server.stop_immediately()
    server.start()


def _terminate(dsn: Dsn, seconds: float) -> None:
    until = time.monotonic() + seconds
    with dsn.connect(role="crash", autocommit=True) as connection:
        while time.monotonic() < until:
            connection.execute(TERMINATE)
            time.sleep(0.05)


@contextmanager
def _each(dsns: Any) -> Iterator[Callable[[str, str], None]]:
    with contextlib.ExitStack() as stack:
        connections: list[psycopg.Connection[Any]] = [
            stack.enter_context(dsn.connect(role="crash", autocommit=True)) for dsn in dsns
        ]

        def execute(statement: str, service: str) -> None:
            for connection in connections:
                connection.execute(statement, [service])

        yield execute
