"""``saf metrics``: the figures of all brokers for Prometheus; and metrics of other commands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from saf.cli.alive import Alive, waiting
from saf.cli.brokers import Config, Where, of_broker
from saf.cli.console import complain, echo
from saf.config import load
from saf.errors import ConfigurationError, SafError, Unavailable, UsageError
from saf.operating.figures import asker
from saf.operating.places import FIRST_SECONDS, Places
from saf.operating.watch import Watch
from saf.signals import stop_on_signals
from saf.telemetry import metrics, prometheus
from saf.telemetry.logger import Log

WRITE_SECONDS = 15.0
"""Interval at which a long-running program writes its file."""

log = Log("saf.metrics")

Listen = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST]:PORT", help="Serve metrics there while it runs, at /metrics, such as :9464."
    ),
]
Textfile = Annotated[
    Path | None,
    typer.Option(help="Write metrics to this file, for the node exporter: name it ….prom."),
]
Push = Annotated[
    str | None, typer.Option(metavar="URL", help="Push metrics to this pushgateway at the end.")
]


def command(
    *,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST]:PORT",
            help="Keep running, and serve metrics there, at /metrics, such as :9464.",
        ),
    ] = None,
    textfile: Textfile = None,
    push: Annotated[
        str | None, typer.Option(metavar="URL", help="Push metrics to this pushgateway.")
    ] = None,
    config: Config = None,
    broker: Where = None,
) -> None:
    """Print metrics of brokers and destinations for Prometheus.

    Without an option they are printed once. A broker that does not answer has saf_up 0, and the
    others are shown. The cost is bounded, however many messages are pending. docs/metrics.md
    explains each metric. Exit codes: 75 if a broker does not answer, unless they are served.
    """
    settings = load(config)
    # a single query needs all brokers; a scraper comes again
    first_seconds = None if listen is None else FIRST_SECONDS
    watch = Watch(Places(settings, broker, first_seconds=first_seconds), asker(settings))
    try:
        if listen is not None:
            _serve(watch, listen)
            return
        with waiting("waiting for the figures of all brokers"):
            taken = watch.take()
        if textfile is not None:
            prometheus.write(lambda: taken, textfile)
        if push is not None:
            prometheus.push(lambda: taken, push, "saf")
        if textfile is None and push is None:
            echo(prometheus.page(lambda: taken).rstrip("\n"), lines=True)
        for name, why in watch.down.items():
            complain(of_broker(name, why))
        if watch.down:
            raise typer.Exit(Unavailable.exit_code)
    finally:
        watch.close()


def _serve(watch: Watch, listen: str) -> None:
    stopping = threading.Event()
    scrapes = 0

    def take() -> list[metrics.Sample]:
        nonlocal scrapes
        scrapes += 1
        return watch.take()

    close = prometheus.serve(take, listen)
    alive = Alive("saf metrics", f"serves metrics at {listen}", lacks="no scrape")
    with stop_on_signals(stopping.set), alive.watching(lambda: scrapes):
        stopping.wait()
    close()


@contextmanager
def published(
    *,
    listen: str | None = None,
    textfile: Path | None = None,
    push: str | None = None,
    job: str = "saf",
) -> Iterator[None]:
    """Publish this process's metrics while a block runs; without any option, count nothing.

    A file is written every `WRITE_SECONDS` and at the end; a push comes at the end. A failure at
    the end is only logged, because the block's work is done.

    Raises:
        UsageError: ``listen`` or ``push`` is not a valid address, or packages are missing.
        ConfigurationError: the file cannot be written.
    """
    if listen is None and textfile is None and push is None:
        yield
        return
    store = metrics.switch_on()
    ends: list[Callable[[], None]] = []
    if listen is not None:
        ends.append(prometheus.serve(store.samples, listen))
    if textfile is not None:
        prometheus.write(store.samples, textfile)
        ends.append(_writing(store, textfile))
    if push is not None:
        prometheus.check_gateway(push)
        prometheus.registry(store.samples)
        ends.append(lambda: prometheus.push(store.samples, push, job))
    try:
        yield
    finally:
        for end in ends:
            try:
                end()
            except SafError as error:
                log.warning("metrics_not_published", error=str(error))
        metrics.switch_off()


def _writing(store: metrics.Store, file: Path) -> Callable[[], None]:
    """Write the file periodically, in a thread; return a function for the last write."""
    over = threading.Event()

    def write() -> None:
        while not over.wait(WRITE_SECONDS):
            try:
                prometheus.write(store.samples, file)
            except ConfigurationError as error:
                log.warning("metrics_not_published", error=str(error))

    thread = threading.Thread(target=write, name="saf-metrics", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()
        prometheus.write(store.samples, file)

    return end


def nth(listen: str | None, number: int) -> str | None:
    """Return the address of one of several processes on a machine: each has its own port.

    >>> nth(":9464", 0), nth("localhost:9464", 2), nth(None, 1)
    (':9464', 'localhost:9466', None)
    """
    if listen is None:
        return None
    _, port = prometheus.address(listen)
    if port == 0 or port + number > 65535:  # noqa: PLR2004 - the last port
        raise UsageError(f"--metrics {listen}: no port is left for process {number}")
    return f"{listen.rpartition(':')[0]}:{port + number}"
