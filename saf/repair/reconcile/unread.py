"""Messages that may be at destinations that cannot be read back; they do not count as lost.

Where a message went is not recorded. So a message that no other destination has counts as not
compared, instead of lost, in two cases:

- some routes, current or frozen ones that are kept, lead it to a destination that cannot be read
  back;
- it is for a router, whose answer is not kept for each message.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from saf.destinations.reading import Entry
from saf.repair.reconcile.copies import RoutesOf
from saf.routing.matching import Routes
from saf.routing.routes import versions


@dataclass(frozen=True, kw_only=True)
class Unread:
    """Destinations that cannot be read back, and all routes that could have led there."""

    destinations: frozenset[str]
    routes: Sequence[Routes] = ()

    def may_have(self, sent: Entry) -> bool:
        """Whether any of the destinations may have a message of the source."""
        return bool(self.destinations) and any(
            self._led(routes, sent.service, sent.broker) for routes in self.routes
        )

    def _led(self, routes: Routes, service: str, broker: UUID | None) -> bool:
        if any(router.service == service for router in routes.routers):
            return True
        match = routes.match(service, str(broker) if broker else None)
        return match is not None and not self.destinations.isdisjoint(match.destinations)


def unread_of(
    source: psycopg.Connection[Any], destinations: Collection[str], routes: RoutesOf
) -> Unread:
    """Return destinations that cannot be read back, with all routes that the source has."""
    if not destinations:
        return Unread(destinations=frozenset())
    frozen = [version.routes for version in versions(source)]
    return Unread(destinations=frozenset(destinations), routes=[routes(source), *frozen])
