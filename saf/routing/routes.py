"""Routes: their configuration, and the version that is frozen with a batch.

Routes, topics and routers are rows of the source broker. They may also be declared in saf.toml, for
all brokers of the file. A row stands in for a declared route of the same service, broker and
destination, and for a declared router of the same service, so declarations can be disabled at run
time. `saf.routing.matching` defines what routes mean; `saf.routing.routers` covers routers.

A route is *in force* while it is enabled and not expired, by the broker's clock. The routes in
force are frozen with each batch (`freeze`), together with the known identities of destinations. So
a batch that is read again is routed in the same way, even if routes have changed since. A change
takes effect with the next batch. A message that no route matches is parked until a route does.

Functions take a psycopg connection and write in their own transaction, or in the caller's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import psycopg

from saf.database import fetch
from saf.errors import ConfigurationError, UsageError
from saf.routing.local import keep, refuse_local, transaction
from saf.routing.matching import REDIRECT, Route, Router, Routes, by_precedence, check_name

Origin = Literal["saf.route", "saf.router", "saf.toml", "default", "broker_id"]

TOPICS = "SELECT name FROM saf.topic ORDER BY name"
FINGERPRINT = f"""
md5(concat((SELECT json_agg(r) FROM saf.route AS r), ARRAY({TOPICS})::text,
           (SELECT json_agg(r) FROM saf.router AS r)))
"""
"""SQL: a text that changes with the rows of routes, topics and routers, and perhaps without."""

CONFIGURED = f"""
SELECT now(),
       (SELECT coalesce(json_agg(r), '[]') FROM (
            SELECT service, broker, destination, quality, enabled, expires_at, comment, local
            FROM saf.route) AS r),
       ARRAY({TOPICS}),
       (SELECT coalesce(json_agg(r), '[]') FROM (
            SELECT service, kind, expression, once_per, mode, enabled, comment
            FROM saf.router) AS r),
       (SELECT brokers FROM saf.route_version ORDER BY version DESC LIMIT 1), {FINGERPRINT}
"""

# An upsert: with delete and insert, a route that is added again would be missing for a moment
ADD = """
INSERT INTO saf.route AS r (service, broker, destination, quality, expires_at, comment, local)
VALUES (%(service)s, %(broker)s, %(destination)s, %(quality)s, %(expires_at)s, %(comment)s,
        %(local)s)
ON CONFLICT ON CONSTRAINT route_once DO UPDATE SET
    quality = excluded.quality, expires_at = excluded.expires_at, comment = excluded.comment,
    local = excluded.local, enabled = true
RETURNING route_id, xmax = 0
"""
STAND_IN = """
INSERT INTO saf.route (service, broker, destination, quality, expires_at, comment)
VALUES (%(service)s, %(broker)s, %(destination)s, %(quality)s, %(expires_at)s, %(comment)s)
ON CONFLICT DO NOTHING
"""
THIS = """
service IS NOT DISTINCT FROM %(service)s AND broker IS NOT DISTINCT FROM %(broker)s::uuid
AND destination = %(destination)s RETURNING route_id, local
"""
REMOVE = f"DELETE FROM saf.route WHERE {THIS}"
ENABLE = f"UPDATE saf.route SET enabled = %(enabled)s WHERE {THIS}"

OTHER_LOCAL = """
SELECT destination FROM saf.route
WHERE local AND service = %(service)s AND destination <> %(destination)s
"""

IS_ROUTER = "SELECT service FROM saf.router WHERE service = %(name)s"
ADD_TOPIC = "INSERT INTO saf.topic (name) VALUES (%(name)s) ON CONFLICT DO NOTHING RETURNING name"
REMOVE_TOPIC = "DELETE FROM saf.topic WHERE name = %(name)s RETURNING name"

LATEST = """
SELECT version, routes, topics, routers, brokers
FROM saf.route_version ORDER BY version DESC LIMIT 1
"""
FREEZE = """
INSERT INTO saf.route_version (routes, topics, routers, brokers)
VALUES (%(routes)s, %(topics)s, %(routers)s, %(brokers)s) RETURNING version
"""
FROZEN = """
SELECT routes, topics, routers, brokers FROM saf.route_version WHERE version = %(version)s
"""
ALL_FROZEN = """
SELECT version, created_at, routes, topics, routers, brokers FROM saf.route_version ORDER BY version
"""


@dataclass(frozen=True, kw_only=True)
class Configured:
    """A route as it is configured, in force or not."""

    route: Route
    origin: Origin
    enabled: bool = True
    expires_at: datetime | None = None
    comment: str | None = None
    local: bool = False
    """True if senders store this route's messages themselves; see `saf.routing.local`."""

    def in_force(self, now: datetime) -> bool:
        """Return whether the route is enabled and not expired."""
        return self.enabled and not self.expired(now)

    def expired(self, now: datetime) -> bool:
        """Return whether the route's lifetime is over."""
        return self.expires_at is not None and self.expires_at <= now

    @property
    def named(self) -> tuple[str | None, str | None, str]:
        """Service, broker and destination: together they identify the route."""
        return self.route.service, self.route.broker, self.route.destination


