"""Memory of driver, JVM and workers together, with a small backlog and with a large one.

Each backlog is forwarded by a process of its own, whose resident memory is sampled to its end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.stage import Stage

BACKLOGS = {"100k": 100_000, "10M": 10_000_000}
SAMPLE_SECONDS = 0.2


def resident_mib(roots: Iterable[int]) -> float:
    """The resident memory of processes and all below them, shared pages once."""
    total = 0
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(root)
            for one in [parent, *parent.children(recursive=True)]:
                with suppress(psutil.Error):
                    total += one.memory_full_info().pss
    return total / 2**20


def peak_mib(process: subprocess.Popen[str]) -> float:
    """The most that a process and all below it had resident until its end."""
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, resident_mib([process.pid]))
        time.sleep(SAMPLE_SECONDS)
    return peak


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
