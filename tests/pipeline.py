"""The forwarder's cycle without Spark: the same source, routing, delivery and cursors.

What Spark adds (processes, Arrow through the JVM) is tested in tests/spark and tests/crash; the
promises of delivery are tested here in milliseconds.
"""

from __future__ import annotations

from typing import Any

import psycopg

from saf.database import Dsn
from saf.shards import Member
from saf.spark.broker import SourceBroker
from saf.spark.delivery import Delivery
from saf.spark.source import record_batches
from saf.spark.work import Policy, Receipt, Work

LEASE_SECONDS = 30.0


def connect(dsn: Dsn) -> psycopg.Connection[Any]:
    return dsn.connect(role="test", autocommit=True)


def policy(quality: str = "exactly_once", chunk_rows: int = 1000, **destinations: Dsn) -> Policy:
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
        self.default = next(iter(rules.destinations), None)
        self.work: list[Work] = []

    def open(self, parts: int = 1) -> list[Work]:
        self.broker.tend()
        self.work = [part for w in self.broker.open_work(self.default) for part in w.split(parts)]
        return self.work

    def deliver(self) -> list[Receipt]:
        receipts = []
        for number, work in enumerate(self.work):
            rows = record_batches(work, self.rules.max_bytes)
            receipts += Delivery(number, work, self.rules).run(rows)
        return receipts

    def close(self, receipts: list[Receipt]) -> None:
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


def forward(app: Dsn, **destinations: Dsn) -> list[Receipt]:
    """A whole run of a forwarder, with a process of its own as it were."""
    with Cycle(app, policy("exactly_once", 1000, **destinations)) as cycle:
        return cycle.run()


def send(connection: psycopg.Connection[Any], body: str, key: str | None = None) -> None:
    """A correct send from any language."""
    connection.execute(
        "INSERT INTO saf.outbox (to_service, key, body) VALUES ('billing', %s, %s)",
        (key, body.encode()),
    )


def let_time_pass(app: Dsn) -> None:
    """The next attempts of all that waits are due."""
    with connect(app) as connection:
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now() - interval '1 ms'")


def bodies(mom: Dsn) -> list[str]:
    """What is in the inbox, in order of arrival."""
    with connect(mom) as connection:
        rows = connection.execute("SELECT body FROM saf.inbox ORDER BY id").fetchall()
    return [bytes(body).decode() for (body,) in rows]


def new_member(connection: psycopg.Connection[Any], **options: Any) -> Member:
    """A member of the forwarder's subscription, joined."""
    row = connection.execute(
        "SELECT subscription_id FROM saf.subscription WHERE name = 'forwarder'"
    ).fetchone()
    assert row is not None
    member = Member(subscription_id=row[0], **{"lease_seconds": LEASE_SECONDS, **options})
    member.join(connection)
    return member
