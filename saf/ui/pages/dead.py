"""Dead letters: by filter, with decisions about chosen ones, or about all that match.

A decision takes two steps. The first counts and shows its extent; the second carries it out to
exactly that extent, as a job. Messages that become dead letters in between are left alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
from starlette.responses import Response

from saf.errors import UsageError
from saf.operating import decide
from saf.operating.decide import Decision
from saf.setaside import dead, staying
from saf.setaside.dead import REASONS, Filter
from saf.setaside.staying import Counted
from saf.ui.choosing import begin, chosen, moment_of
from saf.ui.site import Visit

ROWS = 50
ROWS_OF_EACH = 10
"""Dead letters to show per broker while no broker is chosen."""
MOST = 1_000_000
"""Most dead letters to count before a decision."""
ACTIONS = ("retry", "redirect", "discard")
FIELDS = ("reason", "service", "destination", "key", "subscription", "error")


def letters(visit: Visit) -> Response:
    """Show dead letters, the oldest first."""
    broker, wanted = visit.given("broker"), _wanted(visit)
    wanted = replace(wanted, after=dead.place_at(visit.given("after")))
    rows = ROWS if broker else ROWS_OF_EACH

    answers = visit.site.brokers.ask(
        lambda connection: dead.page(connection, wanted, rows), [broker] if broker else None
    )
    pages = answers.found
    shown = [(name, letter) for name, page in pages.items() for letter in page.shown]
    if broker is None:
        shown.sort(key=lambda row: row[1].dead_letter_at)
    return visit.page(
        "dead.html",
        title="Dead letters",
        letters=shown,
        more=sorted(name for name, page in pages.items() if page.next),
        last=pages[broker].next if broker and broker in pages else None,
        errors=answers.errors,
        reasons=REASONS,
        wanted=wanted,
        before=visit.given("before"),
        broker=broker,
        destinations=[*visit.site.settings.destinations],
    )


def confirm(visit: Visit) -> Response:
    """Count the dead letters that a decision covers, and ask for the reason."""
    action, to = _action(visit), visit.given("to")
    target = to if action == "redirect" else None

    def count(selection: Filter, connection: psycopg.Connection[Any]) -> Counted:
        return dead.count(connection, selection, MOST, to=target)

    answers = visit.site.brokers.ask_each(
        {name: partial(count, selection) for name, selection in _chosen(visit).items()}
    )
    counts = answers.found
    return visit.page(
        "dead_confirm.html",
        title=action.capitalize(),
        action=action,
        to=to,
        counts={name: counted for name, counted in counts.items() if counted.messages},
        stays=staying.in_words(counted.stays for counted in counts.values()),
        errors=answers.errors,
        wanted=_wanted(visit),
        before=visit.given("before"),
        broker=visit.given("broker"),
        ids=visit.form.get("id", []) if not visit.given("matching") else [],
        matching=visit.given("matching"),
        messages=sum(counted.messages for counted in counts.values()),
        more=any(counted.more for counted in counts.values()),
    )


def decide_(visit: Visit) -> Response:
    """Begin the confirmed job."""
    action, to = _action(visit), visit.given("to")
    decision: Decision[Filter]
    if action == "redirect":
        decision, title = partial(decide.redirect, to=to or ""), f"redirect to {to}"
    else:
        decision, title = {"retry": decide.retry, "discard": decide.discard}[action], action
    return begin(visit, decision, _chosen(visit), what=title, about="dead letters")


def _action(visit: Visit) -> str:
    action, to = visit.given("action") or "", visit.given("to")
    if action not in ACTIONS:
        raise UsageError(f"unknown action {action!r}, only {', '.join(ACTIONS)}")
    if action == "redirect" and to not in visit.site.settings.destinations:
        raise UsageError("redirect where? Choose one of the destinations of saf.toml")
    return action


def _chosen(visit: Visit) -> dict[str, Filter]:
    """Return the filter for each broker that a form has chosen."""
    return chosen(
        visit, _wanted(visit), lambda numbers: Filter(dead_letter_ids=numbers), "dead letters"
    )


def _wanted(visit: Visit) -> Filter:
    given: dict[str, Any] = {name: visit.given(name) for name in FIELDS}
    if given["reason"] is not None and given["reason"] not in REASONS:
        raise UsageError(f"unknown reason {given['reason']!r}, only {', '.join(REASONS)}")
    return Filter(**given, before=moment_of(visit.given("before")))
