"""One message from its sender to its handlers."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
from starlette.responses import Response

from saf.errors import UsageError
from saf.operating import journey
from saf.operating.journey import Stay
from saf.ui.brokers import PATIENCE_SECONDS
from saf.ui.site import Visit

SECONDS = PATIENCE_SECONDS / 3
"""The bound of a statement: several follow each other."""


def message(visit: Visit) -> Response:
    """Show where a message is in all brokers, or the form that asks for one."""
    given, key = visit.given("id"), visit.given("key")
    if given is None:
        return visit.page("message.html", title="Message", wanted=None, key=None)
    try:
        wanted = UUID(given)
    except ValueError:
        raise UsageError(f"{given!r} is no message id, which is a UUID") from None
    show_body = visit.site.settings.ui.bodies

    def ask(connection: psycopg.Connection[Any]) -> tuple[Stay, bytes | None]:
        there = journey.stay(connection, wanted, key, seconds=SECONDS)
        return there, journey.body(connection, there) if show_body else None

    answers = visit.site.brokers.ask(ask)
    known = {name: there for name, (there, _) in answers.found.items() if not there.nothing}
    bodies = [body for _, body in answers.found.values() if body is not None]
    first = next((one.sent or one.stored for one in known.values() if one.sent or one.stored), None)
    redaction = visit.site.redaction
    return visit.page(
        "message.html",
        title="Message",
        wanted=wanted,
        key=key,
        known=dict(sorted(known.items(), key=lambda one: one[1].sent is None)),
        headers=redaction.headers(first.headers) if first is not None else {},
        conversation=first.conversation_id if first is not None else None,
        body=redaction.body(bodies[0]) if bodies else None,
        show_body=show_body,
        errors=answers.errors,
    )
