"""The check of a source's routes, by what saf.toml says of destinations."""

from __future__ import annotations

from saf.config import Settings, did_you_mean
from saf.operating.doctor.patient import Check, Found, Patient
from saf.routing.routers import with_problems
from saf.routing.routes import configuration, describe

# An end that has ended says nothing more
DIALOGS = """
SELECT DISTINCT far_service, far_broker::text FROM saf.conversation
WHERE NOT monolog AND state NOT IN ('closed', 'error') ORDER BY 1, 2
"""


def dialogs_by(config: Settings) -> Check:
    """The check for one saf.toml."""

    def dialogs(patient: Patient) -> Found:
        """Whether the routes of open dialogs lead to where their other ends can live."""
        default = config.forwarder.default_destination
        in_force = configuration(patient.connection, default, config.declared).in_force
        for service, broker in patient.ask(DIALOGS):
            match = in_force.match(service, broker)
            for name in match.destinations if match else ():
                there = config.destinations.get(name)
                if there is not None and not there.capabilities.takes_dialogs:
                    yield (
                        "error",
                        f"dialogs with service {service!r} go to destination {name!r} of kind "
                        f"{there.kind!r}, which takes no messages of dialogs: they are parked",
                        f"saf route add BROKER --service {service}, where BROKER is a destination "
                        "of kind 'postgresql'",
                    )

    return dialogs


def routes_by(config: Settings) -> Check:
    """The check for one saf.toml."""

    def routes(patient: Patient) -> Found:
        """Whether routes in force lead somewhere, topics have a route, routers a function."""
        default = config.forwarder.default_destination
        in_force = configuration(patient.connection, default, config.declared).in_force
        for route in in_force.routes:
            if route.destination not in config.destinations:
                meant = did_you_mean(route.destination, config.destinations)
                yield (
                    "error",
                    f"the route of {describe(route)} leads to a destination that saf.toml does not "
                    "know: its messages are parked",
                    f"add [destinations.{route.destination}] to saf.toml{meant}, or saf route "
                    "remove",
                )
            else:
                try:
                    config.destinations[route.destination].check_quality(route.quality)
                except ValueError as error:
                    yield (
                        "error",
                        f"the route of {describe(route)}: {error}. Its messages are parked",
                        f"saf route add {route.destination} --quality at_least_once, with the "
                        "service and broker that it has",
                    )
            instead = in_force.brokers.get(route.destination)
            if route.broker is not None and instead not in (None, route.broker):
                yield (
                    "warning",
                    f"the route of {describe(route)} never counts: that destination is broker "
                    f"{instead}",
                    f"saf route remove {route.destination} --to-broker {route.broker}",
                )
        led = {route.service for route in in_force.routes}
        for topic in sorted(() if None in led else in_force.topics - led):
            yield (
                "warning",
                f"topic {topic!r} has no destination: its messages are parked",
                f"saf route add DESTINATION --service {topic}, or saf topic remove {topic}",
            )
        for router in with_problems(in_force).routers:
            if router.problem is not None:
                yield (
                    "warning",
                    f"{router.problem}. Where it cannot, its messages are parked",
                    f"mend its module or PYTHONPATH, or saf router remove {router.service}",
                )
            if router.service in in_force.topics:
                yield (
                    "warning",
                    f"{router.service!r} is a router and a topic: it counts as a router",
                    f"saf topic remove {router.service}, or saf router remove {router.service}",
                )

    return routes
