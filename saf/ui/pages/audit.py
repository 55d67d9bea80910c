"""The audit: who did what with messages, when and why."""

from __future__ import annotations

from starlette.responses import Response

from saf.setaside.audit import page, place_at
from saf.ui.site import Visit

ROWS = 50
ROWS_OF_EACH = 20


def audit(visit: Visit) -> Response:
    """Show operators' actions, the last first; for one broker, page by page."""
    broker = visit.given("broker")
    before = place_at(visit.given("after")) if broker else None
    rows = ROWS if broker else ROWS_OF_EACH
    answers = visit.site.brokers.ask(
        lambda connection: page(connection, rows, before), [broker] if broker else None
    )
    shown = [(name, entry) for name, found in answers.found.items() for entry in found.shown]
    shown.sort(key=lambda row: row[1].audit_at, reverse=True)
    more = sorted(name for name, found in answers.found.items() if found.next)
    return visit.page(
        "audit.html",
        title="Audit",
        rows=shown,
        more=more,
        last=answers.found[broker].next if broker and broker in answers.found else None,
        broker=broker,
        errors=answers.errors,
    )
