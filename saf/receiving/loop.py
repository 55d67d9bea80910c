"""The loop that feeds handlers: deliveries, one after the other, until it is told to stop.

A `Loop` handles them: a `saf.Worker`, `saf.Processors` or a `saf.routing_service`. A handler works
on the delivery's connection, inside a savepoint. If it raises, its own work is undone, the message
is set aside with the error, and the rest of the delivery goes on (`saf.receiving.retries` says
what happens to the message).

A loop that finds nothing polls less and less often, until it waits
`saf.receiving.receive.LONGEST_PAUSE_SECONDS` between polls; or it listens for notifications
(`saf.receiving.notify`). After `stop`, SIGTERM or SIGINT, it finishes the deliveries in hand and
takes no more. While a database does not answer, it tries again for as long as it takes.
"""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg

from saf.errors import Refused, UsageError
from saf.failpoints import fail_point
from saf.logger import Log
from saf.received import Received
from saf.receiving.arrival import hook
from saf.receiving.delivery import Delivery
from saf.receiving.receive import Link, Receiver, connected
from saf.receiving.retries import Policy
from saf.signals import stop_on_signals

if TYPE_CHECKING:
    from saf.receiving.receive import Engine

RECONNECT_SECONDS = 2.0
WAIT_SECONDS = 60.0

log = Log("saf.worker")

SAVEPOINT = "SAVEPOINT saf"
NEXT = "RELEASE SAVEPOINT saf; SAVEPOINT saf"
UNDO = "ROLLBACK TO SAVEPOINT saf"
RELEASE = "RELEASE SAVEPOINT saf"


