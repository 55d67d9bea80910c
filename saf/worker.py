"""Workers: handlers by message type, and the loop that feeds them.

    worker = saf.Worker(engine, "billing")

    @worker.handler("OrderPlaced")
    def placed(message, connection):
        connection.execute(…)

    worker.run()                      # or, from a shell: saf worker module:worker

A handler works on the delivery's connection, inside a savepoint: if it raises, its own work is
undone, the message is set aside with the error, and the rest of the delivery goes on (`saf.lanes`
says what happens to the message). A batch handler gets all messages of its type in a delivery at
once, in one savepoint, which is several times quicker; if it raises, its messages are handed to it
one by one. The types of one key are kept in order: a batch ends where a message of another handler
follows for one of its keys.

Each thread has a connection and takes deliveries of its own. One that finds nothing polls less and
less often, up to every `saf.receive.LONGEST_PAUSE_SECONDS`: an idle thread asks twice a second, by
two queries that write nothing.
`stop`, SIGTERM and SIGINT end the deliveries in hand and take no more. A database that does not
answer is tried again for as long as it takes.

What no handler is for, and no handler for any type (``@worker.handler()``) takes, is a dead letter.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import structlog

from saf.delivery import Delivery
from saf.errors import UsageError
from saf.failpoints import fail_point
from saf.lanes import Policy
from saf.receive import Link, Receiver, connected
from saf.received import Received
from saf.signals import stop_on_signals

if TYPE_CHECKING:
    from saf.receive import Engine

Handler = Callable[[Received, Any], object]
BatchHandler = Callable[[Sequence[Received], Any], object]
H = TypeVar("H", bound=Callable[..., object])

RECONNECT_SECONDS = 2.0

log = structlog.get_logger("saf.worker")

SAVEPOINT = "SAVEPOINT saf"
RELEASE = "RELEASE SAVEPOINT saf"
UNDO = "ROLLBACK TO SAVEPOINT saf; RELEASE SAVEPOINT saf"


@dataclass(frozen=True, kw_only=True)
class _Registered:
    call: Callable[..., object]
    batch: bool


class Worker:
    """Handles the messages of one subscription.

    Args:
        engine: as for `saf.receive`; each thread takes one connection from it.
        subscription: whose messages; a service has one of its own name.
        max_messages: how many at most in one transaction.
        threads: how many deliveries at a time in this process.
        policy: what happens to messages whose handling fails.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        engine: Engine,
        subscription: str,
        *,
        max_messages: int = 100,
        threads: int = 1,
        policy: Policy | None = None,
    ) -> None:
        if max_messages < 1 or threads < 1:
            raise UsageError(f"max_messages ({max_messages}) and threads ({threads}): at least 1")
        self.engine = engine
        self.subscription = subscription
        self.max_messages = max_messages
        self.threads = threads
        self.policy = policy or Policy()
        self._handlers: dict[str | None, _Registered] = {}
        self._stopping = threading.Event()
        self._handled = 0
        self._failed: list[UsageError] = []
        self._counting = threading.Lock()

    def handler(self, message_type: str | None = None) -> Callable[[H], H]:
        """Register a function of (message, connection) for a type; None for all that have none.

        Raises:
            UsageError: the type has a handler, or the function takes something else.
        """
        return self._register(message_type, batch=False)

    def batch_handler(self, message_type: str | None = None) -> Callable[[H], H]:
        """Register a function of (messages, connection), as `handler` does."""
        return self._register(message_type, batch=True)

    def run(self) -> int:
        """Handle messages until stopped; return how many were handled.

        In the main thread, the first SIGTERM or SIGINT stops in order, a second one at once.

        Raises:
            ConfigurationError: there is no such subscription.
            UsageError: there is no handler, or the engine cannot be received from.
        """
        self._check()
        threads = [
            threading.Thread(target=self._work, name=f"saf {self.subscription} {number}")
            for number in range(self.threads)
        ]
        with stop_on_signals(self.stop):
            for thread in threads:
                thread.start()
            for thread in threads:
                # in steps, because a signal is not noticed while a thread is waited for
                while thread.is_alive():
                    thread.join(0.2)
        self._stopping.clear()
        if self._failed:
            raise self._failed.pop()
        return self._handled

    def stop(self) -> None:
        """End in order, from any thread: deliveries in hand are finished, no more are taken."""
        self._stopping.set()

    def drain(self) -> int:
        """Handle what is there and due now, in this thread; return how many were handled."""
        return sum(delivery.handled for delivery in self.deliveries())

    def deliveries(self) -> Iterator[Delivery[Any]]:
        """Handle what is there and due now, in this thread; each delivery once it is committed."""
        self._check()
        with connected(self.engine) as link:
            receiver = self._receiver(link)
            while delivery := self._deliver(receiver, wait_seconds=0):
                yield delivery

    def _work(self) -> None:
        """One thread: deliveries, one after the other, over as many connections as it takes."""
        while not self._stopping.is_set():
            try:
                with connected(self.engine) as link:
                    receiver = self._receiver(link)
                    while not self._stopping.is_set():
                        self._deliver(receiver, wait_seconds=60)
            except UsageError as error:
                self._failed.append(error)
                self.stop()
            except Exception as error:
                # whatever it was, its transaction is gone: what was in hand comes again
                said = " ".join(str(error).split())
                log.warning("delivery_failed", subscription=self.subscription, error=said)
                self._stopping.wait(RECONNECT_SECONDS)

    def _receiver(self, link: Link) -> Receiver:
        return Receiver(link, self.subscription, self.policy, self.max_messages)

    def _deliver(self, receiver: Receiver, wait_seconds: float) -> Delivery[Any]:
        """Handle one delivery, which is empty if there was nothing."""
        with receiver.delivery(wait_seconds, self._stopping) as delivery:
            if delivery:
                self._handle(delivery, receiver.link.raw)
        fail_point("receive_committed")
        with self._counting:
            self._handled += delivery.handled
        return delivery

    def _handle(self, delivery: Delivery[Any], raw: psycopg.Connection[Any]) -> None:
        if not any(one.batch for one in self._handlers.values()):
            for message in delivery:
                self._one(delivery, raw, message)
            return
        for handler, messages in _runs(delivery, self._handler_of):
            if (
                handler is not None
                and handler.batch
                and self._batch(delivery, raw, handler, messages)
            ):
                continue
            for message in delivery.still(messages):
                self._one(delivery, raw, message)

    def _batch(
        self,
        delivery: Delivery[Any],
        raw: psycopg.Connection[Any],
        handler: _Registered,
        messages: list[Received],
    ) -> bool:
        """Hand over a run of messages at once; False if that has failed and is undone."""
        still = list(delivery.still(messages))
        try:
            with _savepoint(raw):
                handler.call(still, delivery.connection)
        except Exception as error:
            if raw.broken:
                raise
            log.info("batch_failed", messages=len(still), error=str(error))
            return False
        return True

    def _one(
        self, delivery: Delivery[Any], raw: psycopg.Connection[Any], message: Received
    ) -> None:
        handler = self._handler_of(message)
        if handler is None:
            known = ", ".join(map(repr, self._handlers))
            delivery.reject(
                message, f"no handler for message type {message.message_type!r}, only for {known}"
            )
            return
        try:
            with _savepoint(raw):
                handler.call([message] if handler.batch else message, delivery.connection)
        except Exception as error:
            if raw.broken:
                raise
            log.info(
                "message_failed",
                subscription=self.subscription,
                message_id=str(message.message_id),
                attempt=message.attempt,
                error=str(error),
            )
            delivery.park(message, error)

    def _handler_of(self, message: Received) -> _Registered | None:
        handlers = self._handlers
        return handlers.get(message.message_type) or handlers.get(None)

    def _register(self, message_type: str | None, *, batch: bool) -> Callable[[H], H]:
        what = "any type" if message_type is None else f"message type {message_type!r}"

        def register(call: H) -> H:
            if callable(message_type):
                raise UsageError("write @worker.handler(), with parentheses")
            if message_type in self._handlers:
                there = self._handlers[message_type].call
                raise UsageError(f"{what} has a handler already: {there.__qualname__}")
            first = "messages" if batch else "message"
            try:
                inspect.signature(call).bind(None, None)
            except TypeError:
                raise UsageError(
                    f"the handler {call.__qualname__} for {what} takes "
                    f"{inspect.signature(call)}: expected ({first}, connection)"
                ) from None
            if inspect.iscoroutinefunction(call):
                raise UsageError(f"the handler {call.__qualname__} for {what} is async: saf is not")
            self._handlers[message_type] = _Registered(call=call, batch=batch)
            return call

        return register

    def _check(self) -> None:
        if not self._handlers:
            raise UsageError(f"the worker for {self.subscription!r} has no handler")


@contextmanager
def _savepoint(raw: psycopg.Connection[Any]) -> Iterator[None]:
    """Work that is undone if the block raises; the transaction goes on."""
    raw.execute(SAVEPOINT)
    try:
        yield
        # fails if a statement has failed, and its error was swallowed
        raw.execute(RELEASE)
    except BaseException:
        if not raw.broken:
            raw.execute(UNDO)
        raise


def _runs(
    messages: Iterable[Received], handler_of: Callable[[Received], _Registered | None]
) -> Iterator[tuple[_Registered | None, list[Received]]]:
    """Messages by handler, in as few runs as the order of each key allows."""
    runs: dict[_Registered | None, list[Received]] = {}
    last: dict[str, _Registered | None] = {}
    for message in messages:
        handler = handler_of(message)
        if message.key is not None:
            before = last.get(message.key, handler)
            if before is not handler and before in runs:
                yield before, runs.pop(before)
            last[message.key] = handler
        runs.setdefault(handler, []).append(message)
    yield from runs.items()
