"""Cold one-shot runs: the whole process, from the shell to the exit, with 1,000 pending.

That is little work, which `saf forward` does without Spark; how long it takes with Spark shows what
the first deep backlog waits for.
"""

from __future__ import annotations

import sys
import time

from benchmarks.stage import Stage, output

MESSAGES = 1000
ROUNDS = 5


def once(stage: Stage, spark: str) -> float:
    """Seconds of one such run; with ``spark`` "auto" or "always"."""
    config = stage.settings_file(stage.server.data_dir.parent / "cold.toml")
    stage.fill(MESSAGES)
    stage.rewind()
    started = time.monotonic()
    output(sys.executable, "-m", "saf", "forward", "--config", config, "--spark", spark, "--json")
    seconds = time.monotonic() - started
    if stage.stored() != MESSAGES:
        raise RuntimeError("the cold run lost messages")
    return seconds


def run(stage: Stage) -> None:
    """Notes cold_run_seconds."""
    once(stage, "always")  # reads Spark's files from the disk
    seconds = [(once(stage, "auto"), once(stage, "always")) for _ in range(ROUNDS)]
    here, on_spark = zip(*seconds, strict=True)
    stage.note("cold_run_seconds", here, "s", "<= 1.8")
    stage.note("cold_run_on_spark_seconds", on_spark, "s")
