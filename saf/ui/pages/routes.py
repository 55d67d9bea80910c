"""Routes, topics and routers of a broker, and the route of a message."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
from starlette.responses import Response

from saf.errors import UsageError
from saf.routing.explain import Explanation, explain
from saf.routing.routes import Configuration, Configured, configuration, describe
from saf.ui.site import Visit


def routes(visit: Visit) -> Response:
    """Show a broker's configuration; for a given service, explain its messages' route."""

    settings = visit.site.settings
    default, declared = settings.forwarder.default_destination, settings.declared
    sources = [name for name in visit.site.brokers.names() if _is_source(visit, name)]
    broker = visit.given("broker") or (sources or [""])[0]
    service, key, to = visit.given("service"), visit.given("key"), visit.given("to_broker")
    try:
        broker_id = str(UUID(to)) if to else None
    except ValueError:
        raise UsageError(f"{to!r} is not a broker_id, which is a UUID") from None
    identities = visit.site.identities.known() if service else None

    def ask(connection: psycopg.Connection[Any]) -> tuple[Configuration, Explanation | None]:
        found = configuration(connection, default, declared)
        if service is None:
            return found, None
        explanation = explain(
            connection,
            service,
            broker_id,
            key,
            default_destination=default,
            declared=declared,
            identities=identities,
        )
        return found, explanation

    answers = visit.site.brokers.ask(ask, [broker])
    found, explanation = answers.found.get(broker, (None, None))
    return visit.page(
        "routes.html",
        title="Routes",
        broker=broker,
        sources=sources,
        service=service,
        key=key,
        to=to,
        found=found,
        explanation=explanation,
        errors=answers.errors,
        describe=describe,
        state=state,
    )


def state(one: Configured, there: Configuration) -> str:
    """Return the state of a route in a word or two."""
    if one.in_force(there.now):
        return "in force" if one.route in there.in_force.routes else "not needed"
    return "expired" if one.enabled else "disabled"


def _is_source(visit: Visit, name: str) -> bool:
    return name in visit.site.settings.brokers or name.partition("/")[0] in (
        visit.site.settings.fleets
    )
