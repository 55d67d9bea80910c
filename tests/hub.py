"""A routing service for tests: a shop, a hub that routes, and two airports, in four databases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.receiving.retries import Policy
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from saf.routing_service import RoutingService
from tests.dialogs import SHOP, know_contract
from tests.pipeline import connect, drain
from tests.routing import without_default

DEPARTURES = "departures"
HAS_SENT = "SELECT EXISTS (SELECT FROM saf.outbox)"
BY_TEXT = "tests.classifiers:by_body_once"
CLASSIFY = """
CREATE OR REPLACE FUNCTION public.classify(body bytea) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    origin text := convert_from(body, 'UTF8');
BEGIN
    IF origin = 'fail' THEN
        RAISE EXCEPTION 'told to fail';
    END IF;
    RETURN nullif(origin, 'nobody');
END $$;
"""
"""Like `tests.classifiers.by_text`, in the database."""
QUICKLY = Policy(max_attempts=1000, first_wait_seconds=0.01, longest_wait_seconds=0.05)


@dataclass(frozen=True, kw_only=True)
class Hub:
    """What is said in the shop goes to the hub, and from there to the airport that it is for."""

    app: Dsn
    hub: Dsn
    ewr: Dsn
    jfk: Dsn

    @classmethod
    def at(cls, new_broker: Callable[[str], Dsn], mode: str = "forward") -> Hub:
        """Prepared: each service where it lives, a contract, routes, and the router."""
        made = cls(**{name: new_broker(name) for name in ("app", "hub", "ewr", "jfk")})
        for dsn, service in (
            (made.app, SHOP), (made.hub, DEPARTURES), (made.ewr, "EWR"), (made.jfk, "JFK"),
        ):  # fmt: skip
            with connect(dsn) as connection:
                create_service(connection, service)
                know_contract(connection)
        with connect(made.hub) as connection:
            for destination, service in (("ewr", "EWR"), ("jfk", "JFK"), ("shop", SHOP)):
                add_route(connection, destination, service=service)
            add_router(connection, DEPARTURES, "python", BY_TEXT, mode=mode)
        for dsn in (made.app, made.ewr, made.jfk):
            with connect(dsn) as connection:
                add_route(connection, "hub")
        return made

    @property
    def places(self) -> dict[str, Dsn]:
        return {"shop": self.app, "hub": self.hub, "ewr": self.ewr, "jfk": self.jfk}

    def service(self, **options: Any) -> RoutingService:
        return RoutingService(self.hub, DEPARTURES, **{"policy": QUICKLY, **options})

    def forward(self, *names: str) -> None:
        """What is pending at these, or anywhere, goes one step further."""
        for name in names or self.places:
            with connect(self.places[name]) as connection:
                if fetch(connection, HAS_SENT) != [(True,)]:
                    continue
            with without_default(self.places[name], 100, **self.places) as cycle:
                drain(cycle)

    def carry(self) -> int:
        """What is said at one side reaches the other one; return how many messages were handled."""
        self.forward()
        handled = self.service().drain()
        self.forward()
        return handled


def classify_in_database(connection: psycopg.Connection[Any], sql: str = CLASSIFY) -> None:
    """Let the router of a hub call public.classify, created by this SQL."""
    connection.execute(sql.encode())
    add_router(connection, DEPARTURES, "function", "public.classify", mode="forward")


def replica(hub: Dsn) -> None:
    """For tests.processes: send on what there is, a little at a time."""
    RoutingService(hub, DEPARTURES, max_messages=7, policy=QUICKLY).drain()
