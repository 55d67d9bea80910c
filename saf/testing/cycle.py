"""The forwarder's cycle without Spark: the same source, routing, delivery and cursors.

It needs the extra ``forwarder``, for Arrow, but no Java. It has no separate processes and no Arrow
through the JVM, as Spark has. It keeps the same promises of delivery, in milliseconds.
"""

from __future__ import annotations

import saf.engine.task  # noqa: F401 - fails immediately without Arrow
from saf.database import Dsn
from saf.destinations.identities import Identities
from saf.destinations.postgresql import Postgresql
from saf.destinations.settings import DestinationSettings
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.forwarding.broker import SourceBroker
from saf.forwarding.runner import run_item
from saf.forwarding.surveys import surveyed

LEASE_SECONDS = 30.0


def forwarding_rules(
    quality: str = "exactly_once",
    chunk_rows: int = 1000,
    **destinations: Dsn | DestinationSettings,
) -> ForwardingRules:
    """Return rules for small deliveries without retries; the first destination is the default.

    A dsn stands for the inbox in that database, with this quality of service.
    """
    return ForwardingRules(
        destinations={
            name: Postgresql.model_validate({"dsn": target, "quality": quality})
            if isinstance(target, Dsn)
            else target
            for name, target in destinations.items()
        },
        chunk_rows=chunk_rows,
        chunk_bytes=1 << 20,
        max_bytes=1 << 26,
        attempts=1,
    )


class Cycle:
    """One forwarder process, driven step by step."""

    def __init__(
        self, app: Dsn, rules: ForwardingRules, *, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        identities = Identities(rules.destinations)
        self.broker = SourceBroker("app", app, lease_seconds=lease_seconds, identities=identities)
        self.rules = rules
        self.default = next(iter(rules.destinations), None)
        self.work: list[Work] = []

    def open(self, parts: int = 1) -> list[Work]:
        """Move due messages, and open batches of pending ones, split into ``parts`` items."""
        self.broker.tend()
        self.broker.move_held()
        self.work = [part for w in self.broker.open_work(self.default) for part in w.split(parts)]
        return self.work

    def deliver(self) -> list[Receipt]:
        """Run the tasks one after the other."""
        with surveyed(self.work) as work:
            return [
                receipt
                for number, item in enumerate(work)
                for receipt in run_item(number, item, self.rules)
            ]

    def close(self, receipts: list[Receipt]) -> None:
        """Close the complete batches."""
        self.broker.note(receipts)
        self.broker.close([self.work[r.work] for r in receipts if r.complete and not r.closed])

    def run(self) -> list[Receipt]:
        """Run a whole cycle; errors are in the receipts, not raised."""
        self.open()
        receipts = self.deliver()
        self.close(receipts)
        return receipts

    def __enter__(self) -> Cycle:
        return self

    def __exit__(self, *_: object) -> None:
        self.broker.leave()
