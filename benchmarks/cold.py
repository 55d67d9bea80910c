"""A cold one-shot run: the whole process, from the shell to the exit, with 1,000 pending."""

from __future__ import annotations

import sys
import time

from benchmarks.stage import Stage, median, output
from saf.spark.java import cache_folder

MESSAGES = 1000
ROUNDS = 5


def wait_for_archive() -> None:
    """The first run's JVM writes its classes after the run has ended; a killed one never ends."""
    while any(
        draft.stat().st_mtime > time.time() - 60
        for draft in (cache_folder() / "jvm").glob("*.draft")
    ):
        time.sleep(0.2)


def once(stage: Stage) -> float:
    """Seconds of one such run."""
    config = stage.settings_file(stage.server.data_dir.parent / "cold.toml")
    wait_for_archive()
    stage.fill(MESSAGES)
    stage.rewind()
    started = time.monotonic()
    output(sys.executable, "-m", "saf", "forward", "--config", config, "--json")
    seconds = time.monotonic() - started
    if stage.stored() != MESSAGES:
        raise RuntimeError("the cold run lost messages")
    return seconds


def run(stage: Stage) -> None:
    """Notes cold_run_seconds. The first run may write the class-data archive and is not counted."""
    seconds = [once(stage) for _ in range(ROUNDS + 1)]
    stage.note("cold_run_seconds", median(seconds[1:]), "s", "<= 3.5")
