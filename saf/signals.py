"""SIGTERM and SIGINT as stop requests: work in hand is finished, and no more is taken.

While a command imports its modules, and while Python ends, nothing is in hand. There, Ctrl-C is to
end the process at once: `end_at_interrupt` at the beginning and the end of a command, and
`raise_at_interrupt` when its work begins.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

BOTH = (signal.SIGTERM, signal.SIGINT)

INTERRUPTED = 130
"""The exit code after Ctrl-C, as of a shell."""


def end_at_interrupt() -> None:
    """Let Ctrl-C end this process from now on, in silence, if it would raise KeyboardInterrupt."""
    _replace(signal.default_int_handler, _end)


def raise_at_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again after `end_at_interrupt`; else do nothing."""
    _replace(_end, signal.default_int_handler)


def _replace(before: Callable[..., Any], handler: Callable[..., Any]) -> None:
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, handler)


def _end(_: int, __: FrameType | None) -> None:
    os._exit(INTERRUPTED)


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
