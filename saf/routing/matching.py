"""Matching: where the routes lead a message. Pure; `saf.routing.routes` keeps the routes.

A *route* leads from a service, and optionally a broker, to a destination. Of those that match a
message, the most specific count: service and broker, then service, then broker, then the wildcard.
A message's *match* is what they come to:

    one route          the most specific match
    routes that share  several that are equally specific: each message goes by one of them
    a topic            all that match, whatever their specificity; each destination once, by its
                       most specific route

Routes that share take messages without a key in turn, by their ids, and those with a key by a
choice that the key keeps (`saf.routing.route_choices`). The default destination is not a route: it
is where a message goes that none matches.

*A message that is addressed to a broker goes to that broker, or waits.* Which destination is which
broker is frozen with the routes, as far as it is known (`saf.destinations.identities`). Where one
is known to be the broker, the message goes there: by the most specific match that leads there, or
without any. Where none is, only matches count that lead to destinations of which it is not known
who they are; a destination refuses what is for another broker.

A *router* is a service that stands for others. Its classifier looks at each message and names the
one that it is really for, and that one's match is the message's. So it is for those that redirect,
which are all that is frozen with a batch; to one that forwards, messages go as to any service.
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

SQL, ARROW, PYTHON = "sql", "arrow", "python"
MESSAGE, KEY = "message", "key"
REDIRECT, FORWARD = "redirect", "forward"


@dataclass(frozen=True, kw_only=True)
class Route:
    """Service and broker to destination; ``service`` and ``broker`` (a uuid's text) None match any.

    What of a row of `saf.route` is frozen with a batch.
    """

    service: str | None = None
    broker: str | None = None
    destination: str
    quality: str | None = None
    """None: the destination's default."""
    fallback: bool = False
    """It is the default destination, which counts where nothing else matches."""

    @property
    def specificity(self) -> int:
        """Higher wins.

        >>> Route(service="s", destination="d").specificity > Route(destination="d").specificity
        True
        """
        return 2 * (self.service is not None) + (self.broker is not None) - self.fallback

    def matches(self, service: str, broker: str | None) -> bool:
        """Whether a message for ``service`` (and ``broker``, if it names one) may take it."""
        return self.service in (None, service) and self.broker in (None, broker)


@dataclass(frozen=True, kw_only=True)
class Match:
    """Where messages go: by one route, by one of several that share, or, a topic, by all."""

    routes: tuple[Route, ...]
    to_all: bool = False

    @property
    def shared(self) -> bool:
        """Each message goes by one of several routes."""
        return len(self.routes) > 1 and not self.to_all

    @property
    def destinations(self) -> tuple[str, ...]:
        """Where it leads, in the order of the routes."""
        return tuple(route.destination for route in self.routes)


@dataclass(frozen=True, kw_only=True)
class Router:
    """A service that stands for others; what of a row of `saf.router` is frozen with a batch."""

    service: str
    kind: str
    expression: str
    """Its classifier: Spark SQL, or ``module:function``."""
    once_per: str = MESSAGE
    """Each message is classified, or the first of each key; of a conversation always the first."""
    problem: str | None = None
    """Why nobody can classify by it, so that its messages wait."""


def by_precedence(routes: Iterable[Route]) -> list[Route]:
    """The routes, the most specific first."""
    return sorted(
        routes,
        key=lambda r: (-r.specificity, r.service or "", r.broker or "", r.destination),
    )


Named = tuple[str | None, str | None]
"""The service and the broker that a route names, or does not."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """All that is in force at one time: what is frozen with a batch."""

    routes: tuple[Route, ...] = ()
    """The most specific first."""
    topics: frozenset[str] = frozenset()
    routers: tuple[Router, ...] = ()
    brokers: Mapping[str, str] = field(default_factory=dict)
    """By destination: the broker that it is known to be, as a uuid's text."""

    @cached_property
    def matches(self) -> Mapping[Named, Match]:
        """Of messages for any broker: by what routes name, of which the most specific is the match.

        No larger than the routes are many, but for the topics.
        """
        return self._compiled(route for route in self.routes if route.broker is None)

    @cached_property
    def matches_of_known(self) -> Mapping[Named, Match]:
        """Of messages for brokers that destinations are known to be; by service, and without."""
        matches: dict[Named, Match] = {}
        for broker in sorted(set(self.brokers.values())):
            there = [name for name in sorted(self.brokers) if self.brokers[name] == broker]
            leading = [r for r in self.routes if r.destination in there]
            mine = self._compiled(r for r in leading if r.broker in (None, broker))
            by_itself = Match(routes=(Route(broker=broker, destination=there[0]),))
            for service in {service for service, _ in mine} | {None}:
                named = [one for one in precedence(service, broker) if one in mine]
                matches[service, broker] = mine[named[0]] if named else by_itself
        return matches

    @cached_property
    def matches_of_unknown(self) -> Mapping[Named, Match]:
        """Of messages for any other broker, as `matches`; but none leads to several destinations.

        At most one of them is the broker, and the others would refuse their copies.
        """
        routes = [route for route in self.routes if route.destination not in self.brokers]
        matches = self._compiled(routes)
        return {named: match for named, match in matches.items() if not match.to_all}

    def match(self, service: str, broker: str | None) -> Match | None:
        """The match of a message, or None if there is none.

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

        Of one for a broker:

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
        """The destinations that routes would lead a message to, if they were not other brokers."""
        there = [route.destination for route in self.routes if route.matches(service, broker)]
        known = {name: self.brokers[name] for name in there if name in self.brokers}
        return {name: one for name, one in known.items() if broker not in (None, one)}

    def _compiled(self, routes: Iterable[Route]) -> dict[Named, Match]:
        """By what routes name, of the most specific first."""
        groups: dict[Named, list[Route]] = defaultdict(list)
        for route in routes:
            named = (route.service, route.broker)
            if not (route.fallback and groups.get(named)):
                groups[named].append(route)
        matches = {named: Match(routes=tuple(group)) for named, group in groups.items()}
        for topic in self.topics:
            for broker in {broker for _, broker in groups} | {None}:
                each: dict[str, Route] = {}
                for named in precedence(topic, broker):
                    for route in groups.get(named, ()):
                        if not (route.fallback and each):
                            each.setdefault(route.destination, route)
                if each:
                    matches[topic, broker] = Match(
                        routes=tuple(each.values()), to_all=len(each) > 1
                    )
        return matches


def precedence(service: str | None, broker: str | None) -> tuple[Named, ...]:
    """What a route for a message may name, the most specific first."""
    return (service, broker), (service, None), (None, broker), (None, None)


def distinct_matches(routes: Routes) -> list[Match]:
    """All matches of some routes, each once; for those that share, also each route alone."""
    matches: dict[Match, None] = {}
    compiled = (routes.matches, routes.matches_of_known, routes.matches_of_unknown)
    for match in chain.from_iterable(some.values() for some in compiled):
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
