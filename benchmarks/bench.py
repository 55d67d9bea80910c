"""``make bench``: all figures of the core, from one run, as a table and as JSON lines.

    python -m benchmarks.bench [PART …]

Medians of interleaved rounds. Absolute figures are this machine's; ratios travel. Without a PART:
all but those that take minutes by themselves (memory, metrics, brokers).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks import (
    brokers,
    capture,
    classifiers,
    cold,
    dispatch,
    drain,
    end_to_end,
    fair,
    faults,
    held,
    idle,
    memory,
    metrics,
    processors,
    reading,
    receive,
    routing,
    send,
    sources,
    waking,
)
from benchmarks.stage import Stage
from saf.spark import session

ON_SPARK = {
    "drain": drain.run,
    "horizon": faults.run,
    "routing": routing.run,
    "classifiers": classifiers.run,
    "brokers": brokers.run,
    "metrics": metrics.run,
}
ALONE = {
    "send": send.run,
    "producers": faults.producers,
    "cold": cold.run,
    "memory": memory.run,
    "receive": receive.run,
    "processors": processors.run,
    "dispatch": dispatch.run,
    "end_to_end": end_to_end.run,
    "held": held.run,
    "capture": capture.run,
    "fair": fair.run,
    "idle": idle.run,
    "reading": reading.run,
    "waking": waking.run,
    "sources": sources.run,
}
LONG = (
    "memory",
    "metrics",
    "brokers",
    "producers",
    "dispatch",
    "reading",
    "waking",
    "held",
    "fair",
    "capture",
    "sources",
)
"""What a run has only if it is asked for."""
PARTS = (
    "send",
    "cold",
    "drain",
    "horizon",
    "routing",
    "classifiers",
    "receive",
    "processors",
    "end_to_end",
    "idle",
)


def main(chosen: list[str]) -> None:
    """Run the chosen parts, or all that are not long."""
    every = (*PARTS, *LONG)
    unknown = set(chosen) - set(every)
    if unknown:
        sys.exit(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(every)}")
    parts = chosen or PARTS
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="saf-bench-") as folder:
        Path(folder).chmod(0o755)
        stage = Stage(Path(folder))
        try:
            for part in parts:
                at = time.monotonic() - started
                stage.console.print(f"{part} … (after {at:.0f} s)", highlight=False)
                if part in ON_SPARK:
                    spark = session.start("local[2]", app_name="saf bench")
                    ON_SPARK[part](stage, spark)
                    spark.stop()
                else:
                    ALONE[part](stage)
            if not chosen:
                stage.note("bench_seconds", time.monotonic() - started, "s", "< 600")
        finally:
            stage.server.stop()
            stage.report()


if __name__ == "__main__":
    main(sys.argv[1:])
