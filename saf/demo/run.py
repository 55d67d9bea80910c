"""The demo's processes: the application's writers, one process each, and the forwarder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saf.config import Broker, Forwarder, Route, Router, Settings
from saf.database import Dsn
from saf.demo.flights import SERVICE
from saf.destinations.postgresql import Postgresql
from saf.destinations.settings import DestinationSettings
from saf.errors import SafError

if TYPE_CHECKING:
    from saf.forwarding.summary import Progress, Summary

WRITERS = 2
CLASSIFIER = "saf.demo.classifier:by_origin"


@dataclass(kw_only=True)
class Written:
    """Counts of the writers in this run."""

    flights: int = 0
    transactions: int = 0
    rolled_back: int = 0
    """Number of transactions that rolled back."""


def write(dsn: Dsn, limit: int | None, report: Callable[[Written], None]) -> Written:
    """Run the example application until all flights are recorded, with progress reports.

    Raises:
        SafError: a writer failed, after printing the reason on stderr.
    """
    program = [sys.executable, "-P", "-m", "saf.demo.flights", f"--writers={WRITERS}"]
    if limit is not None:
        program.append(f"--limit={limit}")
    # one pipe for all writers: a writer that outlives this process ends at its next line
    reading, writing = os.pipe()
    writers = [
        subprocess.Popen(  # noqa: S603 - our own program
            [*program, f"--writer={number}"],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            env={**os.environ, "SAF_DSN": dsn.conninfo},
            process_group=0,  # Ctrl-C goes to this process, which then stops the writers
        )
        for number in range(WRITERS)
    ]
    os.close(writing)
    written = Written()
    try:
        with os.fdopen(reading) as lines:
            for recorded in map(int, lines):
                written.transactions += 1
                written.flights += recorded
                written.rolled_back += recorded == 0
                report(written)
        if any(writer.wait() for writer in writers):
            raise SafError("the example application failed; its output is above")
    finally:
        for writer in writers:
            writer.terminate()
            writer.wait()
    return written


def inboxes(stores: Mapping[str, Dsn]) -> dict[str, DestinationSettings]:
    """Return MOM stores as destinations."""
    return {name: Postgresql(dsn=dsn) for name, dsn in stores.items()}


def settings(
    application: Dsn, destinations: dict[str, DestinationSettings], *, routing: bool
) -> Settings:
    """Return the forwarder's configuration, as a saf.toml would define it.

    The environment is ignored, because it may name brokers unrelated to the demo. With routing, a
    classifier sends each flight to the store with the name of its origin; without, all flights go
    to one store.
    """
    brokers = {"flights": Broker(dsn=application)}
    if not routing:
        default = Forwarder(default_destination=next(iter(destinations)))
        return Settings.model_construct(
            brokers=brokers, destinations=destinations, forwarder=default
        )
    return Settings.model_construct(
        brokers=brokers,
        destinations=destinations,
        routes=tuple(Route(service=name, destination=name) for name in destinations),
        routers={SERVICE: Router(kind="arrow", expression=CLASSIFIER)},
    )


def forward(configuration: Settings, progress: Callable[[Progress], None] | None) -> Summary:
    """Forward everything that is pending."""
    from saf.spark import session

    spark = session.start(configuration.forwarder.master, app_name="saf demo")
    try:
        from saf.forwarding.forwarder import Forwarder as Forwarding
        from saf.spark.runner import SparkRunner

        return Forwarding(configuration, SparkRunner(lambda: spark), progress=progress).drain()
    finally:
        spark.stop()
