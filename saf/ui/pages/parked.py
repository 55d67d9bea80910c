"""Parked messages: the waiting lanes, and retrying them now."""

from __future__ import annotations

from typing import Any

import psycopg
from starlette.responses import Response

from saf.errors import UsageError
from saf.setaside.lane import Kind
from saf.setaside.waiting import Lanes, Waiting, due, parked, place_at, retry_now
from saf.ui.site import LIVE, Visit

ROWS = 25
"""Lanes to show per broker, those that block most first; more for a single broker."""
ROWS_OF_ONE = 50
MOST = 10_000
"""Most messages of a lane to count."""
FIELDS = ("subscription", "destination", "lane", "subject")


def lanes(visit: Visit) -> Response:
    """Show the waiting lanes."""
    found, errors = _found(visit)
    broker = visit.given("broker")
    page = found.get(broker or "")
    return visit.page(
        "parked.html",
        title="Parked",
        live=LIVE,
        found=found,
        errors=errors,
        kinds=[*Kind],
        most=MOST,
        wanted=_wanted(visit),
        broker=broker,
        after=page.next if page else None,
    )


def confirm(visit: Visit) -> Response:
    """Show how many lanes would be retried, and ask for the reason."""
    wanted = _wanted(visit)
    answers = visit.site.brokers.ask(lambda connection: due(connection, wanted), _brokers(visit))
    return visit.page(
        "parked_confirm.html",
        title="Retry now",
        found={name: counted.tried for name, counted in answers.found.items() if counted.tried},
        others=sum(counted.others for counted in answers.found.values()),
        errors=answers.errors,
        wanted=wanted,
        broker=visit.given("broker"),
    )


def retry(visit: Visit) -> Response:
    """Let the next run retry lanes."""
    wanted, reason, person = _wanted(visit), visit.given("why") or "", visit.visitor.name

    def act(connection: psycopg.Connection[Any]) -> int:
        return retry_now(connection, lanes=wanted, why=reason, person=person)

    answers = visit.site.brokers.ask(act, _brokers(visit), seconds=10.0)
    return visit.page(
        "parked_done.html", title="Retry now", due=answers.found, errors=answers.errors
    )


def _found(visit: Visit) -> tuple[dict[str, Waiting], Any]:
    wanted, brokers = _wanted(visit), _brokers(visit)
    most = ROWS if brokers is None else ROWS_OF_ONE
    after = place_at(visit.given("after")) if brokers else None
    answers = visit.site.brokers.ask(
        lambda connection: parked(connection, most, lanes=wanted, after=after, most=MOST),
        brokers,
    )
    return {name: page for name, page in answers.found.items() if page.lanes}, answers.errors


def _brokers(visit: Visit) -> list[str] | None:
    broker = visit.given("broker")
    return None if broker is None else [broker]


def _wanted(visit: Visit) -> Lanes:
    given = {name: visit.given(name) for name in FIELDS}
    if given["lane"] is not None and given["lane"] not in [*Kind]:
        raise UsageError(f"unknown kind of lane {given['lane']!r}, only {', '.join(Kind)}")
    return Lanes(**given)
