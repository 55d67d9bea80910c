"""The process that Spark forks its Python workers from, with everything imported before the fork.

Spark's own daemon imports nothing, so that each worker imports Arrow, ADBC and the rest anew. On a
cold start that is most of the workers' time. What is imported here starts no threads, because they
would not survive a fork; a test makes sure of that.

Spark runs it as ``python -m saf.spark.daemon pyspark.worker``, seconds after a driver on the same
machine has begun to start. Such a driver runs ``python -m saf.spark.daemon ahead`` while the JVM
comes up (`start_ahead`). When Spark asks for its daemon, the one ahead is ready. The process that
Spark has started hands over its arguments, its environment and its standard streams, and the one
ahead is Spark's daemon from then on. If there is none, or it has gone, the process that Spark has
started does the work itself.
"""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saf.spark.children import left_to_itself

AHEAD = "SAF_SPARK_DAEMON"
"""The environment variable that names, for what Spark starts, the socket of the daemon ahead."""
STREAMS = 0, 1, 2

_ahead: subprocess.Popen[bytes] | None = None


def start_ahead(env: Mapping[str, str]) -> str:
    """Start a daemon ahead, in a JVM's environment; return what `AHEAD` is to be there.

    It ends with this process, unless Spark has asked for it by then.
    """
    folder = tempfile.mkdtemp(prefix="saf-")  # private to this user
    path = str(Path(folder) / "daemon")
    global _ahead  # noqa: PLW0603 kept, for it is a child
    _ahead = left_to_itself(
        subprocess.Popen(
            [sys.executable, "-m", "saf.spark.daemon", "ahead"],
            env={**env, AHEAD: path},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is not for it
        )
    )
    return path


def main() -> None:
    """Become Spark's daemon, or let the daemon ahead do so."""
    path = os.environ.get(AHEAD)
    if sys.argv[1:] == ["ahead"]:
        assert path is not None  # noqa: S101 `start_ahead` has set it
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            preload()
            if not _take_over(listening):
                return
    elif path is not None and _hand_over(path):
        return
    else:
        preload()

    from pyspark import daemon

    # Spark collects garbage after each task, and there is none among what was imported
    gc.freeze()
    daemon.worker = quietly(daemon.worker)
    daemon.manager()


def preload() -> None:
    """Import what a task of the forwarder needs."""
    # Arrow's allocator would start a thread of its own
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    gc.disable()  # nothing that is imported is garbage, and to look takes time

    import pyspark.worker  # noqa: F401 - to have it imported

    import saf.engine.task  # noqa: F401 - to have it imported
    from saf.destinations import kinds

    kinds.preload()

    gc.enable()


def quietly(worker: Any) -> Any:
    """Return a worker that prints no traceback when the JVM has ended first.

    The worker then has nobody left to read from or write to, which it learns at once on a unix
    socket.
    """

    def run(sock: Any, authenticated: bool) -> int:
        try:
            return int(worker(sock, authenticated))
        except (ConnectionError, EOFError):
            return 1

    return run


def _hand_over(path: str) -> bool:
    """Give all that this process has to the daemon at a socket, and stay as long as it does.

    False if no daemon takes it.
    """
    mine = json.dumps([sys.argv, dict(os.environ)]).encode()
    try:
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(path)
            socket.send_fds(there, [b"\n"], STREAMS)
            there.sendall(mine + b"\n")
            if there.recv(1) != b"\n":
                return False
            there.recv(1)
    except OSError:
        return False
    return True


def _take_over(listening: socket.socket) -> bool:
    """Wait for a process that Spark has started, and become it; False at the driver's end."""
    ready, _, _ = select.select([listening, sys.stdin], [], [])
    shutil.rmtree(Path(listening.getsockname()).parent, ignore_errors=True)
    if listening not in ready:
        return False
    there, _ = listening.accept()
    _, streams, _, _ = socket.recv_fds(there, 1, len(STREAMS))
    with there.makefile("rb") as file:
        sys.argv, environment = json.loads(file.readline())
    for mine, its in zip(STREAMS, streams, strict=True):
        os.dup2(its, mine)
        os.close(its)
    os.environ.clear()
    os.environ.update(environment)
    there.sendall(b"\n")
    there.detach()  # open as long as this process is there
    return True


if __name__ == "__main__":
    main()
