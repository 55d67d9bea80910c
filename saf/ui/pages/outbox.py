"""Messages of an outbox by state, service, key and age, page by page."""

from __future__ import annotations

from typing import Any

import psycopg
from starlette.responses import Response

from saf.errors import UsageError
from saf.operating import outbox
from saf.operating.outbox import STATES, SentPage, Wanted
from saf.ui.brokers import PATIENCE_SECONDS
from saf.ui.fields import moment_of
from saf.ui.site import Visit

ROWS = 50
SECONDS = PATIENCE_SECONDS / 2
"""Bound of a statement."""
LOOK_SECONDS = 0.08
"""Time to search an outbox for one page."""
FURTHER_SECONDS = 0.5
"""Time to search if the user asks to look further."""


def messages(visit: Visit) -> Response:
    """Show a page of one broker's outbox."""
    sources = [*visit.site.settings.brokers] + [
        name for name in visit.site.brokers.names() if "/" in name
    ]
    broker = visit.given("broker") or (sources or [""])[0]
    state = visit.given("state")
    if state is not None and state not in STATES:
        raise UsageError(f"unknown state {state!r}, only {', '.join(STATES)}")
    wanted = Wanted(
        state=state,
        service=visit.given("service"),
        key=visit.given("key"),
        since=moment_of(visit.given("since")),
        until=moment_of(visit.given("until")),
    )
    after = outbox.place_at(visit.given("after"), state)
    look_seconds = FURTHER_SECONDS if visit.given("further") else LOOK_SECONDS

    def page(connection: psycopg.Connection[Any]) -> SentPage:
        return outbox.messages(
            connection, wanted, after=after, limit=ROWS, seconds=SECONDS, look_seconds=look_seconds
        )

    answers = visit.site.brokers.ask(page, [broker])
    return visit.page(
        "outbox.html",
        title="Outbox",
        broker=broker,
        sources=sources,
        states=STATES,
        wanted=wanted,
        found=answers.found.get(broker),
        errors=answers.errors,
        known=broker in visit.site.brokers.names(),
    )
