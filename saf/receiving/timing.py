"""Timing: how long handlers take, where this process keeps metrics; otherwise nothing is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saf.metrics.declared import HANDLER_SECONDS
from saf.metrics.process import counting, timed


def watched(
    call: Callable[[], Any], subscription: str, *, waits: bool = False
) -> Callable[[], Any]:
    """Return a call of a handler whose duration is counted; ``waits`` says whether it is async."""
    if not counting():
        return call
    if waits:

        async def awaited() -> Any:
            with timed(HANDLER_SECONDS, subscription=subscription):
                return await call()

        return awaited

    def called() -> Any:
        with timed(HANDLER_SECONDS, subscription=subscription):
            return call()

    return called
