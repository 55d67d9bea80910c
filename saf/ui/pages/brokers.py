"""Brokers: routes, topics and routers of one; its members and shards; the doctor's findings."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
from starlette.responses import Response

from saf.errors import SafError, Unexpected, UsageError
from saf.log.backlog import Shard
from saf.operating.doctor import Finding, examine
from saf.operating.status import Membership, memberships
from saf.routing.explain import Explanation, explain
from saf.routing.routes import Configuration, Configured, configuration, describe
from saf.ui.site import LIVE, Site, Visit


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


LOOK = 200
"""Messages of a shard to read; `saf members` reads more before it estimates."""
COLOURS = 8
"""Number of colours for members; the members are also named."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A shard in the drawing."""

    shard: Shard
    colour: int | None
    """Number of the owner's colour; None without an owner."""
    left: int


def members(visit: Visit) -> Response:
    """Show the subscriptions of one broker."""
    names = visit.site.brokers.names()
    broker = visit.given("broker") or (names or [""])[0]
    answers = visit.site.brokers.ask(partial(memberships, look=LOOK), [broker])
    found = sorted(
        answers.found.get(broker, []), key=lambda row: not (row.members or row.backlog.messages)
    )
    return visit.page(
        "members.html",
        title="Members and shards",
        live=LIVE,
        broker=broker,
        found=[(row, colours(row), cells(row)) for row in found],
        errors=answers.errors,
        lease=visit.site.settings.forwarder.lease_seconds,
    )


def colours(one: Membership) -> Mapping[str, int]:
    """Return the number of a colour for each owner of a shard."""
    owners = sorted({shard.owner for shard in one.backlog.shards if shard.owner is not None})
    return {owner: number % COLOURS for number, owner in enumerate(owners)}


def cells(one: Membership) -> list[Cell]:
    """Return the shards for the drawing."""
    colour_of = colours(one)
    return [
        Cell(
            shard=shard,
            colour=None if shard.owner is None else colour_of[shard.owner],
            left=round(one.backlog.by_shard[shard.shard].messages),
        )
        for shard in one.backlog.shards
    ]


ORDER = ("error", "warning", "ok")


@dataclass(kw_only=True)
class Examination:
    """One run of the doctor; it takes as long as the slowest database."""

    began: float = field(default_factory=time.time)
    ended: float | None = None
    findings: list[Finding] = field(default_factory=list)
    problem: str = ""


def findings(visit: Visit) -> Response:
    """Show the findings of the last examination; begin the first one if needed."""
    last: Examination | None = visit.site.examination
    if last is None:
        last = begin(visit.site)
    shown = sorted(last.findings, key=lambda row: (ORDER.index(row.severity), row.where))
    return visit.page(
        "doctor.html",
        title="Doctor",
        live="every 1s" if last.ended is None else "",
        last=last,
        findings=[row for row in shown if row.severity != "ok"],
        checks=len(shown),
        now=time.time(),
    )


def examine_(visit: Visit) -> Response:
    """Begin another examination, unless one is running."""
    last: Examination | None = visit.site.examination
    if last is None or last.ended is not None:
        begin(visit.site)
    return visit.to("/doctor")


def begin(site: Site) -> Examination:
    """Run all checks in a thread. Only reads."""
    examination = site.examination = Examination()

    def run() -> None:
        try:
            examination.findings = examine(site.settings)
        except Exception as error:
            known = error if isinstance(error, SafError) else Unexpected("the doctor", error)
            examination.problem = str(known)
        examination.ended = time.time()

    threading.Thread(target=run, name="saf-doctor", daemon=True).start()
    return examination
