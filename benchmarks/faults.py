"""What trouble elsewhere costs: the MOM store down, and a transaction that holds the horizon."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
from pyspark.sql import SparkSession

from benchmarks.send import ACCOUNTS, BUSINESS, TABLES, pgbench, send_statement
from benchmarks.stage import FILL, Stage, execute
from saf.config import Settings, load
from saf.database import Dsn
from saf.forwarding.forwarder import Forwarder
from saf.spark.runner import SparkRunner

ROUNDS = 2
WARM_UP_SECONDS = 5
RATE = 300  # transactions per second, well below what saturates the machine: latency is compared
CYCLES = 20
MESSAGES_A_CYCLE = 5_000


@contextmanager
def forwarder(stage: Stage, mom: Dsn) -> Iterator[None]:
    """``saf forward --loop``, warm, to a MOM store that may not be there."""
    file = stage.settings_file(stage.server.data_dir.parent / "faults.toml", mom=mom)
    command = [sys.executable, "-m", "saf", "forward", "--config", str(file), "--loop"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(WARM_UP_SECONDS)
        yield
    finally:
        process.terminate()
        process.wait()


def producers(stage: Stage) -> None:
    """Notes what the producers' p99 is with the MOM store down, over what it is with it up."""
    execute(stage.app, *TABLES)
    stage.fill(0)
    script = stage.server.data_dir.parent / "produce.sql"
    script.write_text(BUSINESS.format(accounts=ACCOUNTS, send=send_statement()))
    places = {"up": stage.mom, "down": Dsn("host=/nonexistent dbname=mom")}
    measured: dict[str, list[float]] = {name: [] for name in places}
    for _ in range(ROUNDS):
        for name, mom in places.items():
            with forwarder(stage, mom):
                measured[name].append(pgbench(stage, script, rate=RATE).p99)
            execute(stage.app, "DELETE FROM saf.backoff")
    for name, values in measured.items():
        stage.note(f"send_p99_mom_{name}_ms", values, "ms")
    ratios = [down / up for up, down in zip(measured["up"], measured["down"], strict=True)]
    stage.note("send_p99_mom_down_ratio", ratios, "of the p99 with it up", "<= 1.1")


@contextmanager
def horizon(dsn: Dsn) -> Iterator[None]:
    """A transaction that has begun before all, and lets vacuum remove nothing.

    It is an application's, which may stand still for as long as it likes.
    """
    with dsn.connect(role="application") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT pg_current_xact_id()")
        yield


def cycles(spark: SparkSession, stage: Stage, settings: Settings) -> float:
    """Seconds that the forwarder takes for many small batches."""
    seconds = 0.0
    for _ in range(CYCLES):
        with stage.app.connect(role="bench") as connection:
            connection.execute(FILL, [200, 1, MESSAGES_A_CYCLE])
        started = time.monotonic()
        summary = Forwarder(settings, SparkRunner(lambda: spark)).drain()
        seconds += time.monotonic() - started
        if summary.forwarded != MESSAGES_A_CYCLE:
            raise RuntimeError(f"expected {MESSAGES_A_CYCLE} messages: {summary}")
    return seconds


def run(stage: Stage, spark: SparkSession) -> None:
    """Notes held_horizon_ratio."""
    settings = load(stage.settings_file(stage.server.data_dir.parent / "horizon.toml"))
    execute(stage.app, "ALTER SYSTEM SET autovacuum = on", "SELECT pg_reload_conf()")
    stage.fill(0)
    cycles(spark, stage, settings)
    ratios = []
    for _ in range(ROUNDS):
        free = cycles(spark, stage, settings)
        with ExitStack() as stack:
            for there in (stage.app, stage.mom):
                stack.enter_context(horizon(there))
            held = cycles(spark, stage, settings)
        ratios.append(free / held)
    stage.note("held_horizon_ratio", ratios, "of the throughput without", ">= 0.95")
    execute(stage.app, "ALTER SYSTEM RESET autovacuum", "SELECT pg_reload_conf()")
