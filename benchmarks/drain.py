"""The forwarder against the ceiling: COPY out of one database, piped into COPY of the other.

The ceiling does no Spark, no Python, no order, no routing, no marks: two binary pipes between the
real tables, one per core. Both move the same messages, durably.
"""

from __future__ import annotations

import subprocess
import time

from pyspark import SparkContext

from benchmarks.stage import Stage, per_second
from saf.columns import COLUMNS
from saf.config import Settings, load
from saf.forwarding.forwarder import Forwarder
from saf.spark.runner import SparkRunner

MESSAGES = 1_000_000
ROUNDS = 4
WARM_UP = 2  # rounds until the JVM has compiled what is hot

OUT = "COPY (SELECT {columns} FROM saf.outbox WHERE {half}) TO STDOUT (FORMAT binary)"
IN = "COPY saf.inbox ({columns}) FROM STDIN (FORMAT binary)"


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


def forward(spark: SparkContext, settings: Settings, messages: int = MESSAGES) -> float:
    """Seconds for one drain of so many messages."""
    started = time.monotonic()
    summary = Forwarder(settings, SparkRunner(lambda _: spark)).drain()
    seconds = time.monotonic() - started
    if summary.forwarded != messages or summary.problems:
        raise RuntimeError(f"expected {messages} messages: {summary}")
    return seconds


def run(stage: Stage, spark: SparkContext) -> None:
    """Notes drain_ratio and exactly_once_tax, and the raw rates."""
    settings = {}
    for quality in ("exactly_once", "at_least_once"):
        path = stage.settings_file(stage.server.data_dir.parent / f"{quality}.toml")
        path.write_text(
            path.read_text().replace("[forwarder]", f'quality = "{quality}"\n[forwarder]')
        )
        settings[quality] = load(path)
    stage.fill(MESSAGES)
    for _ in range(WARM_UP):
        stage.rewind()
        forward(spark, settings["exactly_once"])
    seconds: dict[str, list[float]] = {"ceiling": [], "exactly_once": [], "at_least_once": []}
    for number in range(ROUNDS):
        stage.rewind()
        seconds["ceiling"].append(ceiling(stage))
        if stage.stored() != MESSAGES:
            raise RuntimeError("the ceiling lost messages")
        # in turns: what goes first finds a quieter server
        for quality, one in list(settings.items())[:: 1 if number % 2 else -1]:
            stage.rewind()
            seconds[quality].append(forward(spark, one))
            if stage.stored() != MESSAGES:
                raise RuntimeError(f"{quality} stored {stage.stored()} messages")
    for name, values in seconds.items():
        stage.note(f"{name}_messages_per_second", per_second(MESSAGES, values), "1/s")
    ratios = [c / e for c, e in zip(seconds["ceiling"], seconds["exactly_once"], strict=True)]
    stage.note("drain_ratio", ratios, "of the ceiling", ">= 0.75")
    taxes = [e / a for e, a in zip(seconds["exactly_once"], seconds["at_least_once"], strict=True)]
    stage.note("exactly_once_tax", taxes, "times at_least_once", "<= 1.05")
