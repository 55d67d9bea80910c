"""Checks of a source's routes against the destinations in saf.toml."""

from __future__ import annotations

from saf.config import Settings, did_you_mean
from saf.operating.doctor.patient import Check, Found, Patient
from saf.operating.wording import counted
from saf.routing.local import TRIGGER
from saf.routing.matching import Route
from saf.routing.routers import with_problems
from saf.routing.routes import Configured, configuration, describe

# An ended end sends nothing more
DIALOGS = """
SELECT DISTINCT far_service, far_broker::text FROM saf.conversation
WHERE NOT monolog AND state NOT IN ('closed', 'error') ORDER BY 1, 2
"""


def dialogs_by(config: Settings) -> Check:
    """Return the check for one saf.toml."""

    def dialogs(patient: Patient) -> Found:
        """Check that the routes of open dialogs lead to places where their other ends can live."""
        default = config.forwarder.default_destination
        in_force = configuration(patient.connection, default, config.declared).in_force
        for service, broker in patient.ask(DIALOGS):
            match = in_force.match(service, broker)
            for name in match.destinations if match else ():
                settings = config.destinations.get(name)
                if settings is not None and not settings.capabilities.takes_dialogs:
                    yield (
                        "error",
                        f"dialogs with service {service!r} go to destination {name!r} of kind "
                        f"{settings.kind!r}, which takes no messages of dialogs: they are parked",
                        f"{patient.command('route', 'add', 'BROKER', '--service', service)}, where "
                        "BROKER is a destination of kind 'postgresql'",
                    )

    return dialogs


# The newest messages of each shard, delivered or not: the check is about their senders
GIVEN_LATER = """
SELECT l.to_service, l.to_broker::text, count(*)
FROM saf.broker b CROSS JOIN LATERAL generate_series(0, b.shards - 1) AS s (shard)
CROSS JOIN LATERAL (
    SELECT to_service, to_broker, created_at, deliver_at FROM saf.outbox o
    WHERE o.shard = s.shard::smallint ORDER BY txid DESC LIMIT 100) AS l
WHERE l.deliver_at > l.created_at
GROUP BY 1, 2 ORDER BY 1, 2
"""


def given_early_by(config: Settings) -> Check:
    """Return the check for one saf.toml."""

    def given_early(patient: Patient) -> Found:
        """Check that destinations hold messages that are sent for later."""
        default = config.forwarder.default_destination
        in_force = configuration(patient.connection, default, config.declared).in_force
        for service, broker, messages in patient.ask(GIVEN_LATER):
            match = in_force.match(service, broker)
            for name in match.destinations if match else ():
                settings = config.destinations.get(name)
                if settings is not None and not settings.capabilities.holds:
                    yield (
                        "warning",
                        f"{counted(messages, 'message')} for service {service!r}, of the newest, "
                        f"have a deliver_at, and destination {name!r} of kind {settings.kind!r} "
                        "holds no message until then: it gets them immediately",
                        "let its readers heed the time that comes with a message; or route the "
                        "service to an inbox",
                    )

    return given_early


# The trigger may be missing because a dump left it out, or a user dropped it
LOCAL = f"""
SELECT r.service, r.destination, b.broker_id::text,
       EXISTS (SELECT FROM pg_trigger t
               WHERE t.tgrelid = 'saf.outbox'::regclass
                 AND t.tgname = '{TRIGGER}' || r.route_id AND t.tgenabled <> 'D')
FROM saf.route r, saf.broker b WHERE r.local AND r.enabled ORDER BY 1
"""


