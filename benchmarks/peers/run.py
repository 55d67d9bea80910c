"""One relay of one system, in its own Python: ``python -m benchmarks.peers.run NAME CALL …``.

A relay says "ready" once it has imported everything. Then it is told, line by line: to "drain"
what is pending, or to "stay" until it is told to "stop"; and says "done" each time.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module

PAUSE_SECONDS = 0.05
"""Between looks that find nothing, of who stays: as saf's loop is set too."""


def main() -> None:
    """Call ``prepare``; or relay once, or as often as told."""
    name, call, *arguments = sys.argv[1:]
    peer = import_module(f"benchmarks.peers.{name}")
    app, mom = os.environ["APP"], os.environ["MOM"]
    if call == "prepare":
        peer.prepare(app)
        return
    number = int(arguments[0])
    if call == "once":
        peer.relay(app, mom, number, lambda: False)
        return
    for requirement in peer.REQUIRES:
        import_module(requirement.partition("==")[0].partition("[")[0].replace("-", "_"))
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # some log to their standard output
    print("ready", file=told)
    while line := sys.stdin.readline():
        peer.relay(app, mom, number, _until_stopped() if line == "stay\n" else lambda: False)
        print("done", file=told)


def _until_stopped() -> Callable[[], bool]:
    stopped = threading.Event()

    def listen() -> None:
        sys.stdin.readline()
        stopped.set()

    threading.Thread(target=listen, daemon=True).start()
    return lambda: not stopped.wait(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
