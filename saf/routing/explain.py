"""Explain which routes a message would take now, and why it would not take the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import psycopg

from saf.routing.matching import Match
from saf.routing.route_choices import Asker, chosen
from saf.routing.routes import NOTHING, Configuration, Configured, Declared, configuration, describe


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of one route for one message."""

    route: Configured
    takes: bool
    """True if the message takes this route, or may take it."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Explanation of where a message would go with the next batch."""

    service: str
    broker: str | None
    key: str | None
    verdicts: tuple[Verdict, ...]
    """One verdict per configured route, the most specific first."""
    router: bool = False
    """True if the service is a router: its classifier names the actual service of each message."""

    @property
    def destinations(self) -> tuple[str, ...]:
        """Destinations of the message. If several: all for a topic, otherwise only one."""
        return tuple(v.route.route.destination for v in self.verdicts if v.takes)

    @property
    def lost(self) -> bool:
        """True if the message would have to wait for a route."""
        return not self.router and not self.destinations

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as a dict for JSON."""
        return {
            "service": self.service,
            "to_broker": self.broker,
            "key": self.key,
            "router": self.router,
            "destinations": list(self.destinations),
            "routes": [
                as_dict(verdict.route) | {"takes": verdict.takes, "why": verdict.why}
                for verdict in self.verdicts
            ],
        }


def as_dict(one: Configured) -> dict[str, Any]:
    """Return a configured route as a dict for JSON."""
    named = {name: value for name, value in asdict(one.route).items() if name != "fallback"}
    return {
        **{("to_broker" if name == "broker" else name): value for name, value in named.items()},
        "enabled": one.enabled,
        "expires_at": one.expires_at and one.expires_at.isoformat(),
        "comment": one.comment,
        "local": one.local,
        "origin": one.origin,
    }


def explain(
    connection: psycopg.Connection[Any],
    service: str,
    broker: str | None = None,
    key: str | None = None,
    *,
    default_destination: str | None = None,
    declared: Declared = NOTHING,
    identities: Mapping[str, str | None] | None = None,
) -> Explanation:
    """Explain where a message for a service (and broker) with a key would go now. Only reads.

    ``identities`` is as for `saf.routing.routes.configuration`.
    """
    current = configuration(connection, default_destination, declared, identities)
    asker = Asker(service, broker, key or "")
    choice = None if key is None else chosen(connection, [asker]).get(asker)
    in_force = current.in_force
    router = any(one.service == service for one in in_force.routers)
    match = None if router else in_force.match(service, broker)
    message = (service, broker, key)
    verdicts = [_judged(one, current, match, message, choice) for one in current.routes]
    if local := next((one for one in current.routes if _is_taken_here(one, service, broker)), None):
        verdicts = [_beside_local(one, local) for one in verdicts]
    if match is not None and broker is not None and not any(verdict.takes for verdict in verdicts):
        by_itself = Configured(route=match.routes[0], origin="broker_id")
        verdicts.append(Verdict(route=by_itself, takes=True, why="it is that broker"))
    return Explanation(
        service=service,
        broker=broker,
        key=key,
        router=router,
        verdicts=tuple(verdicts),
    )


def _judged(
    one: Configured,
    current: Configuration,
    match: Match | None,
    message: tuple[str, str | None, str | None],
    choice: str | None,
) -> Verdict:
    service, broker, key = message
    why = _out_of_force(one, current) or _elsewhere(one, current, service, broker)
    if not why and match is None:
        why = f"{service!r} is a router"
        if broker is not None and service in current.topics:
            why = f"a topic, and it is not known whether {one.route.destination!r} is that broker"
    if why or match is None:
        return Verdict(route=one, takes=False, why=why)
    winner = match.routes[0]
    if one.route not in match.routes:
        by = next((r for r in match.routes if r.destination == one.route.destination), None)
        if match.to_all and by and not one.route.fallback:
            why = f"the topic goes there by a more specific route, {describe(by)}"
        else:
            why = f"less specific than {describe(winner)}"
    elif match.to_all:
        return Verdict(route=one, takes=True, why="a topic goes to every destination")
    elif not match.shared:
        return Verdict(route=one, takes=True, why="the most specific match")
    elif choice not in match.destinations:
        shared = f"shares with {len(match.routes) - 1} more"
        turn = "messages without a key in turn" if key is None else "the key has not chosen yet"
        return Verdict(route=one, takes=True, why=f"{shared}: {turn}")
    elif choice == one.route.destination:
        return Verdict(route=one, takes=True, why=f"shares, and key {key!r} has chosen it")
    else:
        why = f"shares, and key {key!r} has chosen {choice!r}"
    return Verdict(route=one, takes=False, why=why)


def _is_taken_here(one: Configured, service: str, broker: str | None) -> bool:
    return one.local and one.enabled and one.route.service == service and broker is None


def _beside_local(one: Verdict, local: Configured) -> Verdict:
    if one.route is local:
        return replace(one, takes=True, why="local: its sender stores it in this inbox")
    return replace(one, takes=False, why=f"a local route takes it, {describe(local.route)}")


def _out_of_force(one: Configured, current: Configuration) -> str:
    if not one.enabled:
        return "disabled"
    if one.expired(current.now):
        return f"expired at {one.expires_at:%Y-%m-%d %H:%M:%S%z}"
    return ""


def _elsewhere(one: Configured, current: Configuration, service: str, broker: str | None) -> str:
    if one.route.service not in (None, service):
        return f"for another service, {one.route.service!r}"
    if one.route.broker not in (None, broker):
        return f"for another broker, {one.route.broker}"
    if broker is None or (known := current.brokers.get(one.route.destination)) == broker:
        return ""
    if known is not None:
        return f"destination {one.route.destination!r} is another broker, {known}"
    if broker in current.brokers.values():
        return f"it is not known which broker {one.route.destination!r} is, and another one is it"
    return ""
