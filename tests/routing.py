"""A forwarder that goes by routes alone, and what is sent through it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg

from saf.database import Dsn, fetch
from saf.engine.work import Receipt
from tests import expiring
from tests.pipeline import Cycle, connect, forwarding_rules


def send(connection: psycopg.Connection[Any], *texts: str, service: str = "s", **more: Any) -> None:
    with connection.transaction():
        for text in texts:
            expiring.send(connection, service, text.encode(), **more)


def run(app: Dsn, chunk_rows: int = 100, **where: Dsn) -> list[Receipt]:
    """A cycle of a forwarder without a default destination, in which nothing goes wrong."""
    with without_default(app, chunk_rows, **where) as cycle:
        receipts = cycle.run()
    assert [one.error for one in receipts if one.error] == []
    return receipts


def without_default(app: Dsn, chunk_rows: int = 100, **where: Dsn) -> Cycle:
    cycle = Cycle(app, forwarding_rules("exactly_once", chunk_rows, **where))
    cycle.default = None
    return cycle


def broker_id(dsn: Dsn) -> UUID:
    with connect(dsn) as connection:
        ((known,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
    return UUID(str(known))
