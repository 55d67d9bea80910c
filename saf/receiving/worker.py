"""Workers: a worker calls a handler for each message, chosen by the message's type.

    worker = saf.Worker(engine, "billing")

    @worker.handler("OrderPlaced")
    def placed(message, connection):
        connection.execute(…)

    worker.run()                      # or, from a shell: saf worker module:worker

``@worker.handler(OrderPlaced)`` with an event's class (`saf.typed.event`) gets the event instead of
the message.

A `saf.receiving.loop` calls the handlers. A batch handler gets all of a delivery's messages of its
type in one call, in one savepoint, which is several times quicker; if it raises, it gets its
messages again one by one. The messages of a key stay in order across types: a batch ends where a
message for another handler follows for one of its keys (`runs`).

Each thread has its own connection and its own deliveries. An idle thread asks twice a second, by a
query that writes nothing; up to ten threads take turns with it, and more cost nothing.

A message without a handler waits for a worker that has one, and the later messages of its key wait
behind it. So old and new workers may run side by side while a new type is introduced.
``@worker.handler`` is for all types that have no handler of their own.

*Async handlers.* The handlers of a worker may be ``async def``. They run in one event loop, that of
`Worker.arun` or else the process's own (`own_loop`), and get an asyncio connection. Up to
``concurrency`` handlers run at the same time in one delivery, each for a message of another key
(`waves`). They share the delivery's transaction, so if one raises, the others' work is undone as
well, and all are called again one by one. Dialogs may be related, so only one dialog message is
handled at a time.

*The process's own event loop.* All workers of a process share it while at least one worker lives:
objects that handlers keep, such as a pool's connections, belong to the event loop that created
them, and a worker may run again. The end of the process does not wait for work of handlers that
cannot be cancelled: neither for calls that block the event loop, nor for calls in threads, such as
`asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from saf.database.background import Background
from saf.errors import UsageError
from saf.received import Received
from saf.receiving.asynchronous import EventLoop, aconnected
from saf.receiving.delivery import Delivery
from saf.receiving.failures import exception
from saf.receiving.handlers import (
    Handlers,
    OfEvent,
    OfEvents,
    Registered,
    checked_type,
    is_function,
    of_type,
    watched,
)
from saf.receiving.loop import Handling, Loop, OfUnhandled, log
from saf.receiving.retries import Policy
from saf.receiving.savepoints import Savepoints
from saf.receiving.stopping import STOP_SECONDS

if TYPE_CHECKING:
    from saf.receiving.link import AsyncEngine, Engine, Link
    from saf.signing.signer import Key, RequireSigned, Signer

T = TypeVar("T")
E = TypeVar("E")

P = ParamSpec("P")
H = TypeVar("H", bound=Callable[..., object])

BEGIN_SECONDS = 5.0
"""Longest time that `Worker.running` waits for a worker to receive."""

LOOK_SECONDS = 0.02
"""Interval at which `Worker.running` looks whether its worker receives."""

END_SECONDS = 1.0
"""Time limit for an event loop to answer, and to end."""


class Worker(Loop):
    """Handle the messages of one subscription.

    Args:
        engine: as for `saf.receive`, or for `saf.areceive` if handlers are async; each thread takes
            one connection from it.
        subscription: the subscription to receive from; each service has a subscription of its own
            name.
        max_messages: maximum number of messages in one transaction.
        threads: number of deliveries that this process handles at a time.
        concurrency: maximum number of async handlers that run at the same time in one delivery, for
            messages of different keys.
        policy: how to treat messages whose handling fails.
        listen: be notified of new messages; see `saf.receiving.link`.
        stop_timeout: seconds that the messages in hand may take after SIGTERM, SIGINT or `stop`;
            then they are rolled back, and `run` raises `StopTimeout`.
        unhandled: treatment of a message whose type has no handler: "wait" until a worker has one,
            or "dead", a dead letter.
        require_signed: hand only messages that are signed with one of the ``keys`` to handlers;
            "origin" requires the signatures of their first senders; as for `saf.receive`.
        keys: the keys that senders sign with; as for `saf.receive`.
        signer: signs what handlers send on the dialogs of their messages.

    Raises:
        UsageError: a number is out of range, or keys to verify with are missing.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine,
        subscription: str,
        *,
        max_messages: int = 100,
        threads: int = 1,
        concurrency: int = 1,
        policy: Policy | None = None,
        listen: bool = False,
        stop_timeout: float = STOP_SECONDS,
        unhandled: OfUnhandled = "wait",
        require_signed: RequireSigned = False,
        keys: Mapping[str, Key] | None = None,
        signer: Signer | None = None,
    ) -> None:
        super().__init__(
            engine,
            subscription,
            max_messages=max_messages,
            threads=threads,
            policy=policy,
            listen=listen,
            stop_timeout=stop_timeout,
            unhandled=unhandled,
            require_signed=require_signed,
            keys=keys,
            signer=signer,
        )
        if concurrency < 1:
            raise UsageError(f"concurrency: {concurrency} is less than 1")
        self.concurrency = concurrency
        self._handlers = Handlers()
        self._event_loop: EventLoop | None = None
        """Event loop of async handlers, while this worker runs."""
        self._own_loop: OwnLoop | None = None
        """Reference that keeps the process's own event loop alive after this worker has used it."""

    @property
    def message_types(self) -> tuple[str, ...]:
        """Message types that have a handler of their own."""
        return tuple(sorted(name for name in self._handlers if name is not None))

    async def arun(self, *, drain: bool = False) -> int:
        """Run as `run` does, with handlers in the event loop of this task.

        If the task is cancelled, the worker stops in order, and then this raises CancelledError. If
        the task is cancelled again before that, this raises immediately; the handlers are cancelled
        too, and their deliveries are rolled back. Signals are left to the application.

        Raises:
            ConfigurationError, UsageError, Refused, StopTimeout, Unavailable: as `run`.
        """
        loop = EventLoop(asyncio.get_running_loop())
        # a thread of its own: the event loop has few for others, and its end waits for them
        thread = Background(1, f"saf {self.subscription}")
        running = asyncio.wrap_future(thread.submit(partial(self._run_in, loop, drain=drain)))
        thread.dismiss()
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self.stop()
            await asyncio.wait([running])
            running.result()  # raises an error of the stop
            raise
        finally:
            loop.cancel()
            if running.cancel():
                # the event loop may end now, and some threads cannot return without it
                self._stopping.hurry(END_SECONDS)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[int]]:
        """Run as `arun` does while a block runs; at its end, stop in order.

            @asynccontextmanager
            async def lifespan(app):
                async with worker.running():
                    yield

        The block begins once the worker receives, or after five seconds if its database does not
        answer yet. The block gets the worker's task. If the worker ends before the block, the error
        is logged immediately, and raised at the end of the block.

        Raises:
            ConfigurationError, UsageError, Refused, StopTimeout, Unavailable: as `run`.
        """
        self._begun.clear()
        task = asyncio.create_task(self.arun(), name=f"saf {self.subscription}")
        try:
            deadline = time.monotonic() + BEGIN_SECONDS
            while not (task.done() or self._begun.is_set() or time.monotonic() > deadline):
                await asyncio.wait([task], timeout=LOOK_SECONDS)
            if task.done():
                task.result()  # raises its error
            task.add_done_callback(self._say_ended)
            yield task
        finally:
            task.remove_done_callback(self._say_ended)
            if not task.done():
                self.stop()
            await task
            self._stopping.begin_anew()

    def _say_ended(self, task: asyncio.Task[int]) -> None:
        error = None if task.cancelled() else task.exception()
        detail = "it was stopped" if error is None else str(error)
        log.error("worker_ended", subscription=self.subscription, detail=detail)

    @overload
    def handler(self, message_type: type[E]) -> OfEvent[E]: ...
    @overload
    def handler(self, message_type: str | None = None) -> Callable[[H], H]: ...
    @overload
    def handler(self, message_type: H) -> H: ...
    def handler(self, message_type: Any = None) -> Any:
        """Register a function of (message, connection) for a type; None: for all other types.

        ``@worker.handler`` without parentheses registers the function for all other types, too.

        For an event's class, it is a function of (event, connection), or of (event, connection,
        message); see `saf.event`. The function may be async if all of the worker's handlers are.

        Raises:
            UsageError: the type already has a handler, or is neither text nor an event's class; or
                the function does not take these arguments.
        """
        return self._register(message_type, batch=False)

    @overload
    def batch_handler(self, message_type: type[E]) -> OfEvents[E]: ...
    @overload
    def batch_handler(self, message_type: str | None = None) -> Callable[[H], H]: ...
    @overload
    def batch_handler(self, message_type: H) -> H: ...
    def batch_handler(self, message_type: Any = None) -> Any:
        """Register a function of (messages, connection) for a type; otherwise like `handler`."""
        return self._register(message_type, batch=True)

    def _check(self) -> None:
        if not self._handlers:
            raise UsageError(f"the worker for {self.subscription!r} has no handler")
        if self.concurrency > 1 and not self._handlers.are_async:
            raise UsageError(
                f"concurrency ({self.concurrency}) is for async handlers: for others, "
                "set the number of threads"
            )

    def _run_in(self, loop: EventLoop, *, drain: bool) -> int:
        """Run with async handlers in this event loop while any thread may call one."""
        if self._handlers.are_async:
            self._event_loop = loop
        try:
            return self.run(drain=drain)
        finally:
            if self._event_loop is loop:
                self._event_loop = None

    @contextmanager
    def _equipped(self) -> Iterator[None]:
        if self._event_loop is not None or not self._handlers.are_async:
            yield
            return
        self._own_loop = own_loop()
        loop = self._event_loop = EventLoop(self._own_loop.loop)
        try:
            yield
        finally:
            self._event_loop = None
            loop.end(END_SECONDS)

    def _connected(self) -> AbstractContextManager[Link]:
        loop = self._event_loop
        if loop is None:
            return super()._connected()
        return aconnected(self.engine, loop, self.subscription)

    def handled_types(self) -> Sequence[str | None]:
        """Return the message types that have handlers; None: all other types."""
        return [*self._handlers]

    def _handle(self, delivery: Delivery[Any], work: Savepoints) -> None:
        if not any(registered.batch for registered in self._handlers.values()):
            self._singles(delivery, work, delivery)
            return
        for handler, messages in runs(delivery, self._handlers.of):
            if (
                handler is not None
                and handler.batch
                and self._batch(delivery, work, handler, messages)
            ):
                continue
            self._singles(delivery, work, delivery.still(messages))

    def _batch(
        self,
        delivery: Delivery[Any],
        work: Savepoints,
        handler: Registered,
        messages: list[Received],
    ) -> bool:
        """Handle a run of messages by one call; False if the call failed and is undone."""
        rest = list(delivery.still(messages))
        if not rest:
            return True
        self._stopping.in_hand[threading.get_ident()] = rest[:1]
        try:
            with work.piece():
                call = partial(handler.call, rest, delivery.connection)
                self._do(watched(call, self.subscription, rest, waits=handler.waits))
        except Exception as error:
            if work.raw.broken:
                raise
            self._say_undone("batch_failed", work, rest, error, message_type=rest[0].message_type)
            return False
        return True

    def _singles(
        self, delivery: Delivery[Any], work: Savepoints, messages: Iterable[Received]
    ) -> None:
        """Handle messages by a call each, up to ``concurrency`` at the same time."""
        if self.concurrency == 1:
            for message in messages:
                self._single(delivery, work, message)
            return
        for wave in waves(messages, self.concurrency):
            group = []
            for message in delivery.still(wave):
                if self._handlers.of(message) is None:
                    self._single(delivery, work, message)
                else:
                    group.append(message)
            if group[1:]:
                self._together(delivery, work, group)
            else:
                for message in group:
                    self._single(delivery, work, message)

    def _single(self, delivery: Delivery[Any], work: Savepoints, message: Received) -> None:
        handler = self._handlers.of(message)
        if handler is None:
            self._unhandled(delivery, work, message, self._handlers)
        else:
            call = handler.call_for(message, delivery.connection)
            call = watched(call, self.subscription, [message], waits=handler.waits)
            if handler.waits:
                call = partial(self._do, call)
            self._one(delivery, work, message, call)

    def _together(
        self, delivery: Delivery[Any], work: Savepoints, messages: Sequence[Received]
    ) -> None:
        """Handle messages of different keys, which all have handlers, at the same time."""
        calls, pieces = [], []
        for message in messages:
            handler = self._handlers.of(message)
            assert handler is not None  # noqa: S101 - they have handlers
            call = handler.call_for(message, delivery.connection)
            call = watched(call, self.subscription, [message], waits=handler.waits)
            calls.append(call)
            pieces.append(Handling(self, delivery, work.raw, message, partial(self._do, call)))
        self._stopping.in_hand[threading.get_ident()] = messages
        work.do_together(
            pieces,
            lambda: self._do(*calls),
            partial(self._say_undone, "together_failed", work, messages),
        )

    def _say_undone(
        self,
        event: str,
        work: Savepoints,
        messages: Sequence[Received],
        error: Exception,
        **fields: object,
    ) -> None:
        log.warning(
            event,
            subscription=self.subscription,
            **fields,
            messages=len(messages),
            detail="they are handed over one by one",
            **exception(error, work.raw, *messages),
        )

    def _do(self, *calls: Callable[[], Any]) -> None:
        """Call handlers: in the event loop at the same time, or here."""
        loop = self._event_loop
        if not self._handlers.are_async:
            for call in calls:
                call()
        elif loop is None:
            # the loop is gone, and this delivery must be undone: a CancelledError, which is no
            # Exception
            raise asyncio.CancelledError
        else:
            loop.call(calls)

    def _register(self, given: Any, *, batch: bool) -> Any:
        if is_function(given):
            self._handlers.add(None, given, batch=batch)
            return given
        message_type = None if given is None else checked_type(given)

        def register(call: H) -> H:
            name, handler = of_type(message_type, call, batch=batch)
            self._handlers.add(name, handler, batch=batch)
            return call

        return register


def runs(
    messages: Iterable[Received], handler_of: Callable[[Received], T]
) -> Iterator[tuple[T, list[Received]]]:
    """Group messages by handler, in as few runs as the order of each key allows."""
    runs: dict[T, list[Received]] = {}
    last: dict[str, T] = {}
    for message in messages:
        handler = handler_of(message)
        if message.key is not None:
            before = last.get(message.key, handler)
            if before is not handler and before in runs:
                yield before, runs.pop(before)
            last[message.key] = handler
        runs.setdefault(handler, []).append(message)
    yield from runs.items()


def waves(messages: Iterable[Received], width: int) -> Iterator[list[Received]]:
    """Group messages into waves of up to ``width`` that may run at the same time, in order by key.

    All messages of dialogs count as one key, because dialogs may be related.
    """
    left = list(messages)
    while left:
        wave: list[Received] = []
        rest: list[Received] = []
        keys: set[str | None] = set()
        for message in left:
            key = message.lane if message.conversation_id is None else None
            (wave if len(wave) < width and key not in keys else rest).append(message)
            keys.add(key)
        yield wave
        left = rest


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
