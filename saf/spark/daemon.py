"""The process that Spark forks its Python workers from, with everything imported before the fork.

Spark's own daemon imports nothing, so that each worker imports Arrow, ADBC and the rest anew: on
a cold start, most of the workers' time. What is imported here starts no threads, which would not
survive a fork; a test sees to that.

Spark runs it as ``python -m saf.spark.daemon pyspark.worker``.
"""

from __future__ import annotations

import gc
import os
from typing import Any

from pyspark import daemon


def preload() -> None:
    """Import what a task of the forwarder needs."""
    # Arrow's allocator would start a thread of its own
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

    import saf.spark.delivery  # noqa: F401


def quietly(worker: Any) -> Any:
    """A worker that does not print a traceback when the JVM has ended first.

    It has nobody left to read from or write to then, which on a unix socket it learns at once.
    """

    def run(sock: Any, authenticated: bool) -> int:
        try:
            return int(worker(sock, authenticated))
        except (ConnectionError, EOFError):
            return 1

    return run


if __name__ == "__main__":
    preload()
    # Spark collects garbage after each task: not among what was imported
    gc.freeze()
    daemon.worker = quietly(daemon.worker)
    daemon.manager()
