"""``make bench-peers``: every peer and saf, side by side.

python -m benchmarks.peers [WORKLOAD …] [--scale 0.01]     measure, and write the page anew
python -m benchmarks.peers report                          write docs/peers.md and its charts anew

Keeps what it measured in benchmarks/results/peers.jsonl, each workload in the place of its last
record; a run on another scale than 1 is a trial, and only prints.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.peers import backlog, cold, consume, drain, latency, marking, page, send, steady
from benchmarks.peers.environment import NotInstalled
from benchmarks.peers.report import RESULTS, Report
from benchmarks.peers.stage import SYSTEMS, Peer, on_stage
from benchmarks.stage import Stage, output

WORKLOADS: dict[str, Callable[[Stage, list[Peer], Report, float], None]] = {
    "drain": drain.run,
    "send": send.run,
    "marking": marking.run,
    "latency": latency.run,
    "consume": consume.run,
    "backlog": backlog.run,
    "cold": cold.run,
    "steady": steady.run,
}


def main() -> None:
    """Run the chosen workloads, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*WORKLOADS, "report"]
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(names))
    parser.add_argument("--scale", type=float, default=1.0, help="of the messages; to try it out")
    parser.add_argument("--minutes", type=float, default=10.0, help="of steady load (10)")
    parser.add_argument("--only", nargs="*", choices=SYSTEMS, default=SYSTEMS, help="these systems")
    chosen = parser.parse_args()
    WORKLOADS["steady"] = partial(steady.run, minutes=chosen.minutes)
    if unknown := set(chosen.workloads) - set(names):
        parser.error(f"no workload {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and no server stays behind
    if chosen.workloads != ["report"]:
        _measure(chosen.workloads or list(WORKLOADS), chosen)
    if chosen.scale == 1:
        page.write(RESULTS, page.PAGE)


def _measure(workloads: list[str], chosen: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="saf-bench-") as folder:
        Path(folder).chmod(0o755)
        with on_stage(Path(folder)) as stage:
            peers, missing = [], {}
            postgresql = output(stage.program("postgres"), "--version").split()[-1]
            for name in chosen.only:
                try:
                    peers.append(Peer(name, stage))
                except (NotInstalled, subprocess.CalledProcessError) as error:
                    missing[name] = str(error)
            for workload in workloads:
                report = Report(workload, chosen.scale)
                started = time.monotonic()
                for name, why in missing.items():
                    report.cannot(workload, name, f"not installed: {why}")
                WORKLOADS[workload](stage, peers, report, chosen.scale)
                seconds = time.monotonic() - started
                report.ran(seconds, postgresql, peers)
                report.console.print(report.table())
                if chosen.scale == 1:
                    report.keep(RESULTS)
            for peer in peers:
                peer.relays.stop()


if __name__ == "__main__":
    main()
