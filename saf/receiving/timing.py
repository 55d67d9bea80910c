"""Watching: durations and traces of handlers.

Processes that keep neither metrics nor traces skip this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from saf.metrics.declared import HANDLER_SECONDS
from saf.metrics.process import counting, timed
from saf.received import Received
from saf.tracing import carried
from saf.tracing.spans import processing


def watched(
    call: Callable[[], Any], subscription: str, messages: Sequence[Received], *, waits: bool = False
) -> Callable[[], Any]:
    """Return a handler's call, timed and traced. ``waits``: the handler is async."""
    if not counting() and not carried.on():
        return call
    if waits:

        async def awaited() -> Any:
            with (
                timed(HANDLER_SECONDS, subscription=subscription),
                processing(subscription, messages),
            ):
                return await call()

        return awaited

    def called() -> Any:
        with (
            timed(HANDLER_SECONDS, subscription=subscription),
            processing(subscription, messages),
        ):
            return call()

    return called
