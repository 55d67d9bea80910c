"""Trace ids in the lines of the log."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from saf.telemetry.carried import context_of, on

if TYPE_CHECKING:
    from saf.received import Received


def trace_ids(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add ``trace_id`` and ``span_id`` of the current span: a processor of structlog.

    saf's commands use it. An application that configures structlog puts it before its renderer.
    """
    if on():
        from opentelemetry import trace

        current = trace.get_current_span().get_span_context()
        if current.is_valid:
            event.setdefault("trace_id", trace.format_trace_id(current.trace_id))
            event.setdefault("span_id", trace.format_span_id(current.span_id))
    return event


def trace_of(message: Received) -> dict[str, str]:
    """Return the trace id of a message as a field for the log; empty without a context."""
    context = context_of(message.headers_text)
    if context is None:
        return {}
    from opentelemetry import trace

    sender = trace.get_current_span(context).get_span_context()
    return {"trace_id": trace.format_trace_id(sender.trace_id)} if sender.is_valid else {}
