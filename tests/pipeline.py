"""What tests say to a broker, beside the forwarder's cycle without Spark of `saf.testing.cycle`.

What Spark adds (processes, Arrow through the JVM) is tested in tests/spark and tests/crash; the
promises of delivery are tested here in milliseconds.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg

from saf.database import Dsn
from saf.destinations.postgresql import Postgresql
from saf.destinations.settings import DestinationSettings
from saf.engine.work import Receipt
from saf.log.shards import Member
from saf.testing import clock
from saf.testing.cycle import LEASE_SECONDS, Cycle, forwarding_rules

__all__ = ["Cycle", "forwarding_rules"]

IDLE_CYCLES = 50


def stores(**dsns: Dsn) -> dict[str, DestinationSettings]:
    """Inboxes as destinations."""
    return {name: Postgresql(dsn=dsn) for name, dsn in dsns.items()}


def connect(dsn: Dsn) -> psycopg.Connection[Any]:
    return dsn.connect(role="test", autocommit=True)


def forward(
    app: Dsn,
    quality: str = "exactly_once",
    chunk_rows: int = 1000,
    **destinations: Dsn | DestinationSettings,
) -> list[Receipt]:
    """One cycle of a forwarder, as if in a process of its own; its errors are in the receipts."""
    with Cycle(app, forwarding_rules(quality, chunk_rows, **destinations)) as cycle:
        return cycle.run()


def drain(cycle: Cycle) -> list[Receipt]:
    """Cycles until nothing is left; a forwarder that gets nowhere is not waited for."""
    said: list[Receipt] = []
    idle = 0
    while receipts := cycle.run():
        said += receipts
        idle = 0 if any(one.messages or one.dropped for one in receipts) else idle + 1
        assert idle < IDLE_CYCLES, f"it goes round in circles: {receipts}"
    return said


def run(app: Dsn, *, chunk_rows: int = 1000, **destinations: Dsn) -> list[Receipt]:
    """A run of a forwarder to its end, which meets no error."""
    with Cycle(app, forwarding_rules("exactly_once", chunk_rows, **destinations)) as cycle:
        receipts = drain(cycle)
    assert not [receipt.error for receipt in receipts if receipt.error]
    return receipts


def send(connection: psycopg.Connection[Any], body: str, key: str | None = None) -> None:
    """A correct send from any language."""
    connection.execute(
        "INSERT INTO saf.outbox (to_service, key, body) VALUES ('billing', %s, %s)",
        (key, body.encode()),
    )


def let_time_pass(app: Dsn) -> None:
    """The next attempts of all that waits are due."""
    clock.let_time_pass(app, timedelta(hours=2))


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


def outlive_lease(app: Dsn) -> None:
    """What the clock does to a member that hangs: its lease is over, its session still there."""
    with connect(app) as connection:
        connection.execute("UPDATE saf.member SET lease_until = now() - interval '1 second'")
