"""Matching: which routes apply to a message. Pure; `saf.routing.routes` stores the routes.

A *route* leads from a service, and optionally a broker, to a destination. Of the routes that match
a message, only the most specific count: routes that name service and broker, then the service, then
the broker, then neither. A message's *match* is the result:

    one route          the most specific match
    routes that share  several that are equally specific: each message goes by one of them
    a topic            all routes that match, however specific; each destination once, by its most
                       specific route

Messages without a key take shared routes in turn, by their ids. Messages with a key take the route
that the key has chosen (`saf.routing.route_choices`). The default destination is not a route: a
message goes there if no route matches.

*A message that is addressed to a broker goes to that broker, or waits.* The routes are frozen with
the known identities of destinations (`saf.destinations.identities`). If a destination is known to
be the broker, the message goes there, by the most specific match that leads there, or without any.
If no destination is known to be the broker, only routes to destinations of unknown identity count;
a destination rejects messages for another broker.

A *router* is a service that stands for others. Its classifier reads each message and names its
actual service, and the message takes that service's match. This module covers routers that
redirect; only these are frozen with a batch. Messages for a router that forwards are routed like
messages for any service.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from saf.errors import UsageError
from saf.message import MAX_NAME, fits

AT_MOST_ONCE = "at_most_once"
AT_LEAST_ONCE = "at_least_once"
EXACTLY_ONCE = "exactly_once"

SQL, ARROW, PYTHON, FUNCTION = "sql", "arrow", "python", "function"
MESSAGE, KEY = "message", "key"
REDIRECT, FORWARD = "redirect", "forward"


@dataclass(frozen=True, kw_only=True)
class Route:
    """A route from service and broker to destination; a service or broker of None matches any.

    A row of `saf.route`, as it is frozen with a batch. ``broker`` is a uuid's text.
    """

    service: str | None = None
    broker: str | None = None
    destination: str
    quality: str | None = None
    """Quality of service; None: the destination's default."""
    fallback: bool = False
    """True for the default destination, which counts only where nothing else matches."""

    @property
    def specificity(self) -> int:
        """Rank of the route; the highest wins.

        >>> Route(service="s", destination="d").specificity > Route(destination="d").specificity
        True
        """
        return 2 * (self.service is not None) + (self.broker is not None) - self.fallback

    def matches(self, service: str, broker: str | None) -> bool:
        """Return whether a message for ``service`` (and ``broker``, if set) may take this route."""
        return self.service in (None, service) and self.broker in (None, broker)


@dataclass(frozen=True, kw_only=True)
class Match:
    """Routes of a message: one route, several that share, or all of a topic's."""

    routes: tuple[Route, ...]
    to_all: bool = False

    @property
    def shared(self) -> bool:
        """True if each message takes one of several routes."""
        return len(self.routes) > 1 and not self.to_all

    @property
    def destinations(self) -> tuple[str, ...]:
        """Destinations, in the order of the routes."""
        return tuple(route.destination for route in self.routes)


@dataclass(frozen=True, kw_only=True)
class Router:
    """A service that stands for others: a row of `saf.router`, as it is frozen with a batch."""

    service: str
    kind: str
    expression: str
    """The classifier: Spark SQL, ``module:function``, or a database's ``schema.function``."""
    once_per: str = MESSAGE
    """Unit that is classified: each message, or a key's first. A conversation always once."""
    problem: str | None = None
    """Reason why the classifier cannot be used, so that the router's messages wait."""


def by_precedence(routes: Iterable[Route]) -> list[Route]:
    """Sort routes, the most specific first."""
    return sorted(
        routes,
        key=lambda r: (-r.specificity, r.service or "", r.broker or "", r.destination),
    )


