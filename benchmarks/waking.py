"""What could wake a forwarder, and what could run its little work: the candidates, side by side.

*Bells*: the poll that the forwarder makes (`saf.forwarding.broker`); a NOTIFY in the sender's
transaction; a temporary logical slot that is read as a stream, of the ids alone. How long each
takes from the sender's COMMIT to the process that waits, and what of the senders' tps is left.

*Runners*: a job of Spark for each cycle, and a resident task of Spark that gets its work through a
socket. The forwarder runs little work in its own process, which takes neither.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import pq

from benchmarks.send import BUSINESS, CLIENTS, ROUNDS, TABLES, pgbench, send_statement
from benchmarks.stage import Stage, cpu_seconds, execute, percentile
from saf.database import Dsn, fetch
from saf.forwarding.broker import ASK
from saf.log.pauses import SHORTEST_SECONDS
from saf.spark import session

SENDS, EVERY_SECONDS = 300, 0.02
JOBS = 100
ITEM_BYTES = 4096
COMMITTED, DATA = b"C", b"w"

SENDER = """
import sys, time, psycopg
dsn, sends, every, statement = sys.argv[1:]
with psycopg.connect(dsn) as connection:
    for number in range(int(sends)):
        time.sleep(float(every) * (0.5 + number * 0.618 % 1))
        connection.execute(statement)
        at = time.monotonic()
        connection.commit()
        print(at)