@dataclass(frozen=True, kw_only=True)
class ConfiguredRouter:
    """A router as it is configured, in force or not."""

    router: Router
    origin: Origin
    mode: str = REDIRECT
    """Mode: "redirect", at the source, or "forward", by a `saf.routing_service`."""
    enabled: bool = True
    comment: str | None = None


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Routes, topics and routers that saf.toml declares."""

    routes: tuple[Configured, ...] = ()
    topics: frozenset[str] = frozenset()
    routers: tuple[ConfiguredRouter, ...] = ()


NOTHING = Declared()


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The whole configuration of a broker, rows and declarations together."""

    routes: tuple[Configured, ...]
    """Routes, the most specific first."""
    topics: frozenset[str]
    routers: tuple[ConfiguredRouter, ...]
    """Routers, sorted by service."""
    brokers: Mapping[str, str]
    """Broker that each destination is known to be."""
    now: datetime
    """Time of reading, by the broker's clock."""
    fingerprint: str
    """`FINGERPRINT` of the rows."""

    @property
    def lasting(self) -> str | None:
        """The fingerprint; None if the routes in force change with time alone."""
        return None if any(entry.expires_at for entry in self.routes) else self.fingerprint

    @property
    def in_force(self) -> Routes:
        """Routes in force now; with the default destination only without a wildcard route."""
        routes = [entry.route for entry in self.routes if entry.in_force(self.now)]
        if any(route.specificity == 0 for route in routes):
            routes = [route for route in routes if not route.fallback]
        routers = tuple(
            entry.router for entry in self.routers if entry.enabled and entry.mode == REDIRECT
        )
        return Routes(
            routes=tuple(routes), topics=self.topics, routers=routers, brokers=self.brokers
        )


def configuration(
    connection: psycopg.Connection[Any],
    default_destination: str | None = None,
    declared: Declared = NOTHING,
    identities: Mapping[str, str | None] | None = None,
) -> Configuration:
    """Read the configuration of a broker, and add the declarations of saf.toml.

    ``identities`` has the broker that each destination reports to be. For a destination that did
    not answer, and for all if ``identities`` is None, the identity in the latest batch counts.
    """
    ((now, of_routes, names, of_routers, known, fingerprint),) = fetch(connection, CONFIGURED)
    routes = [_configured(**row) for row in of_routes]
    rows = {entry.named for entry in routes}
    routers = {entry.router.service: entry for entry in declared.routers}
    routers |= {row["service"]: _configured_router(**row) for row in of_routers}
    routes += [entry for entry in declared.routes if entry.named not in rows]
    if default_destination:
        fallback = Route(destination=default_destination, fallback=True)
        routes.append(Configured(route=fallback, origin="default"))
    place = {route: number for number, route in enumerate(by_precedence(r.route for r in routes))}
    return Configuration(
        routes=tuple(sorted(routes, key=lambda entry: place[entry.route])),
        topics=declared.topics | set(names),
        routers=tuple(routers[service] for service in sorted(routers)),
        brokers=_brokers(known or {}, identities),
        now=now,
        fingerprint=fingerprint,
    )


def _configured(
    *,
    service: str | None,
    broker: str | None,
    destination: str,
    quality: str | None,
    expires_at: str | None,
    **others: Any,
) -> Configured:
    """Return a route from a row of saf.route."""
    return Configured(
        route=Route(service=service, broker=broker, destination=destination, quality=quality),
        origin="saf.route",
        expires_at=datetime.fromisoformat(expires_at) if expires_at else None,
        **others,
    )


