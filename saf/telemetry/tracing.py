"""Traces: spans of saf's work, and the ids of traces in the lines of the log.

    send DESTINATION        a chunk that is stored at a destination; links to its messages
    receive SUBSCRIPTION    a delivery of `saf.receive` or `saf.areceive`; links to its messages
    process SUBSCRIPTION    a message that is handled, in its sender's trace; with links instead if
                            one call handles several messages
    dispatch ENDPOINT       a request of a dispatcher, in its message's trace, which continues at
                            the endpoint; with links instead if it has several messages

Names and attributes follow OpenTelemetry's semantic conventions for messaging, as of `SCHEMA`;
attributes that they do not define begin with ``saf.``. Only recorded spans have links, to at most
`MOST_LINKS` messages. A span that ends with an exception has the exception's type; its text is only
in the log, which knows what to hide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from uuid import UUID

from saf.telemetry.carried import BAGGAGE, LARGE, context_of, current, fields, harmless, on

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

    from saf.received import Received

SCHEMA = "https://opentelemetry.io/schemas/1.44.0"

MOST_LINKS = 32
"""Most messages that a span links to."""

MOST_LOOKED_AT = 1024
"""Most messages of a chunk, spread evenly, that are searched for a context."""

Carried = tuple[bytes | UUID, str | None]
"""A message's id, and its headers as JSON text."""


def records() -> bool:
    """Return whether this process records spans."""
    if not on():
        return False
    from opentelemetry import trace

    none = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
    return not isinstance(trace.get_tracer_provider(), none)


@contextmanager
def forwarding(destination: str, rows: Any) -> Iterator[None]:
    """Run the block that stores a chunk, an Arrow table, at a destination."""
    if not on():
        yield
        return
    batch = {"messaging.batch.message_count": len(rows)}
    with _span("send", "send", "CLIENT", destination, None, batch) as span:
        if span.is_recording():
            _link(span, _sampled(rows))
        yield


@contextmanager
def receiving(subscription: str, messages: Sequence[Received]) -> Iterator[None]:
    """Run the block in which an application processes a delivery; an empty delivery has no span."""
    if not on() or not messages:
        yield
        return
    batch = {"messaging.batch.message_count": len(messages)}
    attributes = {**_of_subscription(subscription, messages[0]), **batch}
    with _span("receive", "receive", "CLIENT", subscription, None, attributes) as span:
        if span.is_recording():
            _link(span, _carried(messages))
        yield


@contextmanager
def processing(subscription: str, messages: Sequence[Received]) -> Iterator[None]:
    """Run the block that handles messages: one in its sender's trace, with its baggage."""
    if not on() or not messages:
        yield
        return
    attributes = _of_subscription(subscription, messages[0])
    with _about(messages, "process", "process", subscription, attributes):
        yield


@contextmanager
def traced(message: Received) -> Iterator[None]:
    """Handle a message of a delivery in its sender's trace.

        with saf.receive(engine, "billing") as delivery:
            for message in delivery:
                with saf.traced(message):
                    …

    The block's spans and messages continue the trace, and the sender's baggage is available.
    Workers and processors do this themselves. Without OpenTelemetry, this does nothing.
    """
    with processing(message.service, [message]):
        yield


