"""Ways: where the routes lead a message. Pure; `saf.routes` keeps the routes.

A *route* leads from a service, and optionally a broker, to a destination. Of those that match a
message, the most specific count: service and broker, then service, then broker, then the wildcard.
A message's *way* is what they come to:

    one route          the most specific match
    routes that share  several that are equally specific: each message goes by one of them
    a topic            all that match, whatever their specificity; each destination once, by its
                       most specific route

Routes that share take messages without a key in turn, by their ids, and those with a key by a
choice that the key keeps (`saf.choices`). The default destination is not a route: it is where a
message goes that none matches.

A *router* is a service that stands for others. Its classifier looks at each message and names the
one that it is really for, and that one's way is the message's. That is so for those that redirect,
which are all that is frozen with a batch; to one that forwards, messages go as to any service.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

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
        """Whether a message for ``service`` (and ``broker``, if it names one) may go this way."""
        return self.service in (None, service) and self.broker in (None, broker)


@dataclass(frozen=True, kw_only=True)
class Way:
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

    @cached_property
    def ways(self) -> Mapping[Named, Way]:
        """By what routes name; of what a message names, the most specific that is here is its way.

        No larger than the routes are many, but for topics: one for each broker that any route
        names.
        """
        groups: dict[Named, list[Route]] = defaultdict(list)
        for route in self.routes:
            named = (route.service, route.broker)
            if not (route.fallback and groups.get(named)):
                groups[named].append(route)
        ways = {named: Way(routes=tuple(group)) for named, group in groups.items()}
        for topic in self.topics:
            for broker in {route.broker for route in self.routes} | {None}:
                each: dict[str, Route] = {}
                for named in precedence(topic, broker):
                    for route in groups.get(named, ()):
                        if not (route.fallback and each):
                            each.setdefault(route.destination, route)
                if each:
                    ways[topic, broker] = Way(routes=tuple(each.values()), to_all=len(each) > 1)
        return ways

    def way(self, service: str, broker: str | None) -> Way | None:
        """The way of a message, or None if there is none.

        >>> mom, erp, crm = (Route(destination=name) for name in ("mom", "erp", "crm"))
        >>> billing = Route(service="billing", destination="erp")
        >>> Routes(routes=(billing, mom)).way("billing", None).destinations
        ('erp',)
        >>> Routes(routes=(erp, mom)).way("shipping", None).shared
        True
        >>> Routes(routes=(billing, crm), topics=frozenset({"billing"})).way("billing", None)
        Way(routes=(...'erp'...'crm'...), to_all=True)
        >>> Routes(routes=(billing,)).way("shipping", None) is None
        True
        """
        return next(
            (self.ways[named] for named in precedence(service, broker) if named in self.ways), None
        )


def precedence(service: str, broker: str | None) -> tuple[Named, ...]:
    """What a route for a message may name, the most specific first."""
    return (service, broker), (service, None), (None, broker), (None, None)


def distinct_ways(routes: Routes) -> list[Way]:
    """All ways of some routes, each once, and for those that share, each of their routes alone."""
    ways: dict[Way, None] = {}
    for way in routes.ways.values():
        ways[way] = None
        if way.shared:
            ways.update({Way(routes=(route,)): None for route in way.routes})
    return list(ways)


def check_name(what: str, name: str) -> None:
    """Raise UsageError for a name that no message could have."""
    if not isinstance(name, str) or not name or not fits(name, MAX_NAME) or not name.isprintable():
        raise UsageError(
            f"{what} {name!r}: a name has 1 to {MAX_NAME} bytes of printable characters"
        )
