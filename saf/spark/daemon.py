"""The process that Spark forks its Python workers from, with everything imported before the fork.

Spark's own daemon imports nothing, so that each worker imports Arrow, ADBC and the rest anew: on
a cold start, most of the workers' time. What is imported here starts no threads, which would not
survive a fork; a test sees to that.

Spark runs it as ``python -m saf.spark.daemon MODULE``. The daemons that only plan a query need
none of this, and get none.
"""

from __future__ import annotations

import gc
import os
import sys

from pyspark.daemon import manager


def preload() -> None:
    """Import what a task of the forwarder needs."""
    # Arrow's allocator would start a thread of its own
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

    import saf.spark.delivery  # noqa: F401


if __name__ == "__main__":
    if sys.argv[1:] == ["pyspark.worker"]:
        preload()
    # Spark collects garbage after each task: not among what was imported
    gc.freeze()
    manager()
