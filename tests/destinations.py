"""Destinations for tests of what a forwarder does when one of several is down, or loses answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from saf import Unavailable
from saf.database import Dsn, fetch
from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.postgresql.inbox import PostgresInbox
from tests import expiring
from tests.pipeline import Cycle, connect, forwarding_rules

NOWHERE = Dsn("host=/nonexistent dbname=mom")


Broker = Callable[[str], Dsn]


class AnswerLost(PostgresInbox):
    """Stores, and then does not say so."""

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        stored = super().store(chunk, exactly_once=exactly_once)
        if self.name == "other":
            raise Unavailable("destination 'other'", "the answer got lost")
        return stored


def route(connection: psycopg.Connection[Any], service: str, destination: str) -> None:
    connection.execute(
        "INSERT INTO saf.route (service, destination) VALUES (%s, %s)", [service, destination]
    )


def send_to(connection: psycopg.Connection[Any], service: str, body: str, **more: Any) -> None:
    with connection.transaction():
        expiring.send(connection, service, body.encode(), **{"key": "k", **more})


def count(dsn: Dsn, table: str) -> int:
    with connect(dsn) as connection:
        row = connection.execute(f"SELECT count(*) FROM saf.{table}").fetchone()
    assert row is not None
    return int(row[0])


def run(app: Dsn, **destinations: Dsn) -> list[str | None]:
    """A whole run in chunks of a few messages; the kinds of errors it met."""
    with Cycle(app, forwarding_rules("exactly_once", 3, **destinations)) as cycle:
        return [r.error_kind for r in cycle.run() if r.error_kind]


def subscription(source: psycopg.Connection[Any]) -> int:
    """The forwarder's subscription_id."""
    ((number,),) = fetch(
        source,
        "SELECT subscription_id FROM saf.subscription WHERE log = 'outbox' AND name = 'forwarder'",
    )
    return int(number)


def know(mom: Dsn, *services: str) -> None:
    with connect(mom) as connection:
        for service in services:
            connection.execute("INSERT INTO saf.service VALUES (%s)", [service])