class Dispatched:
    """One request to an endpoint."""

    def __init__(self, span: Span | None = None) -> None:
        self._span = span

    def going_on(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return the request's headers, with those that continue the trace at the endpoint."""
        if self._span is None:
            return headers
        carrier = current()
        names = {name.lower() for name in carrier}
        kept = {name: value for name, value in headers.items() if name.lower() not in names}
        return {**kept, **carrier}

    def answered(self, status: int | None, problem: str | None) -> None:
        """Record the HTTP status, if there was an answer, and the problem, if any."""
        if self._span is None:
            return
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
        if problem is not None:
            _failed(self._span, problem)


@contextmanager
def dispatching(endpoint: str, messages: Sequence[Received]) -> Iterator[Dispatched]:
    """Run the block that sends messages to an endpoint in one request."""
    if not on():
        yield Dispatched()
        return
    with _about(messages, "dispatch", "process", endpoint, {}) as span:
        yield Dispatched(span)


@contextmanager
def _about(
    messages: Sequence[Received],
    operation: str,
    kind: str,
    destination: str,
    extra: Mapping[str, AttributeValue],
) -> Iterator[Span]:
    """Open a consumer's span: in the trace of its only message, or with links to several."""
    if len(messages) == 1:
        (one,) = messages
        parent = context_of(one.headers_text)
        with _span(operation, kind, "CONSUMER", destination, parent, {**extra, **_of(one)}) as span:
            yield span
        return
    batch = {**extra, "messaging.batch.message_count": len(messages)}
    with _span(operation, kind, "CONSUMER", destination, None, batch) as span:
        if span.is_recording():
            _link(span, _carried(messages))
        yield span


@contextmanager
def _span(  # noqa: PLR0917 - all are different
    operation: str,
    type_: str,
    kind: str,
    destination: str,
    parent: Context | None,
    extra: Mapping[str, AttributeValue],
) -> Iterator[Span]:
    from opentelemetry import context, trace

    attributes: dict[str, AttributeValue] = {
        "messaging.system": "saf",
        "messaging.operation.name": operation,
        "messaging.operation.type": type_,
        "messaging.destination.name": destination,
        **extra,
    }
    token = None if parent is None else context.attach(parent)
    try:
        with trace.get_tracer("saf", _version(), schema_url=SCHEMA).start_as_current_span(
            f"{operation} {destination}",
            kind=trace.SpanKind[kind],
            attributes=attributes,
            # their texts may contain data that must stay hidden
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except Exception as error:
                _failed(span, f"{type(error).__module__}.{type(error).__qualname__}")
                raise
    finally:
        if token is not None:
            context.detach(token)


def _failed(span: Span, kind: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", kind.removeprefix("builtins."))
    span.set_status(StatusCode.ERROR)


def _of_subscription(subscription: str, message: Received) -> dict[str, AttributeValue]:
    return {
        "messaging.destination.name": message.service,
        "messaging.destination.subscription.name": subscription,
    }


def _of(message: Received) -> dict[str, AttributeValue]:
    """Return a span's attributes for its only message: no key, and nothing of its content."""
    attributes: dict[str, AttributeValue] = {
        "messaging.message.id": str(message.message_id),
        "messaging.message.body.size": message.size,
        "saf.message.attempt": message.attempt,
    }
    if message.message_type is not None:
        attributes["saf.message.type"] = message.message_type
    if message.conversation_id is not None:
        attributes["messaging.message.conversation_id"] = str(message.conversation_id)
    return attributes


def _carried(messages: Sequence[Received]) -> Iterator[Carried]:
    return ((message.message_id, message.headers_text) for message in messages[:MOST_LINKS])


def _sampled(rows: Any) -> Iterator[Carried]:
    """Return some messages of a chunk that may carry a context; Arrow searches for them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = fields() - {BAGGAGE}
    if not names:
        return
    step = -(-len(rows) // MOST_LOOKED_AT) or 1
    sample = rows.select(["message_id", "headers"]).take(pa.array(range(0, len(rows), step)))
    found = pa.scalar(False)
    for name in names:
        found = pc.or_kleene(found, pc.match_substring(sample["headers"], name))
    sample = sample.filter(found).slice(0, MOST_LINKS)
    yield from zip(*(column.to_pylist() for column in sample.columns), strict=True)


def _link(span: Span, messages: Iterator[Carried]) -> None:
    """Link to messages; errors are suppressed, because no message is to blame for them."""
    with harmless():
        _link_to(span, messages)


def _link_to(span: Span, messages: Iterator[Carried]) -> None:
    from opentelemetry import trace

    for message_id, headers in messages:
        context = context_of(headers) if len(headers or "") <= LARGE else None
        if context is None:
            continue
        sender = trace.get_current_span(context).get_span_context()
        if sender.is_valid:
            number = message_id if isinstance(message_id, UUID) else UUID(bytes=message_id)
            span.add_link(sender, {"messaging.message.id": str(number)})


@cache
def _version() -> str:
    return version("saf-outbox")


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
