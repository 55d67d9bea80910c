"""Forwarder processes: the cycle of tests/pipeline.py in a loop, until it is killed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

from saf.config import Settings
from saf.database import Dsn
from saf.destinations.settings import DestinationSettings
from saf.engine.work import Receipt, Work
from saf.errors import Fenced, Restored, SafError, Unavailable
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from saf.forwarding.summary import Summary
from saf.operating.maintenance import purge_broker
from saf.setaside import parking
from tests.crash.evaluated import run_transforming, transforming_rules
from tests.crash.stall import listen
from tests.pipeline import Cycle, forwarding_rules
from tests.programs import BIN, ROOT, configuration, environment

LEASE_SECONDS = 1.0
REFUSED = ("Ahead", "Behind", "Restored")
FASTER = 20
"""How much quicker lanes are tried again, so that a round takes seconds."""


class Forwarding(Cycle):
    """Without a default destination, so that a route can be missing; keeps its lease."""

    def open(self, parts: int = 1) -> list[Work]:
        self.broker.tend()
        self.work = [part for w in self.broker.open_work(None) for part in w.split(parts)]
        return self.work

    def deliver(self) -> list[Receipt]:
        """In a thread, as Spark does it; meanwhile the lease is kept."""
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(self.deliver_all)
            while not wait([job], timeout=LEASE_SECONDS / 5).done:
                self.broker.renew()
            return job.result()

    def deliver_all(self) -> list[Receipt]:
        """In this thread."""
        return super().deliver()


class Transforming(Forwarding):
    """With transforms, which plain Python evaluates."""

    def deliver_all(self) -> list[Receipt]:
        return [
            receipt
            for number, item in enumerate(self.work)
            for receipt in run_transforming(number, item, self.rules)
        ]


def forwarder(  # noqa: PLR0917 - a process's arguments have no names
    app: Dsn,
    destinations: Mapping[str, Dsn],
    chunk_rows: int,
    skewed: bool,
    refusals: Path,
    transforms: Collection[str] = (),
) -> None:
    """Forward for ever; come back from whatever one can wait out.

    What it refuses to do, because something was set back, goes to a file.
    """
    listen()
    hurry()
    if skewed:
        an_hour_ahead()
    rules = forwarding_rules("exactly_once", chunk_rows, **destinations)
    kind = Transforming if transforms else Forwarding
    cycle = kind(app, transforming_rules(rules, transforms), lease_seconds=LEASE_SECONDS)
    while True:
        try:
            receipts = cycle.run()
            refused = [f"{r.error_kind}: {r.error}" for r in receipts if r.error_kind in REFUSED]
        except Fenced:
            continue
        except Restored as error:
            receipts, refused = [], [f"Restored: {error}"]
        except Unavailable:
            cycle.broker.forget_connection()
            time.sleep(0.05)
            continue
        if refused:
            with refusals.open("a") as file:
                file.writelines(f"{' '.join(line.split())}\n" for line in refused)
        if refused or not receipts:
            time.sleep(0.1)


def looping_forwarder(
    app: Dsn, destinations: Mapping[str, Dsn | DestinationSettings], chunk_rows: int, refusals: Path
) -> None:
    """Loop a whole forwarder without Spark: visits forward little work, and tasks the rest."""
    listen()
    hurry()
    options = {"lease_seconds": LEASE_SECONDS, "interval_seconds": 0.1, "chunk_rows": chunk_rows}
    settings = Settings.model_validate(
        {
            "brokers": {"app": {"dsn": app.conninfo}},
            "destinations": {
                name: {"dsn": place.conninfo} if isinstance(place, Dsn) else place
                for name, place in destinations.items()
            },
            "forwarder": options,  # no default destination, so that a route can be missing
        }
    )

    def report(summary: Summary) -> None:
        refused = [one for one in summary.problems if one["kind"] in REFUSED]
        if refused:
            with refusals.open("a") as file:
                file.writelines(
                    f"{one['kind']}: {' '.join(one['error'].split())}\n" for one in refused
                )

    while True:
        with suppress(SafError):
            Forwarder(settings, InProcess()).loop(report)
        time.sleep(0.05)  # as in `forwarder`, if the source does not answer


def spark_forwarder(
    app: Dsn, destinations: Mapping[str, Dsn], chunk_rows: int, folder: Path, more: str
) -> None:
    """``saf forward --loop``, started again whenever it ends; ``more`` is added to its saf.toml."""
    config = configuration(
        folder / f"saf-{os.getpid()}.toml",
        {"app": app},
        destinations,
        chunk_rows=chunk_rows,
        lease_seconds=LEASE_SECONDS * 5,
        master="local[2]",
        use_spark="always",
    )
    with config.open("a") as file:
        file.write(more)
    options = ["forward", "--config", str(config), "--loop", "--interval", "0.1"]
    while True:
        subprocess.run(
            [str(BIN / "saf"), *options],
            env={"PYTHONPATH": str(ROOT), **environment()},
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def purger(app: Dsn) -> None:
    """Rotate and purge for ever, as fast as it goes."""
    while True:
        try:
            with app.connect(role="purge", autocommit=True) as connection:
                while True:
                    purge_broker(connection, retention_seconds=0, rotate_after_seconds=0.1)
                    time.sleep(0.5)
        except (Restored, Unavailable, psycopg.Error):
            time.sleep(0.05)


def hurry() -> None:
    """Service Broker's schedule, some times faster."""
    seconds = parking.wait_seconds
    sooner: Any = lambda attempts: seconds(attempts) / FASTER  # noqa: E731 - a patch of this process
    parking.wait_seconds = sooner


def an_hour_ahead() -> None:
    """This process's wall clock; leases and backoff are the database's to time."""
    now = time.time
    time.time = lambda: now() + 3600
