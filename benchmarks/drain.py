"""The forwarder against the ceiling: COPY out of one database, piped into COPY of the other.

The ceiling does no Spark, no Python, no order, no routing, no marks: two binary pipes between the
real tables, one per core. Both move the same messages, durably. Processor time is that of the whole
machine, so that it counts the server's, and Spark's.
"""

from __future__ import annotations

import subprocess
import time
from typing import NamedTuple

import psutil
from pyspark.sql import SparkSession

from benchmarks.stage import Stage, per_second
from saf.columns import COLUMNS
from saf.config import Settings, load
from saf.forwarding.forwarder import Forwarder
from saf.spark.runner import SparkRunner

MESSAGES = 1_000_000
ROUNDS = 4
LARGE, LARGE_BYTES = 300_000, 2000
WARM_UP = 2  # rounds until the JVM has compiled what is hot

OUT = "COPY (SELECT {columns} FROM saf.outbox WHERE {half}) TO STDOUT (FORMAT binary)"
IN = "COPY saf.inbox ({columns}) FROM STDIN (FORMAT binary)"


class Took(NamedTuple):
    """Seconds, by the clock and of processors."""

    seconds: float
    cpu: float


def machine_cpu() -> float:
    """The processor time that the whole machine has spent on work so far."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def ceiling(stage: Stage) -> float:
    """Seconds for both pipes."""
    columns = ", ".join(COLUMNS)
    psql = stage.program("psql")
    started = time.monotonic()
    pipes = []
    for half in ("shard < 32", "shard >= 32"):
        source = subprocess.Popen(
            [psql, stage.app.conninfo, "-qc", OUT.format(columns=columns, half=half)],
            stdout=subprocess.PIPE,
        )
        target = subprocess.Popen(
            [psql, stage.mom.conninfo, "-qc", IN.format(columns=columns)], stdin=source.stdout
        )
        assert source.stdout is not None
        source.stdout.close()
        pipes += [source, target]
    if any(pipe.wait() for pipe in pipes):
        raise RuntimeError("a COPY failed")
    return time.monotonic() - started


def forward(spark: SparkSession, settings: Settings, messages: int = MESSAGES) -> float:
    """Seconds for one drain of so many messages."""
    started = time.monotonic()
    summary = Forwarder(settings, SparkRunner(lambda: spark)).drain()
    seconds = time.monotonic() - started
    if summary.forwarded != messages or summary.problems:
        raise RuntimeError(f"expected {messages} messages: {summary}")
    return seconds


def run(stage: Stage, spark: SparkSession) -> None:
    """Notes drain_ratio, drain_cpu_ratio and exactly_once_tax; and the same of 2 kB."""
    settings = {}
    for quality in ("exactly_once", "at_least_once"):
        path = stage.settings_file(stage.server.data_dir.parent / f"{quality}.toml")
        path.write_text(
            path.read_text().replace("[forwarder]", f'quality = "{quality}"\n[forwarder]')
        )
        settings[quality] = load(path)
    took = rounds(stage, spark, settings, MESSAGES, size=200)
    taxes = [
        e.seconds / a.seconds
        for e, a in zip(took["exactly_once"], took["at_least_once"], strict=True)
    ]
    stage.note("exactly_once_tax", taxes, "times at_least_once", "<= 1.05")
    del settings["at_least_once"]
    rounds(stage, spark, settings, LARGE, size=LARGE_BYTES, which="_2kB")


def rounds(
    stage: Stage,
    spark: SparkSession,
    settings: dict[str, Settings],
    messages: int,
    *,
    size: int,
    which: str = "",
) -> dict[str, list[Took]]:
    """Notes how both have done with messages of one size, in turns; return what each round took."""
    stage.fill(messages, size)
    for _ in range(WARM_UP):
        stage.rewind()
        forward(spark, settings["exactly_once"], messages)
    took: dict[str, list[Took]] = {name: [] for name in ("ceiling", *settings)}
    for number in range(ROUNDS):
        stage.rewind()
        before = machine_cpu()
        took["ceiling"].append(Took(ceiling(stage), machine_cpu() - before))
        if stage.stored() != messages:
            raise RuntimeError("the ceiling lost messages")
        # in turns: what goes first finds a quieter server
        for quality, one in list(settings.items())[:: 1 if number % 2 else -1]:
            stage.rewind()
            before = machine_cpu()
            took[quality].append(Took(forward(spark, one, messages), machine_cpu() - before))
            if stage.stored() != messages:
                raise RuntimeError(f"{quality} stored {stage.stored()} messages")
    for name, values in took.items():
        rates = per_second(messages, [one.seconds for one in values])
        stage.note(f"{name}_messages_per_second{which}", rates, "1/s")
        work = [one.cpu / messages * 1e6 for one in values]
        stage.note(f"{name}_cpu_us{which}", work, "µs a message, of the whole machine")
    pairs = list(zip(took["ceiling"], took["exactly_once"], strict=True))
    reach = ">= 0.75" if which else ">= 0.85"
    ratios = [ceiling.seconds / mine.seconds for ceiling, mine in pairs]
    stage.note(f"drain_ratio{which}", ratios, "of the ceiling", reach)
    work = [mine.cpu / ceiling.cpu for ceiling, mine in pairs]
    stage.note(f"drain_cpu_ratio{which}", work, "times the ceiling's", "<= 1.15")
    return took
