"""``make bench``: all figures of the core, from one run, as a table and as JSON lines.

    python -m benchmarks.bench [drain] [cold] [send] [memory] [receive]

Medians of interleaved rounds. Absolute figures are this machine's; ratios travel.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks import cold, drain, memory, receive, send
from benchmarks.stage import Stage
from saf.spark import session

PARTS = ("send", "cold", "drain", "memory", "receive")


def main(chosen: list[str]) -> None:
    """Run the chosen parts, or all."""
    unknown = set(chosen) - set(PARTS)
    if unknown:
        sys.exit(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    parts = chosen or list(PARTS)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="saf-bench-") as folder:
        Path(folder).chmod(0o755)
        stage = Stage(Path(folder))
        try:
            for part in parts:
                stage.console.print(f"{part} …")
                if part == "drain":
                    spark = session.start("local[2]", app_name="saf bench")
                    drain.run(stage, spark)
                    session.stop(spark)
                elif part == "receive":
                    receive.run(stage)
                    spark = session.start("local[2]", app_name="saf bench")
                    receive.end_to_end(stage, spark)
                    session.stop(spark)
                else:
                    {"send": send, "cold": cold, "memory": memory}[part].run(stage)
        finally:
            stage.server.stop()
    stage.note("bench_seconds", time.monotonic() - started, "s", "< 600")
    stage.report()


if __name__ == "__main__":
    main(sys.argv[1:])
