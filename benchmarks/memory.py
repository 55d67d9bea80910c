"""Memory of driver, JVM and workers together, with a small backlog and with a large one.

Each backlog is forwarded by a process of its own, whose resident memory is sampled to its end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.stage import Stage

BACKLOGS = {"100k": 100_000, "5M": 5_000_000}
SAMPLE_SECONDS = 0.2


def peak_mib(process: subprocess.Popen[str]) -> float:
    """The highest sum of the resident memory of a process and all below it, shared pages once."""
    peak = 0
    root = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        for one in [root, *root.children(recursive=True)]:
            try:
                total += one.memory_full_info().pss
            except psutil.Error:
                continue
        peak = max(peak, total)
        time.sleep(SAMPLE_SECONDS)
    return peak / 2**20


def run(stage: Stage) -> None:
    """Notes memory_mib_… and memory_growth, the largest backlog's over the smallest's."""
    config: Path = stage.settings_file(stage.server.data_dir.parent / "memory.toml")
    peaks = []
    for name, messages in BACKLOGS.items():
        stage.fill(messages)
        stage.rewind()
        process = subprocess.Popen(
            [sys.executable, "-m", "saf", "forward", "--config", str(config), "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        started = time.monotonic()
        peaks.append(peak_mib(process))
        seconds = time.monotonic() - started
        if process.returncode or stage.stored() != messages:
            raise RuntimeError(f"forwarding {messages} failed")
        stage.note(f"memory_mib_{name}", peaks[-1], "MiB")
        stage.note(f"one_shot_us_per_message_{name}", seconds / messages * 1e6, "µs")
    stage.note("memory_growth", peaks[-1] / peaks[0], "times", "flat")