def local_by(config: Settings) -> Check:
    """Return the check for one saf.toml."""

    def local(patient: Patient) -> Found:
        """Check that local routes lead to their own broker, and serve plain services only."""
        default = config.forwarder.default_destination
        current = configuration(patient.connection, default, config.declared)
        routers = {item.router.service for item in current.routers}
        for service, destination, here, works in patient.ask(LOCAL):
            arguments = (destination, "--service", service)
            remove = patient.command("route", "remove", *arguments)
            if not works:
                yield (
                    "warning",
                    f"the local route of service {service!r} has no trigger at the outbox: its "
                    "messages wait for the forwarder",
                    f"{patient.command('route', 'disable', *arguments)}, then "
                    + patient.command("route", "enable", *arguments),
                )
            elif current.brokers.get(destination, here) != here:
                yield (
                    "warning",
                    f"the route of service {service!r} to {destination!r} is local, and that is "
                    "another broker: messages that their sender does not store go there",
                    f"{remove}, and add it to the destination that is this broker",
                )
            if service in current.topics or service in routers:
                what = "topic" if service in current.topics else "router"
                yield (
                    "error",
                    f"{what} {service!r} has a local route: its messages stay in this inbox",
                    remove,
                )

    return local


def routes_by(config: Settings) -> Check:
    """Return the check for one saf.toml."""

    def routes(patient: Patient) -> Found:
        """Check that routes in force have destinations, topics a route, and routers a function."""
        default = config.forwarder.default_destination
        current = configuration(patient.connection, default, config.declared)
        in_force = current.in_force
        configured = {item.route: item for item in current.routes}
        for route in in_force.routes:
            if route.destination not in config.destinations:
                hint = did_you_mean(route.destination, config.destinations)
                yield (
                    "error",
                    f"the route of {describe(route)} leads to a destination that saf.toml does not "
                    "know: its messages are parked",
                    f"add [destinations.{route.destination}] to saf.toml{hint}, or "
                    + _removed(patient, configured[route]),
                )
            else:
                try:
                    config.destinations[route.destination].check_quality(route.quality)
                except ValueError as error:
                    yield (
                        "error",
                        f"the route of {describe(route)}: {error}. Its messages are parked",
                        patient.command(
                            *("route", "add", *_named(route), "--quality", "at_least_once"),
                            *_kept(configured[route]),
                        ),
                    )
            instead = in_force.brokers.get(route.destination)
            if route.broker is not None and instead not in (None, route.broker):
                yield (
                    "warning",
                    f"the route of {describe(route)} is never used: that destination is broker "
                    f"{instead}",
                    _removed(patient, configured[route]),
                )
        services = {route.service for route in in_force.routes}
        for topic in sorted(() if None in services else in_force.topics - services):
            yield (
                "warning",
                f"topic {topic!r} has no destination: its messages are parked",
                f"{patient.command('route', 'add', 'DESTINATION', '--service', topic)}, or "
                + patient.command("topic", "remove", topic),
            )
        for router in with_problems(in_force).routers:
            if router.problem is not None:
                yield (
                    "warning",
                    f"{router.problem}. Where it cannot, its messages are parked",
                    "fix its module or PYTHONPATH, or "
                    + patient.command("router", "remove", router.service),
                )
            if router.service in in_force.topics:
                yield (
                    "warning",
                    f"{router.service!r} is a router and a topic: it counts as a router",
                    f"{patient.command('topic', 'remove', router.service)}, or "
                    + patient.command("router", "remove", router.service),
                )

    return routes


def _removed(patient: Patient, entry: Configured) -> str:
    """Return the command that removes a route; a route from saf.toml has no row to remove."""
    if entry.origin != "saf.route":
        return "remove it from saf.toml"
    return patient.command("route", "remove", *_named(entry.route))


def _named(route: Route) -> list[str]:
    """Return the command-line words that identify a route."""
    service = ["--service", route.service] if route.service is not None else []
    broker = ["--to-broker", route.broker] if route.broker is not None else []
    return [route.destination, *service, *broker]


def _kept(entry: Configured) -> list[str]:
    """Return the options that keep a route's settings when it is added again."""
    expires = ["--expires", entry.expires_at.isoformat()] if entry.expires_at is not None else []
    comment = ["--comment", entry.comment] if entry.comment is not None else []
    return [*expires, *comment]
