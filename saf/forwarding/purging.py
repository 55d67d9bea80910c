"""Purging by the forwarder: now and then it purges its sources, some brokers in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

from saf.config import Purge
from saf.database import check_schema, unavailable_if_lost
from saf.errors import SafError
from saf.forwarding.broker import SourceBroker
from saf.logger import Log
from saf.operating.maintenance import count_purged, purge_by_rules

log = Log("saf.forward")

EVERY_SECONDS = 60.0
AT_ONCE = 8
TICK_SECONDS = 0.2


class Purging:
    """When each broker was purged last."""

    def __init__(self, rules: Purge) -> None:
        self.rules = rules
        self._at: dict[str, float] = {}

    def purge(
        self,
        brokers: Iterable[SourceBroker],
        meanwhile: Callable[[], None],
        most: int | None = None,
    ) -> None:
        """Purge the brokers that are due, or ``most`` of them; call ``meanwhile`` every tick."""
        now = time.monotonic()
        due = [broker for broker in brokers if now >= self._at.get(broker.name, now)][:most]
        if not due:
            return
        self._at |= dict.fromkeys((broker.name for broker in due), now + EVERY_SECONDS)
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="saf-purge") as pool:
            jobs = [pool.submit(self._purge_one, broker) for broker in due]
            while wait(jobs, timeout=TICK_SECONDS).not_done:
                meanwhile()
        for job in jobs:
            job.result()

    def _purge_one(self, broker: SourceBroker) -> None:
        try:
            with (
                unavailable_if_lost(f"broker {broker.name!r}"),
                broker.dsn.connect(role="purge", autocommit=True) as connection,
            ):
                check_schema(connection)
                outcome = purge_by_rules(connection, broker.dsn, self.rules)
            count_purged(broker.name, outcome)
        except SafError as error:
            # not an error: a forwarder need not have the right to purge, and `saf purge` says why
            log.debug("not_purged", broker=broker.name, error=str(error))
