"""Cold one-shot runs by a server of Spark Connect that runs already, with 1,000 pending.

    python -m benchmarks.connect

The client is a process of its own, from the shell to the exit, and has no JVM. By itself, it does
so little work without Spark; with ``--spark always``, the server does it. The first run, in which
the server starts its Python, is noted by itself.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks.stage import Stage, median, output
from tests.connect_server import ConnectServer, connect_server

MESSAGES = 1000
ROUNDS = 5


def once(stage: Stage, server: ConnectServer, spark: str) -> float:
    """Seconds of one such run; with ``spark`` "auto" or "always"."""
    config = stage.settings_file(stage.server.data_dir.parent / "connect.toml")
    stage.rewind()
    started = time.monotonic()
    options = ("--config", config, "--remote", server.remote, "--spark", spark, "--json")
    output(sys.executable, "-m", "saf", "forward", *options)
    seconds = time.monotonic() - started
    if stage.stored() != MESSAGES:
        raise RuntimeError("the cold run lost messages")
    return seconds


def main() -> None:
    """Run it all, and write the results."""
    with tempfile.TemporaryDirectory(prefix="saf-bench-") as folder:
        Path(folder).chmod(0o755)
        stage = Stage(Path(folder))
        try:
            stage.fill(MESSAGES)
            served = Path(folder) / "connect"
            served.mkdir()
            with connect_server(served) as server:
                first = once(stage, server, "always")
                seconds = [
                    (once(stage, server, "auto"), once(stage, server, "always"))
                    for _ in range(ROUNDS)
                ]
            here, there = zip(*seconds, strict=True)
            stage.note("cold_remote_first_seconds", first, "s")
            stage.note("cold_remote_seconds", median(here), "s", "<= 1.5")
            stage.note("cold_remote_on_spark_seconds", median(there), "s", "<= 1.5")
        finally:
            stage.server.stop()
        stage.report()


if __name__ == "__main__":
    main()
