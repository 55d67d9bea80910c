"""What metrics cost the forwarder: the same drain with and without them, in turns.

With them, a page is served and scraped every second, more often than Prometheus does by default.
"""

from __future__ import annotations

import statistics
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from benchmarks.drain import WARM_UP, forward
from benchmarks.stage import Stage
from saf.cli.metrics import published
from saf.config import load

MESSAGES = 300_000
ROUNDS = 25  # short and many: one drain differs from the next by a tenth
PORT = 9464
SCRAPE_SECONDS = 1.0


@contextmanager
def scraped() -> Iterator[None]:
    """Serve the metrics of this process, and scrape them, while a block runs."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(SCRAPE_SECONDS):
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics") as page:
                page.read()

    with published(listen=f"127.0.0.1:{PORT}"):
        thread = threading.Thread(target=scrape)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def run(stage: Stage, spark: SparkSession) -> None:
    """Notes metrics_drain_ratio: the speed of a drain with metrics over that without."""
    settings = load(stage.settings_file(stage.server.data_dir.parent / "metrics.toml"))
    stage.fill(MESSAGES)
    for _ in range(WARM_UP):
        stage.rewind()
        forward(spark, settings, MESSAGES)
    ratios = []
    for number in range(ROUNDS):
        seconds: dict[bool, float] = {}
        for with_metrics in (False, True) if number % 2 else (True, False):
            stage.rewind()
            if with_metrics:
                with scraped():
                    seconds[with_metrics] = forward(spark, settings, MESSAGES)
            else:
                seconds[with_metrics] = forward(spark, settings, MESSAGES)
        ratios.append(seconds[False] / seconds[True])
    stage.note("metrics_drain_ratio", ratios, "of a drain without", ">= 0.99")
    lower, _, upper = statistics.quantiles(ratios, n=4)
    stage.note("metrics_drain_ratio_quartiles", upper - lower, "of a drain without")
