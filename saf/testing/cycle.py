"""The forwarder's cycle without Spark: the same source, routing rule, delivery and cursors.

Needs the extra ``forwarder``, for Arrow, and no Java. What Spark adds, processes and Arrow through
the JVM, is left out; the promises of delivery are the same, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pyarrow as pa

from saf.database import Dsn
from saf.routes import Route, choose_route
from saf.spark.broker import SourceBroker
from saf.spark.columns import OPTIONAL
from saf.spark.delivery import Delivery
from saf.spark.routing import distinct_routes
from saf.spark.source import record_batches
from saf.spark.work import Policy, Receipt, Work

LEASE_SECONDS = 30.0


def policy(quality: str = "exactly_once", chunk_rows: int = 1000, **destinations: Dsn) -> Policy:
    """Rules for small deliveries, without another attempt; the first destination is the default."""
    return Policy(
        destinations={name: (dsn, quality) for name, dsn in destinations.items()},
        chunk_rows=chunk_rows,
        chunk_bytes=1 << 20,
        max_bytes=1 << 26,
        attempts=1,
    )


class Cycle:
    """One forwarder process, driven step by step."""

    def __init__(self, app: Dsn, rules: Policy, *, lease_seconds: float = LEASE_SECONDS) -> None:
        self.broker = SourceBroker("app", app, lease_seconds=lease_seconds)
        self.rules = rules
        self.work: list[Work] = []

    def open(self, parts: int = 1) -> list[Work]:
        """Take what is pending in hand, as so many tasks."""
        self.broker.tend()
        default = next(iter(self.rules.destinations), None)
        self.work = [part for w in self.broker.open_work(default) for part in w.split(parts)]
        return self.work

    def deliver(self) -> list[Receipt]:
        """Run the tasks, one after the other."""
        routes = distinct_routes(self.work)
        receipts = []
        for number, work in enumerate(self.work):
            rows = routed(record_batches(work, self.rules.max_bytes), work, routes)
            receipts += Delivery(number, work, routes, self.rules).run(rows)
        return receipts

    def close(self, receipts: list[Receipt]) -> None:
        """Close the batches that are complete."""
        self.broker.close([self.work[r.work] for r in receipts if r.complete])

    def run(self) -> list[Receipt]:
        """A whole cycle; raises nothing for what the receipts say."""
        self.open()
        receipts = self.deliver()
        self.close(receipts)
        return receipts

    def __enter__(self) -> Cycle:
        return self

    def __exit__(self, *_: object) -> None:
        self.broker.leave()


def routed(
    batches: Iterator[pa.RecordBatch], work: Work, routes: list[Route]
) -> Iterator[pa.RecordBatch]:
    """The rows with the column ``route``, as `saf.spark.routing.route` adds it."""
    for batch in batches:
        choice = []
        for row in batch.to_pylist():
            to = row["packed"][[*OPTIONAL].index("to_broker")] if row["packed"] else None
            route = choose_route(
                work.routes, row["to_service"] or "", str(UUID(bytes=to)) if to else None
            )
            choice.append(None if route is None else routes.index(route))
        yield batch.append_column("route", pa.array(choice, pa.int32()))
