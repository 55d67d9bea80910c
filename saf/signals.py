"""SIGTERM and SIGINT as stop requests: work in hand is finished, and no more is taken."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

BOTH = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at the first SIGTERM or SIGINT; a second signal ends the process.

    Only the main thread can handle signals; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_: int, __: FrameType | None) -> None:
        stop()
        for number in BOTH:
            signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, handle) for number in BOTH}
    try:
        yield
    finally:
        for number, handler in before.items():
            # Python reports no handler if it was not set from Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
