"""One relay of one peer, in the peer's own Python: ``python -m benchmarks.peers.run NAME CALL …``.

A relay says "ready" once it has imported everything, and begins when it is told to.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module


def main() -> None:
    """Call ``prepare`` or ``fill``, or wait to be told to ``relay``."""
    name, call, *arguments = sys.argv[1:]
    peer = import_module(f"benchmarks.peers.{name}")
    for requirement in peer.REQUIRES:
        import_module(requirement.partition("==")[0].partition("[")[0].replace("-", "_"))
    if call == "prepare":
        peer.prepare(os.environ["APP"])
    elif call == "fill":
        peer.fill(os.environ["APP"], *map(int, arguments))
    else:
        told = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # some log to their standard output
        print("ready", file=told)
        sys.stdin.readline()
        peer.relay(os.environ["APP"], os.environ["MOM"], int(arguments[0]))
        print("done", file=told)


if __name__ == "__main__":
    main()
