"""A forecast: what a run of the forwarder would do now, without doing it.

Pending messages are read as in `saf.log.backlog`, and routed as the next batch would be. Nothing is
sent, written or remembered, and no destination is queried. So a forecast does not know whether a
destination answers, which service a router will name, or that a message will be rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from saf.broker.health import refuse
from saf.log.backlog import Addressed, backlogs
from saf.routing.matching import Routes
from saf.routing.routes import Declared, current_routes, describe
from saf.setaside.lane import Kind
from saf.setaside.waiting import Parked, Waiting, parked

LANES = 1000
"""Maximum number of lanes of parked messages to read."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """Where messages for one address go, and why."""

    destinations: tuple[str, ...]
    how: str
    """In words: the route, or the reason why they wait."""
    routes: tuple[str, ...] = ()
    """The routes in words."""
    to_all: bool = False
    """True if each destination gets each message."""


@dataclass(frozen=True, kw_only=True)
class Going:
    """Some pending messages, and where they would go."""

    service: str
    to_broker: str | None
    messages: int
    oldest: datetime | None
    way: Way

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "service": self.service,
            "to_broker": self.to_broker,
            "messages": self.messages,
            "oldest": self.oldest and self.oldest.isoformat(),
            "destinations": list(self.way.destinations),
            "to_all": self.way.to_all,
            "routes": list(self.way.routes),
            "how": self.way.how,
        }


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run would do at one source."""

    going: tuple[Going, ...]
    exact: bool
    """True if the numbers of messages are counted, False if they are estimates."""
    waiting: Waiting
    """The parked messages: lanes that are due are tried first."""

    @property
    def lanes(self) -> Sequence[Parked]:
        """The lanes of the forwarder."""
        return self.waiting.shown

    def by_route(self) -> dict[str, int]:
        """Return the number of messages per route; routes that share messages all count them."""
        counts: Counter[str] = Counter()
        for group in self.going:
            for route in group.way.routes:
                counts[route] += group.messages
        return dict(counts)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "pending": sum(group.messages for group in self.going),
            "exact": self.exact,
            "going": [group.as_dict() for group in self.going],
            "by_route": self.by_route(),
            "lanes": [lane.as_dict() for lane in self.lanes],
            "lanes_waiting": self.waiting.lanes,
        }


def way(routes: Routes, address: Addressed) -> Way:
    """Return where messages for an address go, by some routes.

    >>> from saf.routing.matching import Route
    >>> there = Routes(routes=(Route(service="billing", destination="erp"),))
    >>> way(there, ("billing", None)).destinations, way(there, ("shipping", None)).how
    (('erp',), 'no route: they would wait until one exists')
    """
    service, broker = address[0], None if address[1] is None else str(address[1])
    if any(router.service == service for router in routes.routers):
        return Way(destinations=(), how="a router: its classifier returns the service of each")
    match = routes.match(service, broker)
    if match is None:
        return Way(destinations=(), how="no route: they would wait until one exists")
    named = tuple(
        "the default destination" if route.fallback else describe(route) for route in match.routes
    )
    how = f"by {named[0]}"
    if match.to_all:
        how = f"a topic: each to {len(match.routes)} destinations"
    elif match.shared:
        how = f"shared by {len(match.routes)} routes: each message takes one"
    return Way(destinations=match.destinations, how=how, routes=named, to_all=match.to_all)


def forecast(
    connection: psycopg.Connection[Any], default_destination: str | None, declared: Declared
) -> Forecast:
    """Return what a run would do at a source. Reads only.

    Raises:
        Restored: the source's cursors do not show which messages are pending.
    """
    refuse(connection)
    routes = current_routes(connection, default_destination, declared)
    (backlog,) = (
        item
        for item in backlogs(connection)
        if (item.log, item.subscription) == ("outbox", "forwarder")
    )
    waiting = parked(connection, LANES, "forwarder")
    held = {lane.destination: lane.messages for lane in waiting.shown if lane.kind == Kind.MAIN}
    going = []
    for address, part in backlog.by_address.items():
        target = way(routes, address)
        behind = [name for name in target.destinations if held.get(name)]
        if behind:
            how = "; ".join(
                f"{target.how}, behind {held[name]:,} parked for {name}" for name in behind
            )
            target = Way(
                destinations=target.destinations,
                how=how,
                routes=target.routes,
                to_all=target.to_all,
            )
        going.append(
            Going(
                service=address[0],
                to_broker=None if address[1] is None else str(address[1]),
                messages=round(part.messages),
                oldest=part.oldest,
                way=target,
            )
        )
    going.sort(key=lambda item: (-item.messages, item.service, item.to_broker or ""))
    return Forecast(going=tuple(going), exact=backlog.exact, waiting=waiting)
