"""Routes: which destination a message goes to, and with which quality of service.

The most specific route wins: service and broker, then service, then broker, then the wildcard.
The set of routes is frozen with each batch (`freeze`): a batch read again is routed again in the
same way, whatever has changed meanwhile. What no route matches is parked until one does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
from psycopg.rows import class_row

from saf.database import fetch
from saf.errors import ConfigurationError

AT_MOST_ONCE = "at_most_once"
AT_LEAST_ONCE = "at_least_once"
EXACTLY_ONCE = "exactly_once"


@dataclass(frozen=True, kw_only=True)
class Route:
    """One row of `saf.route`. ``service`` and ``broker`` (a uuid's text) None match any."""

    service: str | None = None
    broker: str | None = None
    destination: str
    quality: str | None = None
    """None: the destination's default."""

    @property
    def specificity(self) -> int:
        """Higher wins.

        >>> Route(service="s", destination="d").specificity > Route(destination="d").specificity
        True
        """
        return 2 * (self.service is not None) + (self.broker is not None)

    def matches(self, service: str, broker: str | None) -> bool:
        """Whether a message for ``service`` (and ``broker``, if it names one) may go this way."""
        return self.service in (None, service) and self.broker in (None, broker)


def by_precedence(routes: Iterable[Route]) -> list[Route]:
    """The routes in the order in which they are tried: the first that matches wins."""
    return sorted(
        routes,
        key=lambda r: (-r.specificity, r.service or "", r.broker or "", r.destination),
    )


def choose_route(routes: Iterable[Route], service: str, broker: str | None) -> Route | None:
    """The route that a message takes, or None if there is none.

    >>> any_, billing = Route(destination="mom"), Route(service="billing", destination="erp")
    >>> choose_route([any_, billing], "billing", None).destination
    'erp'
    >>> choose_route([billing], "shipping", None) is None
    True
    """
    return next((r for r in by_precedence(routes) if r.matches(service, broker)), None)


CURRENT = """
SELECT service, broker::text AS broker, destination, quality FROM saf.route WHERE enabled
"""

LATEST = "SELECT version, routes FROM saf.route_version ORDER BY version DESC LIMIT 1"
FREEZE = "INSERT INTO saf.route_version (routes) VALUES (%(routes)s) RETURNING version"
FROZEN = "SELECT routes FROM saf.route_version WHERE version = %(version)s"


def current_routes(
    connection: psycopg.Connection[Any], default_destination: str | None
) -> list[Route]:
    """The routes as they are now, in order of precedence.

    ``default_destination`` is the wildcard's where `saf.route` has none.
    """
    with psycopg.Cursor(connection, row_factory=class_row(Route)) as cursor:
        routes = cursor.execute(CURRENT).fetchall()
    if default_destination and not any(route.specificity == 0 for route in routes):
        routes.append(Route(destination=default_destination))
    return by_precedence(routes)


def freeze(connection: psycopg.Connection[Any], routes: Sequence[Route]) -> int:
    """The number of a version with these routes; a new one is written only if they changed."""
    frozen = [asdict(route) for route in routes]
    latest = fetch(connection, LATEST)
    if latest and latest[0][1] == frozen:
        return int(latest[0][0])
    ((version,),) = fetch(connection, FREEZE, {"routes": json.dumps(frozen)})
    return int(version)


def frozen_routes(connection: psycopg.Connection[Any], version: int) -> tuple[Route, ...]:
    """The routes of a version, in order of precedence."""
    found = fetch(connection, FROZEN, {"version": version})
    if not found:
        raise ConfigurationError(f"saf.route_version has no version {version}, which a batch needs")
    return tuple(Route(**route) for route in found[0][0])