def _brokers(
    latest: Mapping[str, str], identities: Mapping[str, str | None] | None
) -> dict[str, str]:
    if identities is None:
        return dict(latest)
    brokers = {name: identity or latest.get(name) for name, identity in identities.items()}
    return {name: broker for name, broker in brokers.items() if broker is not None}


def _configured_router(
    *, mode: str, enabled: bool, comment: str | None, **router: Any
) -> ConfiguredRouter:
    """Return a router from a row of saf.router."""
    return ConfiguredRouter(
        router=Router(**router), origin="saf.router", mode=mode, enabled=enabled, comment=comment
    )


def router_in_force(there: Configuration, service: str) -> ConfiguredRouter | None:
    """Return the router of a service, unless it is disabled."""
    found = (entry for entry in there.routers if entry.router.service == service)
    return next((entry for entry in found if entry.enabled), None)


def current_routes(
    connection: psycopg.Connection[Any],
    default_destination: str | None = None,
    declared: Declared = NOTHING,
    identities: Mapping[str, str | None] | None = None,
) -> Routes:
    """Return the routes in force at a broker now; see `configuration` for the arguments."""
    return configuration(connection, default_destination, declared, identities).in_force


def add_route(
    connection: psycopg.Connection[Any],
    destination: str,
    *,
    service: str | None = None,
    broker: UUID | None = None,
    quality: str | None = None,
    expires_at: datetime | None = None,
    comment: str | None = None,
    local: bool = False,
) -> bool:
    """Add a route to a destination for messages of a service, for a broker, or for any.

    An existing route gets these values and is enabled; then the result is False.

    With ``local``, the destination is this same broker, and senders store the service's messages
    in its inbox themselves; see `saf.routing.local`.

    Raises:
        UsageError: a name that no message could have, or a time without a time zone; or the route
            cannot be local, or not yet.
    """
    for what, name in (("service", service), ("destination", destination)):
        if name is not None:
            check_name(what, name)
    if expires_at is not None and expires_at.utcoffset() is None:
        raise UsageError(f"expires_at {expires_at.isoformat()} has no time zone")
    params = {
        "service": service,
        "broker": broker,
        "destination": destination,
        "quality": quality,
        "expires_at": expires_at,
        "comment": comment,
        "local": local,
    }
    if local and (service is None or (broker, quality, expires_at) != (None, None, None)):
        raise UsageError(
            "a local route is for a service, and has no broker, no quality of service and no end: "
            "its messages are stored by their senders"
        )
    with transaction(connection):
        if local and (others := fetch(connection, OTHER_LOCAL, params)):
            existing = Route(service=service, destination=others[0][0])
            raise UsageError(f"a local route already exists, {describe(existing)}: remove it")
        ((route_id, added),) = fetch(connection, ADD, params)
        keep(connection, route_id, service, wanted=local)
    return bool(added)


def remove_route(
    connection: psycopg.Connection[Any],
    destination: str,
    *,
    service: str | None = None,
    broker: UUID | None = None,
) -> None:
    """Remove a route.

    Raises:
        ConfigurationError: no route has this service, broker and destination.
    """
    with connection.transaction():
        route_id, _ = _change(connection, REMOVE, destination, service, broker)
        keep(connection, route_id, service, wanted=False)


def enable_route(
    connection: psycopg.Connection[Any],
    destination: str,
    *,
    service: str | None = None,
    broker: UUID | None = None,
    enabled: bool = True,
    declared: Declared = NOTHING,
) -> None:
    """Enable or disable a route; for a declared route, by a row that stands in for it.

    Raises:
        ConfigurationError: no route has this service, broker and destination.
    """
    named = (service, str(broker) if broker else None, destination)
    with transaction(connection):
        for entry in declared.routes:
            if entry.named == named:
                values = {
                    "service": service,
                    "broker": broker,
                    "destination": destination,
                    "quality": entry.route.quality,
                    "expires_at": entry.expires_at,
                    "comment": entry.comment,
                }
                connection.execute(STAND_IN, values)
        route_id, local = _change(connection, ENABLE, destination, service, broker, enabled=enabled)
        keep(connection, route_id, service, wanted=local and enabled)