class Loop(ABC):
    """Handles the messages of one subscription in some threads, each with its own connection.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        engine: Engine,
        subscription: str,
        *,
        max_messages: int,
        threads: int,
        policy: Policy | None,
        listen: bool,
    ) -> None:
        if max_messages < 1 or threads < 1:
            raise UsageError(f"max_messages ({max_messages}) and threads ({threads}): at least 1")
        self.engine = engine
        self.subscription = subscription
        self.max_messages = max_messages
        self.threads = threads
        self.policy = policy or Policy()
        self.listen = listen
        self._stopping = threading.Event()
        self._handled = 0
        self._failed: list[UsageError | Refused] = []
        self._counting = threading.Lock()

    def run(self) -> int:
        """Handle messages until stopped; return how many were handled.

        In the main thread, the first SIGTERM or SIGINT stops in order; a second one stops at once.

        Raises:
            ConfigurationError: there is no such subscription.
            UsageError: there is no handler, or the engine cannot be received from.
            Refused: the database does not let this login in.
        """
        self._check()
        threads = [
            # daemon threads, because a second signal must end the process at once, whatever they do
            threading.Thread(
                target=self._work, name=f"saf {self.subscription} {number}", daemon=True
            )
            for number in range(self.threads)
        ]
        with stop_on_signals(self.stop):
            for thread in threads:
                thread.start()
            for thread in threads:
                # in short steps, because Python notices no signal while it waits for a thread
                while thread.is_alive():
                    thread.join(0.2)
        self._stopping.clear()
        if self._failed:
            raise self._failed.pop()
        return self._handled

    def stop(self) -> None:
        """Stop in order, from any thread: finish the deliveries in hand, and take no more."""
        self._stopping.set()

    def drain(self) -> int:
        """Handle what is there and due now, in this thread; return how many were handled."""
        return sum(delivery.handled for delivery in self.deliveries())

    def deliveries(self) -> Iterator[Delivery[Any]]:
        """Handle what is there and due now, in this thread; give each delivery after its commit."""
        self._check()
        with connected(self.engine) as link, self._receiving(link) as receiver:
            while delivery := self._deliver(receiver, wait_seconds=0):
                yield delivery

    @abstractmethod
    def _check(self) -> None:
        """Raise a `UsageError` if there is no handler."""

    @abstractmethod
    def _handle(self, delivery: Delivery[Any], work: Savepoints) -> None:
        """Handle a delivery, which is not empty."""

    def _work(self) -> None:
        """Run one thread: handle deliveries, and connect again whenever the connection is lost."""
        while not self._stopping.is_set():
            try:
                with connected(self.engine) as link, self._receiving(link) as receiver:
                    while not self._stopping.is_set():
                        self._deliver(receiver, wait_seconds=WAIT_SECONDS)
            except (UsageError, Refused) as error:
                self._failed.append(error)
                self.stop()
            except Exception as error:
                # whatever went wrong, the transaction is gone: what was in hand comes again
                said = " ".join(str(error).split())
                log.warning("delivery_failed", subscription=self.subscription, error=said)
                self._stopping.wait(RECONNECT_SECONDS)

    @contextmanager
    def _receiving(self, link: Link) -> Iterator[Receiver]:
        receiver = Receiver(
            link, self.subscription, self.policy, self.max_messages, listen=self.listen
        )
        yield receiver
        receiver.forget()

    def _deliver(self, receiver: Receiver, wait_seconds: float) -> Delivery[Any]:
        """Handle one delivery and return it; it is empty if there was nothing."""
        with receiver.delivery(wait_seconds, self._stopping) as delivery:
            if delivery:
                with Savepoints(receiver.link.raw) as work:
                    self._handle(delivery, work)
        fail_point("receive_committed")
        with self._counting:
            self._handled += delivery.handled
        return delivery

    def _unhandled(
        self,
        delivery: Delivery[Any],
        work: Savepoints,
        message: Received,
        known: Iterable[str | None],
    ) -> None:
        """Make a dead letter of a message that has no handler.

        A message of saf itself, such as the end of a dialog, has its effect instead.
        """
        effect = hook().by_itself(message)
        if effect is None:
            delivery.reject(message, no_handler(message, known))
        else:
            self._one(delivery, work, message, lambda: effect(delivery.connection))

    def _one(
        self,
        delivery: Delivery[Any],
        work: Savepoints,
        message: Received,
        call: Callable[[], object],
    ) -> bool:
        """Handle a message by a call; if that fails, set it aside and return False."""
        try:
            with work.piece():
                call()
        except Exception as error:
            if work.raw.broken:
                raise
            log.info(
                "message_failed",
                subscription=self.subscription,
                message_id=str(message.message_id),
                attempt=message.attempt,
                error=str(error),
            )
            delivery.park(message, error)
            return False
        return True


class Savepoints:
    """Pieces of work in one transaction, each of which is undone if it raises.

    The statement that releases a savepoint sets the next one, so a piece costs one round trip to
    the database. For a handler that does little, that is nearly all it costs.
    """

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self.raw = raw

    def __enter__(self) -> Savepoints:
        self.raw.execute(SAVEPOINT)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            # released here and not by the commit, because what is written next is outside of the
            # pieces
            self.raw.execute(RELEASE)

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Run the block; if it raises, undo its work. The transaction goes on."""
        try:
            yield
            # raises if a statement of the block has failed and the block has swallowed the error
            self.raw.execute(NEXT)
        except BaseException:
            if not self.raw.broken:
                self.raw.execute(UNDO)
            raise


def check_handler(call: Callable[..., object], what: str, *arguments: str) -> None:
    """Raise a `UsageError` unless a function can be called with these arguments."""
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError:
        raise UsageError(
            f"the handler {call.__qualname__} for {what} takes "
            f"{inspect.signature(call)}: expected ({', '.join(arguments)})"
        ) from None
    if inspect.iscoroutinefunction(call):
        raise UsageError(f"the handler {call.__qualname__} for {what} is async: saf is not")


def described(message_type: str | None) -> str:
    """A message type in the words of an error.

    >>> described("OrderPlaced"), described(None)
    ("message type 'OrderPlaced'", 'any type')
    """
    return "any type" if message_type is None else f"message type {message_type!r}"


def no_handler(message: Received, known: Iterable[str | None]) -> str:
    """The error of a message that has no handler."""
    types = ", ".join(map(repr, known))
    return f"no handler for message type {message.message_type!r}, only for {types}"
