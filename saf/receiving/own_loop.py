"""The process's own event loop, which runs async handlers if the application has none.

All workers of a process share it while at least one worker lives: objects that handlers keep, such
as a pool's connections, belong to the event loop that created them, and a worker may run again.

The end of the process does not wait for work of handlers that cannot be cancelled: neither for
calls that block the event loop, nor for calls in threads, such as `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from saf.database.background import Background

END_SECONDS = 1.0
"""Time limit for an event loop to answer, and to end."""

P = ParamSpec("P")
T = TypeVar("T")

_turn = threading.Lock()
_shared: weakref.ref[OwnLoop] | None = None


def own_loop() -> OwnLoop:
    """Return this process's own event loop; start one if none answers."""
    global _shared  # noqa: PLW0603 one for the process
    with _turn:
        current = None if _shared is None else _shared()
        if current is None or not current.answers():
            current = OwnLoop()
            _shared = weakref.ref(current)
        return current


class OwnLoop:
    """An event loop in its own thread, until this object is unreferenced or the process ends."""

    def __init__(self) -> None:
        started: Future[asyncio.AbstractEventLoop] = Future()
        # a daemon, because a handler that blocks it must not keep the process from ending
        self._thread = threading.Thread(
            target=_run, args=[started], name="saf handlers", daemon=True
        )
        self._thread.start()
        self.loop = started.result()
        end = weakref.finalize(self, _end, self.loop, self._thread)
        # registered here, to run before everything that the process has registered earlier
        end.atexit = False
        atexit.register(end)

    def answers(self) -> bool:
        """Return whether the thread lives, which it does not in a fork, and nothing blocks it."""
        answer = threading.Event()
        if not self._thread.is_alive():
            return False
        self.loop.call_soon_threadsafe(answer.set)
        return answer.wait(END_SECONDS)


class Detached(ThreadPoolExecutor):
    """Threads for calls that may hang: the process does not wait for them."""

    def __init__(self) -> None:
        threads = min(32, (os.cpu_count() or 1) + 4)  # asyncio's default
        super().__init__(threads)
        self._background = Background(threads, "saf handlers' calls")

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call when a thread is free."""
        return self._background.submit(partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 the executor's form
        """Let the threads end after their current calls."""
        self._background.dismiss()


def _run(started: Future[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner() as runner:  # cancels the remaining tasks at its end
        loop = runner.get_loop()
        loop.set_default_executor(Detached())
        started.set_result(loop)
        loop.run_forever()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if thread.is_alive():
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(END_SECONDS)
