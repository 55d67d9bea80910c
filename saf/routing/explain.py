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
    router = any(entry.service == service for entry in in_force.routers)
    match = None if router else in_force.match(service, broker)
    message = (service, broker, key)
    verdicts = [_judged(entry, current, match, message, choice) for entry in current.routes]
    if local := next(
        (entry for entry in current.routes if _is_taken_here(entry, service, broker)), None
    ):
        verdicts = [_beside_local(entry, local) for entry in verdicts]
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
    entry: Configured,
    current: Configuration,
    match: Match | None,
    message: tuple[str, str | None, str | None],
    choice: str | None,
) -> Verdict:
    service, broker, key = message
    why = _out_of_force(entry, current) or _elsewhere(entry, current, service, broker)
    if not why and match is None:
        why = f"{service!r} is a router"
        if broker is not None and service in current.topics:
            why = f"a topic, and it is not known whether {entry.route.destination!r} is that broker"
    if why or match is None:
        return Verdict(route=entry, takes=False, why=why)
    winner = match.routes[0]
    if entry.route not in match.routes:
        by = next((r for r in match.routes if r.destination == entry.route.destination), None)
        if match.to_all and by and not entry.route.fallback:
            why = f"the topic goes there by a more specific route, {describe(by)}"
        else:
            why = f"less specific than {describe(winner)}"
    elif match.to_all:
        return Verdict(route=entry, takes=True, why="a topic goes to every destination")
    elif not match.shared:
        return Verdict(route=entry, takes=True, why="the most specific match")
    elif choice not in match.destinations:
        shared = f"shares with {len(match.routes) - 1} more"
        turn = "messages without a key in turn" if key is None else "the key has not chosen yet"
        return Verdict(route=entry, takes=True, why=f"{shared}: {turn}")
    elif choice == entry.route.destination:
        return Verdict(route=entry, takes=True, why=f"shares, and key {key!r} has chosen it")
    else:
        why = f"shares, and key {key!r} has chosen {choice!r}"
    return Verdict(route=entry, takes=False, why=why)


def _is_taken_here(entry: Configured, service: str, broker: str | None) -> bool:
    return entry.local and entry.enabled and entry.route.service == service and broker is None


def _beside_local(verdict: Verdict, local: Configured) -> Verdict:
    if verdict.route is local:
        return replace(verdict, takes=True, why="local: its sender stores it in this inbox")
    return replace(verdict, takes=False, why=f"a local route takes it, {describe(local.route)}")


def _out_of_force(entry: Configured, current: Configuration) -> str:
    if not entry.enabled:
        return "disabled"
    if entry.expired(current.now):
        return f"expired at {entry.expires_at:%Y-%m-%d %H:%M:%S%z}"
    return ""


def _elsewhere(entry: Configured, current: Configuration, service: str, broker: str | None) -> str:
    if entry.route.service not in (None, service):
        return f"for another service, {entry.route.service!r}"
    if entry.route.broker not in (None, broker):
        return f"for another broker, {entry.route.broker}"
    if broker is None or (known := current.brokers.get(entry.route.destination)) == broker:
        return ""
    if known is not None:
        return f"destination {entry.route.destination!r} is another broker, {known}"
    if broker in current.brokers.values():
        return f"it is not known which broker {entry.route.destination!r} is, and another one is it"
    return ""
