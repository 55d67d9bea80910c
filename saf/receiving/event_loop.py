"""Event loop that runs coroutines for a thread that waits for them.

A receiver is synchronous and runs in its own thread. To await a handler or an asyncio connection,
it submits a coroutine to an event loop of another thread and waits for its result. The loop is the
application's own if it has one, and otherwise that of `saf.receiving.own_loop`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs coroutines in an event loop, for other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: set[asyncio.Task[Any]] = set()
        self._cancelled = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. Do not call this in the loop's own thread."""
        return asyncio.run_coroutine_threadsafe(self._noted(coroutine), self._loop).result()

    def call(self, calls: Sequence[Callable[[], Awaitable[object]]]) -> None:
        """Call handlers at the same time, each to its end; then raise the first error, if any.

        After `cancel`, this calls no handler and raises asyncio's CancelledError. CancelledError is
        not an Exception, so it counts as no handler's failure: it undoes the whole delivery.
        """

        async def unless_cancelled() -> None:
            self._refuse_if_cancelled()
            await all_of(calls)

        self._refuse_if_cancelled()
        # any Exception, because a handler may turn the cancellation into an error of its own
        try:
            self.run(unless_cancelled())
        except Exception:
            self._refuse_if_cancelled()
            raise

    def cancel(self) -> None:
        """Cancel the running coroutines; callers that wait for them wait until they have ended."""
        self._cancelled = True
        self._loop.call_soon_threadsafe(self._cancel)

    def end(self, seconds: float) -> None:
        """Cancel the running coroutines; wait up to ``seconds``. Not for the loop's own thread."""
        self.cancel()
        ended = asyncio.run_coroutine_threadsafe(self._ended(), self._loop)
        with suppress(TimeoutError):
            ended.result(seconds)
        ended.cancel()

    async def _ended(self) -> None:
        while self._running:
            await asyncio.wait([*self._running])

    async def _noted(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in a task
        self._running.add(task)
        try:
            return await coroutine
        finally:
            self._running.discard(task)

    def _refuse_if_cancelled(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError

    def _cancel(self) -> None:
        for task in self._running:
            task.cancel()


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call in a thread. A cancelled caller waits until the call, which cannot stop, ends.

    The caller may have locked objects that the call uses.
    """
    context = contextvars.copy_context()
    running = asyncio.get_running_loop().run_in_executor(None, context.run, call)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()
        raise cancelled
    return running.result()


async def all_of(calls: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Run calls at the same time, each to its end; then raise the first error, if any."""

    async def one(call: Callable[[], Awaitable[object]]) -> None:
        await call()

    if len(calls) == 1:
        await calls[0]()
        return
    results = await asyncio.gather(*map(one, calls), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
