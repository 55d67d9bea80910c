"""Cold one-shot runs: the whole process, from the shell to the exit, with 1,000 pending.

That is little work, which `saf forward` does without Spark: the first run that meets a destination,
and the runs that follow, as from cron. How long it takes with Spark shows what the first deep
backlog waits for.
"""

from __future__ import annotations

import sys
import time

from benchmarks.stage import FILL, Stage, output

MESSAGES = 1000
ROUNDS = 5


def once(stage: Stage, spark: str = "auto", *, first: bool = True) -> float:
    """Seconds of one such run; with ``spark`` "auto" or "always"."""
    config = stage.settings_file(stage.server.data_dir.parent / "cold.toml")
    before = 0
    if first:
        stage.fill(MESSAGES)
        stage.rewind()
    else:
        before = stage.stored()
        with stage.app.connect(role="bench") as connection:
            connection.execute(FILL, [200, 1, MESSAGES])
    started = time.monotonic()
    output(sys.executable, "-m", "saf", "forward", "--config", config, "--spark", spark, "--json")
    seconds = time.monotonic() - started
    if stage.stored() != before + MESSAGES:
        raise RuntimeError("the cold run lost messages")
    return seconds


def run(stage: Stage) -> None:
    """Notes cold_run_seconds."""
    once(stage, "always")  # reads Spark's files from the disk
    seconds = [
        (once(stage), once(stage, first=False), once(stage, "always")) for _ in range(ROUNDS)
    ]
    first, following, on_spark = zip(*seconds, strict=True)
    stage.note("cold_run_seconds", following, "s", "<= 0.7")
    stage.note("cold_first_run_seconds", first, "s")
    stage.note("cold_run_on_spark_seconds", on_spark, "s")
