"""The process that Spark forks its Python workers from, with everything imported before the fork.

Spark's own daemon imports nothing, so each worker imports Arrow, ADBC and the rest again. On a
cold start, those imports take most of the workers' time. The modules imported here must not start
threads, because threads do not survive a fork; a test checks this.

Spark runs ``python -m saf.spark.daemon pyspark.worker`` seconds after a driver on the same machine
began to start. Such a driver runs ``python -m saf.spark.daemon ahead`` while the JVM comes up
(`start_ahead`), so a daemon is ready when Spark asks for one. The process that Spark started hands
its arguments, environment and standard streams to the daemon started ahead, which becomes Spark's
daemon. If no daemon was started ahead, or it is gone, the process that Spark started does the work
itself.
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
"""Environment variable of Spark's processes: the socket of the daemon that was started ahead."""
STREAMS = 0, 1, 2

_ahead: subprocess.Popen[bytes] | None = None


def start_ahead(env: Mapping[str, str]) -> str:
    """Start a daemon ahead, with a JVM's environment; return the JVM's value of `AHEAD`.

    The daemon ends with this process, unless Spark has claimed it by then.
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
            process_group=0,  # keep Ctrl-C away from it
        )
    )
    return path


def main() -> None:
    """Become Spark's daemon, or let the daemon started ahead become it."""
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

    # Spark collects garbage after each task; imported modules contain none
    gc.freeze()
    daemon.worker = quietly(daemon.worker)
    daemon.manager()


def preload() -> None:
    """Import everything that a task of the forwarder needs."""
    # Arrow's allocator would start a thread of its own
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    gc.disable()  # imports leave no garbage, and a collection takes time

    import pyspark.worker  # noqa: F401 - to have it imported

    import saf.engine.task  # noqa: F401 - to have it imported
    from saf.destinations import kinds

    kinds.preload()

    gc.enable()


def quietly(worker: Any) -> Any:
    """Return a worker that prints no traceback if the JVM ends first.

    The worker then has nothing to read from or write to. On a unix socket, it notices immediately.
    """

    def run(sock: Any, authenticated: bool) -> int:
        try:
            return int(worker(sock, authenticated))
        except (ConnectionError, EOFError):
            return 1

    return run


def _hand_over(path: str) -> bool:
    """Give this process's arguments, environment and streams to the daemon; wait until it ends.

    Return False if no daemon accepts them.
    """
    request = json.dumps([sys.argv, dict(os.environ)]).encode()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            socket.send_fds(connection, [b"\n"], STREAMS)
            connection.sendall(request + b"\n")
            if connection.recv(1) != b"\n":
                return False
            connection.recv(1)
    except OSError:
        return False
    return True


def _take_over(listening: socket.socket) -> bool:
    """Wait for a process that Spark started, and become it; return False if the driver ends."""
    ready, _, _ = select.select([listening, sys.stdin], [], [])
    shutil.rmtree(Path(listening.getsockname()).parent, ignore_errors=True)
    if listening not in ready:
        return False
    connection, _ = listening.accept()
    _, streams, _, _ = socket.recv_fds(connection, 1, len(STREAMS))
    with connection.makefile("rb") as file:
        sys.argv, environment = json.loads(file.readline())
    for own, received in zip(STREAMS, streams, strict=True):
        os.dup2(received, own)
        os.close(received)
    os.environ.clear()
    os.environ.update(environment)
    connection.sendall(b"\n")
    connection.detach()  # keep it open until this process ends
    return True


if __name__ == "__main__":
    main()