def topics(connection: psycopg.Connection[Any]) -> list[str]:
    """Return the services that rows of a broker make topics."""
    return [name for (name,) in fetch(connection, TOPICS)]


def add_topic(connection: psycopg.Connection[Any], name: str) -> bool:
    """Make a service a topic: its messages go to every destination that a route leads to.

    Return False if it is already a topic.

    Raises:
        UsageError: a name that no message could have, or a router's name.
    """
    check_name("topic", name)
    if fetch(connection, IS_ROUTER, {"name": name}):
        raise UsageError(f"{name!r} is a router: a router may resolve to a topic, but is not one")
    refuse_local(connection, name, "a topic")
    return bool(fetch(connection, ADD_TOPIC, {"name": name}))


def remove_topic(connection: psycopg.Connection[Any], name: str) -> None:
    """Make a topic an ordinary service again.

    Raises:
        ConfigurationError: the topic does not exist.
    """
    if not fetch(connection, REMOVE_TOPIC, {"name": name}):
        known = ", ".join(map(repr, topics(connection))) or "none"
        raise ConfigurationError(f"saf.topic has no {name!r}, only {known}")


def freeze(connection: psycopg.Connection[Any], routes: Routes) -> int:
    """Return the version number of these routes; write a version only if they have changed."""
    frozen = (
        [asdict(route) for route in routes.routes],
        sorted(routes.topics),
        [asdict(router) for router in routes.routers],
        dict(routes.brokers),
    )
    latest = fetch(connection, LATEST)
    if latest and latest[0][1:] == frozen:
        return int(latest[0][0])
    params = {
        "routes": json.dumps(frozen[0]),
        "topics": frozen[1],
        "routers": json.dumps(frozen[2]),
        "brokers": json.dumps(frozen[3]),
    }
    ((version,),) = fetch(connection, FREEZE, params)
    return int(version)


def frozen_routes(connection: psycopg.Connection[Any], version: int) -> Routes:
    """Return the routes of a version."""
    found = fetch(connection, FROZEN, {"version": version})
    if not found:
        raise ConfigurationError(f"saf.route_version has no version {version}, which a batch needs")
    return _thawed(*found[0])


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version of the routes that batches were, or still are, opened with."""

    version: int
    created_at: datetime
    routes: Routes

    @property
    def is_first(self) -> bool:
        """True if no version came before."""
        return self.version == 1


def versions(connection: psycopg.Connection[Any]) -> list[Version]:
    """Return all stored versions, the oldest first."""
    return [
        Version(version=number, created_at=created_at, routes=_thawed(*frozen))
        for number, created_at, *frozen in fetch(connection, ALL_FROZEN)
    ]


def _thawed(
    routes: list[dict[str, Any]],
    names: list[str],
    routers: list[dict[str, Any]],
    brokers: dict[str, str],
) -> Routes:
    return Routes(
        routes=tuple(Route(**route) for route in routes),
        topics=frozenset(names),
        routers=tuple(Router(**router) for router in routers),
        brokers=brokers,
    )


def describe(route: Route) -> str:
    """Return a route in words.

    >>> describe(Route(service="billing", destination="erp"))
    "service 'billing' to 'erp'"
    """
    parts = [f"service {route.service!r}"] if route.service is not None else []
    parts += [f"broker {route.broker}"] if route.broker is not None else []
    return f"{', '.join(parts) or 'any service'} to {route.destination!r}"


def _change(
    connection: psycopg.Connection[Any],
    statement: str,
    destination: str,
    service: str | None,
    broker: UUID | None,
    **more: object,
) -> tuple[int, bool]:
    """Change a route; return its id, and whether it is local."""
    params = {"service": service, "broker": broker, "destination": destination, **more}
    if found := fetch(connection, statement, params):
        ((route_id, local),) = found
        return route_id, local
    wanted = Route(service=service, broker=str(broker) if broker else None, destination=destination)
    rows = _rows(configuration(connection).routes)
    raise ConfigurationError(f"saf.route has no route {describe(wanted)}, only {rows}")


def _rows(routes: Iterable[Configured]) -> str:
    return "; ".join(describe(entry.route) for entry in routes) or "none"
