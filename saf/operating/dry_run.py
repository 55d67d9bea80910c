"""A dry run: a broker's routers applied to one message. Nothing is sent or remembered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

import psycopg

from saf.broker.services import lives_here
from saf.database import reason_of
from saf.engine.classifying import as_table
from saf.engine.resolving import Answers, Matcher, Resolution, Resolver
from saf.errors import ConfigurationError, Unroutable
from saf.message import Message, encode
from saf.routing import functions
from saf.routing.explain import Explanation, explain
from saf.routing.functions import Classify
from saf.routing.matching import FORWARD, FUNCTION, Router, Routes
from saf.routing.resolved import Resolved, resolved
from saf.routing.routers import with_problems
from saf.routing.routes import Declared, configuration, router_in_force

DEAD = 1


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The result for a message."""

    service: str
    """The service that it is addressed to."""
    goes: Explanation
    """Where messages for its real service go, unless it becomes a dead letter or waits."""
    dead: str | None = None
    """The reason why it would become a dead letter, if any."""
    waits: str | None = None
    """The reason why its router could not be called, if any."""

    @property
    def exit_code(self) -> int:
        """0 if the message has a destination."""
        if self.dead is not None:
            return DEAD
        leads = self.waits is None and self.goes.destinations
        return 0 if leads else Unroutable.exit_code

    def as_dict(self) -> dict[str, Any]:
        """Return the dry run as a dict for JSON."""
        result: dict[str, Any] = {
            "service": self.service,
            "dead": self.dead,
            "waits": self.waits,
            "resolved": None,
        }
        if self.dead is None and self.waits is None:
            result["resolved"] = self.goes.as_dict()
        return result


InSql = Callable[[Routes], tuple[Routes, Answers | None]]
"""Takes routes; returns them with problems of routers in SQL, and the answers of the others."""


def of_none(routes: Routes) -> tuple[Routes, Answers | None]:
    """Evaluate nothing: SQL needs Spark, which is missing here."""
    return routes, None


@dataclass
class _Recall:
    connection: psycopg.Connection[Any]

    def resolved(self, router: str, keys: Collection[str]) -> Mapping[str, Resolved]:
        return resolved(self.connection, router, keys)

    def keep(self, router: str, new: Mapping[str, Resolved]) -> Mapping[str, Resolved]:  # noqa: ARG002 - forgets
        return new


def try_out(
    connection: psycopg.Connection[Any],
    message: Message,
    default_destination: str | None,
    declared: Declared,
    in_sql: InSql = of_none,
) -> DryRun:
    """Return what the next batch would do with a message; the classifier runs here.

    If the message is for a router that forwards, and the router's service lives at this broker,
    return the result of the routing service. At another broker, the router is an ordinary service.
    A function of the database is called in a transaction that is rolled back.

    ``in_sql`` evaluates classifiers in SQL, if it can; see `saf.spark.answers`.
    """
    current = configuration(connection, default_destination, declared)
    in_force, served = current.in_force, router_in_force(current, message.service)
    classify = None
    if served and served.mode == FORWARD and lives_here(connection, message.service):
        router = served.router
        if router.kind == FUNCTION:
            router, classify = _callable(connection, router)
        routes = with_problems(replace(in_force, routers=(router,)))
    else:
        routes = with_problems(in_force)
    answers = None
    if any(item.service == message.service for item in routes.routers):
        routes, answers = in_sql(routes)
    resolver = Resolver(
        routes.routers,
        Matcher(routes),
        _Recall(connection),
        answers,
        further=[item.service for item in in_force.routers],
        classify=classify,
    )
    created = {"id": 0, "shard": 0, "created_at": datetime.now(UTC)}
    rows = as_table([encode(message)._asdict() | created])
    try:
        with connection.transaction(force_rollback=True):
            resolution = resolver.resolve(rows)
    except psycopg.Error as error:
        if connection.broken or classify is None:
            raise
        resolution = Resolution(rows=rows)
        resolver.problems[message.service] = (
            f"router {message.service!r}: its classifier raised {type(error).__name__}: "
            f"{reason_of(error)}"
        )
    (row,) = (resolution.rows if len(resolution.rows) else rows).to_pylist()
    broker = row["to_broker"]
    return DryRun(
        service=message.service,
        goes=explain(
            connection,
            row["to_service"],
            str(UUID(bytes=broker)) if broker else None,
            row["key"],
            default_destination=default_destination,
            declared=declared,
        ),
        dead=next((error for _, error in resolution.dead), None),
        waits=next(iter(resolver.problems.values()), None),
    )


def _callable(
    connection: psycopg.Connection[Any], router: Router
) -> tuple[Router, Classify | None]:
    """Return a router with its problem, if its function cannot be called; or else with the call."""
    try:
        functions.check(connection, router, calls=True)
    except ConfigurationError as error:
        return replace(router, problem=str(error)), None
    return router, partial(functions.call, connection, router)
