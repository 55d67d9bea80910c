"""What a message carries: the context of its sender, in its headers.

The propagators of OpenTelemetry say which headers these are: by default `traceparent`, `tracestate`
and `baggage` of the W3C. They are written once, by whoever sends the message, and nobody changes
them on the way. A header that the application gives by itself wins.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from saf.logger import Log

if TYPE_CHECKING:
    from opentelemetry.context import Context

log = Log("saf.tracing")

LOADED = "opentelemetry.context"
"""What is imported wherever there is a context."""

BAGGAGE = "baggage"

LONGEST = 8192
"""The longest value of a header that is carried or heeded; what W3C allows for baggage."""

LARGE = 16 * 1024
"""Headers of more characters get no context: so none makes them too large to be stored."""


def on() -> bool:
    """Whether this process has loaded OpenTelemetry; if not, there is no context anywhere."""
    return LOADED in sys.modules


def with_context(headers: str, given: Mapping[str, Any] | None) -> str:
    """Add the current context to the headers of a message that is about to be sent.

    Args:
        headers: the headers as a JSON object that is not empty.
        given: the headers that the application has given; these win.
    """
    if LOADED not in sys.modules:
        return headers
    from opentelemetry import context

    if not context.get_current() or len(headers) > LARGE:
        return headers
    taken = {name.lower() for name in given or ()}
    if taken & (fields() - {BAGGAGE}):
        # of a trace that the application has chosen: ours has nothing to do with it
        taken |= fields() - {BAGGAGE}
    new = {name: one for name, one in current().items() if name.lower() not in taken}
    return f"{headers[:-1]}, {json.dumps(new)[1:]}" if new else headers


def current() -> dict[str, str]:
    """The current context, as headers."""
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    with harmless():
        propagate.inject(carrier)
    return {name: one for name, one in carrier.items() if _heeded(one)}


def context_of(headers: str | None) -> Context | None:
    """The context that a message carries, by its headers as JSON text; None if it carries none."""
    carrier = carrier_of(headers)
    if not carrier:
        return None
    from opentelemetry import propagate
    from opentelemetry.context import Context

    with harmless():
        return propagate.extract(carrier, Context()) or None
    return None


def carrier_of(headers: str | None) -> dict[str, str]:
    """Those headers of a message, given as JSON text, that carry a context.

    Their values are printable ASCII, and not long; others are left out.
    """
    if headers is None or not on():
        return {}
    names, lowered = fields(), headers.lower()
    if not any(name in lowered for name in names):
        return {}
    try:
        said = json.loads(headers)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(said, dict):
        return {}
    return {
        name.lower(): one for name, one in said.items() if name.lower() in names and _heeded(one)
    }


def fields() -> frozenset[str]:
    """The names of the headers that carry a context, in small letters."""
    from opentelemetry import propagate

    return frozenset(name.lower() for name in propagate.get_global_textmap().fields)


@contextmanager
def harmless() -> Iterator[None]:
    """Let nothing that a propagator raises leave the block; the log says it once in a process."""
    try:
        yield
    except UnicodeError:  # an application's baggage that is no text
        pass
    except Exception as error:
        _say(f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."))


@cache
def _say(kind: str) -> None:
    log.warning("tracing_failed", error_type=kind, hint="look at OTEL_PROPAGATORS")


def _heeded(value: object) -> bool:
    r"""Whether a value may be that of a header that carries a context.

    >>> _heeded("userId=alice"), _heeded("a\nb"), _heeded("ü"), _heeded(7), _heeded("a" * 9000)
    (True, False, False, False, False)
    """
    return (
        isinstance(value, str) and len(value) <= LONGEST and value.isascii() and value.isprintable()
    )
