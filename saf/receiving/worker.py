"""Workers: they call a handler for each message, chosen by the message's type.

    worker = saf.Worker(engine, "billing")

    @worker.handler("OrderPlaced")
    def placed(message, connection):
        connection.execute(…)

    worker.run()                      # or, from a shell: saf worker module:worker

A `saf.receiving.loop` calls the handlers. A batch handler gets all messages of its type in a
delivery at once, in one savepoint, which is several times quicker; if it raises, it gets its
messages again one by one. The messages of a key stay in order across types: a batch ends where a
message for another handler follows for one of its keys.

Each thread has a connection, and takes deliveries of its own. An idle thread asks twice a second,
by a query that writes nothing.

A message without a handler waits for a worker that has one, and the later ones of its key wait
behind it. So old and new workers may run side by side while a new type is introduced.
``@worker.handler()`` is for all types that have no handler of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from saf.errors import UsageError
from saf.received import Received
from saf.receiving.delivery import Delivery
from saf.receiving.failures import exception
from saf.receiving.handlers import check_handler, described
from saf.receiving.loop import Loop, OfUnhandled, log
from saf.receiving.retries import Policy
from saf.receiving.savepoints import Savepoints
from saf.receiving.stopping import STOP_SECONDS

if TYPE_CHECKING:
    from saf.receiving.link import Engine
    from saf.signing.keys import Key
    from saf.signing.signer import Signer

Handler = Callable[[Received, Any], object]
BatchHandler = Callable[[Sequence[Received], Any], object]
H = TypeVar("H", bound=Callable[..., object])


@dataclass(frozen=True, kw_only=True)
class _Registered:
    call: Callable[..., object]
    batch: bool


class Worker(Loop):
    """Handles the messages of one subscription.

    Args:
        engine: as for `saf.receive`; each thread takes one connection from it.
        subscription: whose messages to handle; each service has a subscription of its own name.
        max_messages: the most messages in one transaction.
        threads: how many deliveries this process handles at a time.
        policy: what happens to messages whose handling fails.
        listen: be notified of what arrives; see `saf.receiving.notify`.
        stop_timeout: how many seconds the messages in hand may take after SIGTERM, SIGINT or
            `stop`; then they are rolled back, and `run` raises `StopTimeout`.
        unhandled: what becomes of a message whose type has no handler: "wait" until a worker has
            one, or "dead", a dead letter.
        require_signed: hand no message to a handler that is not signed by one of the ``keys``.
        keys: the keys that senders sign with; as for `saf.receive`.
        signer: signs what handlers say on the dialogs of their messages.

    Raises:
        UsageError: a number is out of range, or there are no keys to verify with.
    """

    def __init__(
        self,
        engine: Engine,
        subscription: str,
        *,
        max_messages: int = 100,
        threads: int = 1,
        policy: Policy | None = None,
        listen: bool = False,
        stop_timeout: float = STOP_SECONDS,
        unhandled: OfUnhandled = "wait",
        require_signed: bool = False,
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
        self._handlers: dict[str | None, _Registered] = {}

    def handler(self, message_type: str | None = None) -> Callable[[H], H]:
        """Register a function of (message, connection) for a type; None is for all other types.

        Raises:
            UsageError: the type has a handler, or the function does not take these arguments.
        """
        return self._register(message_type, batch=False)

    def batch_handler(self, message_type: str | None = None) -> Callable[[H], H]:
        """Register a function of (messages, connection) for a type; otherwise like `handler`."""
        return self._register(message_type, batch=True)

    def _check(self) -> None:
        if not self._handlers:
            raise UsageError(f"the worker for {self.subscription!r} has no handler")

    def _types(self) -> Collection[str | None] | None:
        return None if None in self._handlers else tuple(self._handlers)

    def _handle(self, delivery: Delivery[Any], work: Savepoints) -> None:
        if not any(one.batch for one in self._handlers.values()):
            for message in delivery:
                self._single(delivery, work, message)
            return
        for handler, messages in _runs(delivery, self._handler_of):
            if (
                handler is not None
                and handler.batch
                and self._batch(delivery, work, handler, messages)
            ):
                continue
            for message in delivery.still(messages):
                self._single(delivery, work, message)

    def _batch(
        self,
        delivery: Delivery[Any],
        work: Savepoints,
        handler: _Registered,
        messages: list[Received],
    ) -> bool:
        """Handle a run of messages by one call; False if it has failed and is undone."""
        still = list(delivery.still(messages))
        if not still:
            return True
        self._stopping.in_hand[threading.get_ident()] = still[0]
        try:
            with work.piece():
                handler.call(still, delivery.connection)
        except Exception as error:
            if work.raw.broken:
                raise
            log.warning(
                "batch_failed",
                subscription=self.subscription,
                message_type=still[0].message_type,
                messages=len(still),
                detail="they are handed over one by one",
                **exception(error, work.raw, *still),
            )
            return False
        return True

    def _single(self, delivery: Delivery[Any], work: Savepoints, message: Received) -> None:
        handler = self._handler_of(message)
        if handler is None:
            self._unhandled(delivery, work, message, self._handlers)
            return
        what = [message] if handler.batch else message
        self._one(delivery, work, message, lambda: handler.call(what, delivery.connection))

    def _handler_of(self, message: Received) -> _Registered | None:
        handlers = self._handlers
        return handlers.get(message.message_type) or handlers.get(None)

    def _register(self, message_type: str | None, *, batch: bool) -> Callable[[H], H]:
        what = described(message_type)

        def register(call: H) -> H:
            if callable(message_type):
                raise UsageError("write @worker.handler(), with parentheses")
            if message_type in self._handlers:
                there = self._handlers[message_type].call
                raise UsageError(f"{what} has a handler already: {there.__qualname__}")
            check_handler(call, what, "messages" if batch else "message", "connection")
            self._handlers[message_type] = _Registered(call=call, batch=batch)
            return call

        return register


def _runs(
    messages: Iterable[Received], handler_of: Callable[[Received], _Registered | None]
) -> Iterator[tuple[_Registered | None, list[Received]]]:
    """Group messages by handler, in as few runs as the order of each key allows."""
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