Named = tuple[str | None, str | None]
"""Service and broker that a route names; None where it names none."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """All routes, topics and routers in force at one time, as they are frozen with a batch."""

    routes: tuple[Route, ...] = ()
    """Routes, the most specific first."""
    topics: frozenset[str] = frozenset()
    routers: tuple[Router, ...] = ()
    brokers: Mapping[str, str] = field(default_factory=dict)
    """Broker that each destination is known to be, as a uuid's text."""

    @property
    def in_sql(self) -> tuple[Router, ...]:
        """Routers whose classifiers are SQL expressions."""
        return tuple(router for router in self.routers if router.kind == SQL)

    @cached_property
    def matches(self) -> Mapping[Named, Match]:
        """Matches for messages to any broker, by service and broker that routes name.

        Except for topics, there are at most as many entries as routes.
        """
        return self._compiled(route for route in self.routes if route.broker is None)

    @cached_property
    def matches_of_known(self) -> Mapping[Named, Match]:
        """Matches for messages to brokers that destinations are known to be: by service, or any."""
        matches: dict[Named, Match] = {}
        for broker in sorted(set(self.brokers.values())):
            names = [name for name in sorted(self.brokers) if self.brokers[name] == broker]
            leading = [r for r in self.routes if r.destination in names]
            compiled = self._compiled(r for r in leading if r.broker in (None, broker))
            by_itself = Match(routes=(Route(broker=broker, destination=names[0]),))
            for service in {service for service, _ in compiled} | {None}:
                named = [pair for pair in precedence(service, broker) if pair in compiled]
                matches[service, broker] = compiled[named[0]] if named else by_itself
        return matches

    @cached_property
    def matches_of_unknown(self) -> Mapping[Named, Match]:
        """Matches for messages to any other broker: like `matches`, without topics that fan out.

        At most one of several destinations is the broker, and the others would reject their copies.
        """
        routes = [route for route in self.routes if route.destination not in self.brokers]
        matches = self._compiled(routes)
        return {named: match for named, match in matches.items() if not match.to_all}

    def match(self, service: str, broker: str | None) -> Match | None:
        """Return the match of a message; None if no route matches.

        >>> mom, erp, crm = (Route(destination=name) for name in ("mom", "erp", "crm"))
        >>> billing = Route(service="billing", destination="erp")
        >>> Routes(routes=(billing, mom)).match("billing", None).destinations
        ('erp',)
        >>> Routes(routes=(erp, mom)).match("shipping", None).shared
        True
        >>> Routes(routes=(billing, crm), topics=frozenset({"billing"})).match("billing", None)
        Match(routes=(...'erp'...'crm'...), to_all=True)
        >>> Routes(routes=(billing,)).match("shipping", None) is None
        True

        The match of a message that is addressed to a broker:

        >>> known = Routes(routes=(billing,), brokers={"erp": "E", "shop": "S"})
        >>> [known.match("billing", broker).destinations for broker in ("E", "S")]
        [('erp',), ('shop',)]
        >>> known.match("billing", "another") is None
        True
        """
        matches, wanted = self.matches, precedence(service, None)
        if broker is not None and (None, broker) in self.matches_of_known:
            matches, wanted = self.matches_of_known, ((service, broker), (None, broker))
        elif broker is not None:
            matches, wanted = self.matches_of_unknown, precedence(service, broker)
        return next((matches[named] for named in wanted if named in matches), None)

    def elsewhere(self, service: str, broker: str | None) -> Mapping[str, str]:
        """Return the destinations of matching routes that are known to be other brokers."""
        names = [route.destination for route in self.routes if route.matches(service, broker)]
        known = {name: self.brokers[name] for name in names if name in self.brokers}
        return {
            name: broker_id for name, broker_id in known.items() if broker not in (None, broker_id)
        }

    def _compiled(self, routes: Iterable[Route]) -> dict[Named, Match]:
        """Return the match for each service and broker that some routes name."""
        groups: dict[Named, list[Route]] = defaultdict(list)
        for route in routes:
            named = (route.service, route.broker)
            if not (route.fallback and groups.get(named)):
                groups[named].append(route)
        matches = {named: Match(routes=tuple(group)) for named, group in groups.items()}
        for topic in self.topics:
            for broker in {broker for _, broker in groups} | {None}:
                by_destination: dict[str, Route] = {}
                for named in precedence(topic, broker):
                    for route in groups.get(named, ()):
                        if not (route.fallback and by_destination):
                            by_destination.setdefault(route.destination, route)
                if by_destination:
                    matches[topic, broker] = Match(
                        routes=tuple(by_destination.values()), to_all=len(by_destination) > 1
                    )
        return matches


def precedence(service: str | None, broker: str | None) -> tuple[Named, ...]:
    """Return what a route for a message can name, the most specific first."""
    return (service, broker), (service, None), (None, broker), (None, None)


def distinct_matches(routes: Routes) -> list[Match]:
    """Return all different matches of some routes; for routes that share, also each route alone."""
    matches: dict[Match, None] = {}
    compiled = (routes.matches, routes.matches_of_known, routes.matches_of_unknown)
    for match in chain.from_iterable(group.values() for group in compiled):
        matches[match] = None
        if match.shared:
            matches.update({Match(routes=(route,)): None for route in match.routes})
    return list(matches)


def check_name(what: str, name: str) -> None:
    """Raise UsageError for a name that no message could have."""
    if not isinstance(name, str) or not name or not fits(name, MAX_NAME) or not name.isprintable():
        raise UsageError(
            f"{what} {name!r}: a name has 1 to {MAX_NAME} bytes of printable characters"
        )
