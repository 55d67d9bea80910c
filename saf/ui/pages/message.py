"""One message from its sender to its handlers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import psycopg
from starlette.responses import Response

from saf.config import TRACE_ID
from saf.errors import UsageError
from saf.operating import journey
from saf.operating.journey import Stay
from saf.ui.brokers import PATIENCE_SECONDS
from saf.ui.site import Visit

TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
"""A context of W3C's Trace Context: its version, the trace, the span, flags."""

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
    headers = redaction.headers(first.headers) if first is not None else {}
    return visit.page(
        "message.html",
        title="Message",
        wanted=wanted,
        key=key,
        known=dict(sorted(known.items(), key=lambda one: one[1].sent is None)),
        headers=headers,
        trace=trace_of(headers, visit.site.settings.ui.trace_url),
        conversation=first.conversation_id if first is not None else None,
        body=redaction.body(bodies[0]) if bodies else None,
        show_body=show_body,
        errors=answers.errors,
    )


def trace_of(headers: Mapping[str, str], url: str | None) -> str | None:
    """Return where a message's trace is shown; None if it has none, it is hidden, or no such place.

    >>> context = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    >>> trace_of(context, "https://traces.example/trace/{trace_id}?from=saf")
    'https://traces.example/trace/4bf92f3577b34da6a3ce929d0e0e4736?from=saf'
    >>> trace_of({"traceparent": "00-<b>-1-01"}, "https://traces.example/{trace_id}")
    >>> trace_of(context, None)
    """
    found = TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return url.replace(TRACE_ID, found[1]) if url is not None and found is not None else None
