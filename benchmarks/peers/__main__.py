"""``make bench-peers``: every peer and saf, side by side.

python -m benchmarks.peers [WORKLOAD …] [--scale 0.01]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.peers import drain, send
from benchmarks.peers.environment import NotInstalled
from benchmarks.peers.report import Report
from benchmarks.peers.stage import PEERS, Peer, on_stage

WORKLOADS = {"send": send.run, "drain": drain.run}


def main() -> None:
    """Run the chosen workloads, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the messages; to try it out")
    parser.add_argument("--only", nargs="*", choices=PEERS, default=PEERS, help="these peers")
    chosen = parser.parse_args()
    if unknown := set(chosen.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}: there are {', '.join(WORKLOADS)}")
    report = Report()
    with tempfile.TemporaryDirectory(prefix="saf-bench-") as folder:
        Path(folder).chmod(0o755)
        with on_stage(Path(folder)) as stage:
            peers = []
            for name in chosen.only:
                try:
                    peers.append(Peer(name, stage))
                except NotInstalled as error:
                    report.missing(name, str(error))
            for workload in chosen.workloads or WORKLOADS:
                WORKLOADS[workload](stage, peers, report, chosen.scale)
    report.write()


if __name__ == "__main__":
    main()
