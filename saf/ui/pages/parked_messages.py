"""Single parked messages: by filter, with decisions about chosen ones, or about all that match.

As with dead letters, a decision takes two steps: the first counts, and the second, a job, covers
exactly the counted messages. Messages that are parked in between are left alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
from starlette.responses import Response

from saf.errors import UsageError
from saf.operating import decide_parked
from saf.operating.decide import Decision
from saf.setaside import parked_messages, staying
from saf.setaside.lane import Kind
from saf.setaside.parked_messages import ParkedFilter
from saf.setaside.staying import Counted
from saf.ui.choosing import begin, chosen, moment_of
from saf.ui.site import Visit

ROWS = 50
ROWS_OF_EACH = 10
"""Messages to show per broker while no broker is chosen."""
MOST = 1_000_000
"""Most messages to count before a decision."""
ACTIONS = ("redirect", "discard")
FIELDS = ("subscription", "destination", "lane", "subject", "service", "key")


def messages(visit: Visit) -> Response:
    """Show parked messages, in the order in which they were parked."""
    broker, wanted = visit.given("broker"), _wanted(visit)
    wanted = replace(wanted, after=parked_messages.place_at(visit.given("after")))
    rows = ROWS if broker else ROWS_OF_EACH

    answers = visit.site.brokers.ask(
        lambda connection: parked_messages.page(connection, wanted, rows),
        [broker] if broker else None,
    )
    pages = answers.found
    shown = [(name, entry) for name, page in pages.items() for entry in page.shown]
    if broker is None:
        shown.sort(key=lambda row: row[1].parked_at)
    return visit.page(
        "parked_messages.html",
        title="Parked messages",
        messages=shown,
        more=sorted(name for name, page in pages.items() if page.next),
        last=pages[broker].next if broker and broker in pages else None,
        errors=answers.errors,
        kinds=[*Kind],
        wanted=wanted,
        fields=_fields(visit),
        broker=broker,
        destinations=[*visit.site.settings.destinations],
    )


def confirm(visit: Visit) -> Response:
    """Count the messages that a decision covers, and ask for the reason."""
    action, to = _action(visit)

    def count(selection: ParkedFilter, connection: psycopg.Connection[Any]) -> Counted:
        return parked_messages.count(connection, selection, MOST, to=to)

    answers = visit.site.brokers.ask_each(
        {name: partial(count, selection) for name, selection in _chosen(visit).items()}
    )
    counts = answers.found
    matching = visit.given("matching")
    return visit.page(
        "parked_decide.html",
        title=action.capitalize(),
        action=action,
        to=to,
        counts={name: counted for name, counted in counts.items() if counted.messages},
        stays=staying.in_words(counted.stays for counted in counts.values()),
        errors=answers.errors,
        fields=_fields(visit),
        ids=[] if matching else visit.form.get("id", []),
        matching=matching,
        messages=sum(counted.messages for counted in counts.values()),
        more=any(counted.more for counted in counts.values()),
    )


def decide(visit: Visit) -> Response:
    """Begin the confirmed job."""
    action, to = _action(visit)
    decision: Decision[ParkedFilter] = decide_parked.discard
    if to is not None:
        decision = partial(decide_parked.redirect, to=to)
    title = action if to is None else f"redirect to {to}"
    return begin(visit, decision, _chosen(visit), what=title, about="parked messages")


def _action(visit: Visit) -> tuple[str, str | None]:
    action, to = visit.given("action") or "", visit.given("to")
    if action not in ACTIONS:
        raise UsageError(f"unknown action {action!r}, only {', '.join(ACTIONS)}")
    if action == "redirect" and to not in visit.site.settings.destinations:
        raise UsageError("redirect where? Choose one of the destinations of saf.toml")
    return action, to if action == "redirect" else None


def _chosen(visit: Visit) -> dict[str, ParkedFilter]:
    """Return the filter for each broker that a form has chosen."""
    return chosen(
        visit, _wanted(visit), lambda numbers: ParkedFilter(parked_ids=numbers), "parked messages"
    )


def _fields(visit: Visit) -> dict[str, str | None]:
    """Return the filter as the pages' forms and links pass it on."""
    return {name: visit.given(name) for name in ("broker", *FIELDS, "before")}


def _wanted(visit: Visit) -> ParkedFilter:
    given: dict[str, Any] = {name: visit.given(name) for name in FIELDS}
    if given["lane"] is not None and given["lane"] not in [*Kind]:
        raise UsageError(f"unknown kind of lane {given['lane']!r}, only {', '.join(Kind)}")
    return ParkedFilter(**given, before=moment_of(visit.given("before")))
