"""The sender's context, carried in a message's headers.

OpenTelemetry's propagators define the headers: by default W3C's `traceparent`, `tracestate` and
`baggage`. The sender writes them once, and nothing changes them on the way. A header that the
application sets itself takes precedence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from saf.telemetry.logger import Log

if TYPE_CHECKING:
    from opentelemetry.context import Context

log = Log("saf.tracing")

LOADED = "opentelemetry.context"
"""Module that is loaded wherever a context exists."""

BAGGAGE = "baggage"

LONGEST = 8192
"""Longest value of such a header, in characters, to write or to read; W3C's limit for baggage."""

LARGE = 16 * 1024
"""Longer headers get no context, so that a context never makes them too large to be stored."""


def on() -> bool:
    """Return whether this process has loaded OpenTelemetry; if not, no context exists."""
    return LOADED in sys.modules


def with_context(headers: str, given: Mapping[str, Any] | None) -> str:
    """Add the current context to the headers of a message to be sent.

    Args:
        headers: the headers as a JSON object that is not empty.
        given: the headers that the application has set; they take precedence.
    """
    if LOADED not in sys.modules:
        return headers
    from opentelemetry import context

    if not context.get_current() or len(headers) > LARGE:
        return headers
    known = {name.lower() for name in given or ()}
    if known & (fields() - {BAGGAGE}):
        # they belong to a trace that the application has chosen, unrelated to the current one
        known |= fields() - {BAGGAGE}
    new = {name: value for name, value in current().items() if name.lower() not in known}
    return f"{headers[:-1]}, {json.dumps(new)[1:]}" if new else headers


def current() -> dict[str, str]:
    """Return the current context as headers."""
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    with harmless():
        propagate.inject(carrier)
    return {name: value for name, value in carrier.items() if _heeded(value)}


def context_of(headers: str | None) -> Context | None:
    """Return the context in a message's headers, given as JSON text; None if they have none."""
    carrier = carrier_of(headers)
    if not carrier:
        return None
    from opentelemetry import propagate
    from opentelemetry.context import Context

    with harmless():
        return propagate.extract(carrier, Context()) or None
    return None


def carrier_of(headers: str | None) -> dict[str, str]:
    """Return the headers of a message, given as JSON text, that carry a context.

    Only short values of printable ASCII are returned.
    """
    if headers is None or not on():
        return {}
    names, lowered = fields(), headers.lower()
    if not any(name in lowered for name in names):
        return {}
    try:
        given = json.loads(headers)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(given, dict):
        return {}
    return {
        name.lower(): one for name, one in given.items() if name.lower() in names and _heeded(one)
    }


def fields() -> frozenset[str]:
    """Return the names, in lower case, of the headers that carry a context."""
    from opentelemetry import propagate

    return frozenset(name.lower() for name in propagate.get_global_textmap().fields)


@contextmanager
def harmless() -> Iterator[None]:
    """Suppress all errors of a propagator; log each type once per process."""
    try:
        yield
    except UnicodeError:  # an application's baggage is not text
        pass
    except Exception as error:
        _say(f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."))


@cache
def _say(kind: str) -> None:
    log.warning("tracing_failed", error_type=kind, hint="look at OTEL_PROPAGATORS")


def _heeded(value: object) -> bool:
    r"""Return whether a value is valid in a header that carries a context.

    >>> _heeded("userId=alice"), _heeded("a\nb"), _heeded("ü"), _heeded(7), _heeded("a" * 9000)
    (True, False, False, False, False)
    """
    return (
        isinstance(value, str) and len(value) <= LONGEST and value.isascii() and value.isprintable()
    )
