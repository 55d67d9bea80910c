"""Purging by the forwarder: it purges its sources periodically, some brokers in parallel.

Purging runs beside the forwarding, which does not wait for it: archiving a slot takes as long as
the archive needs to write, and a forwarder that always has work would never purge.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial

from saf.config import Purge
from saf.database import Dsn, check_schema, unavailable_if_lost
from saf.database.background import Background
from saf.errors import MayNotPurge, SafError, Unexpected
from saf.forwarding.broker import SourceBroker
from saf.operating.maintenance import count_purged, purge_by_rules
from saf.telemetry.logger import Log

log = Log("saf.forward")

EVERY_SECONDS = 60.0
AT_ONCE = 8
TICK_SECONDS = 0.2


class Purging:
    """The purges of a run: when each broker is due, and those in progress."""

    def __init__(self, rules: Purge) -> None:
        self.rules = rules
        self._due: dict[str, float] = {}
        self._under_way: dict[str, Future[None]] = {}
        self._background = Background(AT_ONCE, "saf-purge")

    def start(self, brokers: Iterable[SourceBroker]) -> None:
        """Begin to purge the brokers that are due, in the background."""
        now = time.monotonic()
        self._under_way = {name: job for name, job in self._under_way.items() if not job.done()}
        for broker in brokers:
            name = broker.name
            if name not in self._under_way and now >= self._due.get(name, now):
                self._due[name] = now + EVERY_SECONDS
                job = self._background.submit(partial(self._purge, name, broker.dsn))
                self._under_way[name] = job

    def finish(self, stopped: Callable[[], bool]) -> None:
        """Wait for all purges that were submitted; once ``stopped``, only for those that have
        begun."""
        jobs = list(self._under_way.values())
        while wait(jobs, timeout=TICK_SECONDS).not_done:
            if stopped():
                for job in jobs:
                    job.cancel()

    def dismiss(self) -> None:
        """Begin nothing more; the end of the process waits for no purge."""
        for job in self._under_way.values():
            job.cancel()
        self._background.dismiss()

    def _purge(self, name: str, dsn: Dsn) -> None:
        try:
            with (
                unavailable_if_lost(f"broker {name!r}"),
                dsn.connect(role="purge", autocommit=True) as connection,
            ):
                check_schema(connection)
                outcome = purge_by_rules(connection, dsn, self.rules)
            count_purged(name, outcome)
        except MayNotPurge as error:
            # not a failure: a forwarder need not have the right, and `saf purge` shows why
            log.debug("not_purged", broker=name, error=str(error))
        except SafError as error:
            log.warning("not_purged", broker=name, error=str(error))
        except Exception as error:  # any error; forwarding continues
            log.exception("not_purged", broker=name, error=str(Unexpected("the purge", error)))