"""
INSERT = "INSERT INTO saf.outbox (to_service, body) VALUES ('billing', '')"
NOTIFYING = (
    "CREATE FUNCTION ring() RETURNS trigger LANGUAGE plpgsql "
    "AS $$ BEGIN PERFORM pg_notify('outbox', ''); RETURN NULL; END $$",
    "CREATE TRIGGER ring AFTER INSERT ON saf.outbox FOR EACH STATEMENT EXECUTE FUNCTION ring()",
)
SILENT = ("DROP FUNCTION ring() CASCADE",)
PUBLISHED = (
    "CREATE PUBLICATION bell FOR TABLE saf.outbox (id) WITH (publish_via_partition_root, "
    "publish = 'insert')",
)
WITHDRAWN = ("DROP PUBLICATION bell",)

Wait = Callable[[float], bool]
"""Waits for the bell, some seconds at most; returns whether it rang."""


def run(stage: Stage) -> None:
    """Notes wake_poll_p50_seconds and so on, and little_job_p50_ms."""
    logical = Stage(stage.server.data_dir.parent / "logical", wal_level="logical")
    try:
        _bells(stage, logical)
    finally:
        logical.server.stop()
    _runners(stage)


def _bells(stage: Stage, logical: Stage) -> None:
    bells = {
        "poll": (polled, (), ()),
        "notify": (notified, NOTIFYING, SILENT),
        "slot": (streamed, PUBLISHED, WITHDRAWN),
    }
    app = logical.app
    tps: dict[str, list[float]] = {name: [] for name in bells}
    execute(app, *TABLES)
    script = logical.server.data_dir.parent / "send.sql"
    script.write_text(BUSINESS.format(accounts=100_000, send=send_statement()))
    for name, (bell, begin, end) in bells.items():
        execute(app, *begin)
        with bell(app) as wait:
            before = cpu_seconds(logical.process, children=True)
            waits = _waits(app, wait)
            used = cpu_seconds(logical.process, children=True) - before
        execute(app, *end)
        for which, share in (("p50", 0.5), ("p99", 0.99)):
            stage.note(f"wake_{name}_{which}_seconds", percentile(waits, share), "s")
        stage.note(f"wake_{name}_server_ms", used / SENDS * 1000, "ms a message")
    for _ in range(ROUNDS):
        for name, (bell, begin, end) in bells.items():
            execute(app, *begin, "CHECKPOINT")
            with bell(app) as wait, _listening(wait):
                tps[name].append(pgbench(logical, script, clients=CLIENTS).tps)
            execute(app, *end)
    for name in ("notify", "slot"):
        kept = [one / poll for one, poll in zip(tps[name], tps["poll"], strict=True)]
        stage.note(f"wake_{name}_tps_kept", kept, "of the tps beside a poll")


def _waits(app: Dsn, wait: Wait) -> list[float]:
    """How long it took from each COMMIT until the bell rang, in order of length."""
    values = [str(value) for value in (SENDS, EVERY_SECONDS)]
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, app.conninfo, *values, INSERT],
        stdout=subprocess.PIPE,
        text=True,
    ) as sender:
        rung = []
        while sender.poll() is None:
            if wait(0.1):
                rung.append(time.monotonic())
        assert sender.stdout is not None
        sent = [float(line) for line in sender.stdout]
    later = [(at, bisect_left(rung, at)) for at in sent]
    return sorted(rung[place] - at for at, place in later if place < len(rung))


@contextmanager
def _listening(wait: Wait) -> Iterator[None]:
    """Answer the bell in a thread, as a forwarder would."""
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            wait(0.1)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def polled(app: Dsn) -> Iterator[Wait]:
    """Ask, as a forwarder asks that has had something to do just now."""
    with app.connect(role="bench", autocommit=True) as connection:
        known = fetch(connection, ASK)

        def wait(seconds: float) -> bool:
            nonlocal known
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                before, known = known, fetch(connection, ASK)
                if before != known:
                    return True
                time.sleep(SHORTEST_SECONDS)
            return False

        yield wait


@contextmanager
def notified(app: Dsn) -> Iterator[Wait]:
    """Wait for a notification."""
    with app.connect(role="bench", autocommit=True) as connection:
        connection.execute("LISTEN outbox")
        yield lambda seconds: any(connection.notifies(timeout=seconds, stop_after=1))


@contextmanager
def streamed(app: Dsn) -> Iterator[Wait]:
    """Wait for a commit in the stream of a temporary logical slot."""
    link: Any = pq.PGconn.connect(f"{app.conninfo} replication=database".encode())
    try:
        _said(link, "CREATE_REPLICATION_SLOT bell TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')")
        _said(
            link,
            "START_REPLICATION SLOT bell LOGICAL 0/0 (proto_version '1', publication_names 'bell')",
        )

        def wait(seconds: float) -> bool:
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0:
                select.select([link.socket], [], [], left)
                link.consume_input()
                rang = False
                while (one := link.get_copy_data(1))[0] > 0:
                    said = bytes(one[1])
                    rang |= said[:1] == DATA and said[25:26] == COMMITTED
                if rang:
                    return True
            return False

        yield wait
    finally:
        link.finish()


def _said(link: Any, command: str) -> None:
    result = link.exec_(command.encode())
    good = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COPY_BOTH)
    if result.status not in good:
        raise psycopg.OperationalError(result.error_message.decode())


def _runners(stage: Stage) -> None:
    spark = session.start("local[2]", app_name="saf bench")
    context = spark.sparkContext
    item = b"x" * ITEM_BYTES
    try:
        jobs = _timed(lambda: context.parallelize([item], 1).mapPartitions(list).collect())
        with _resident(context) as link:
            fed = _timed(lambda: _echoed(link, item))
    finally:
        spark.stop()
    for name, taken in (("job", jobs), ("resident", fed)):
        stage.note(f"little_{name}_p50_ms", percentile(taken, 0.5) * 1000, "ms")


def _timed(once: Callable[[], object]) -> list[float]:
    taken = []
    for _ in range(2 * JOBS):
        began = time.perf_counter()
        once()
        taken.append(time.perf_counter() - began)
    return sorted(taken[JOBS:])


@contextmanager
def _resident(context: Any) -> Iterator[socket.socket]:
    """Give the driver's end of a socket to a task of Spark that stays."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def stay(_: object) -> Iterator[int]:
            with socket.create_connection(address) as link:
                while said := link.recv(1 << 16):
                    link.sendall(said)
            yield 0

        job = context.parallelize([0], 1).mapPartitions(stay)
        thread = threading.Thread(target=job.collect)
        thread.start()
        link, _ = server.accept()
        try:
            yield link
        finally:
            link.close()
            thread.join()


def _echoed(link: socket.socket, item: bytes) -> None:
    link.sendall(item)
    left = len(item)
    while left:
        left -= len(link.recv(left))
