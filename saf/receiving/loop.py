"""The loop that feeds handlers: it handles deliveries one after the other until it is stopped.

A `Loop` is a `saf.Worker`, `saf.Processors` or a `saf.routing_service`. A handler works on the
delivery's connection (`saf.receiving.savepoints`). If a handler raises, its own work is undone, its
message is set aside with the error, and the rest of the delivery continues (`saf.receiving.retries`
describes what happens to the message). The failure is logged as a warning, and as an error once the
message is a dead letter (`saf.receiving.failures`).

A message whose type has no handler waits in the lane of its key until a worker with a handler comes
(`saf.setaside.unhandled`); the log reports each type once, up to some hundred types. With
``unhandled="dead"`` the message becomes a dead letter.

A loop that finds no messages polls less and less often, until it waits
`saf.receiving.receive.LONGEST_PAUSE_SECONDS` between polls; its idle threads take turns. Or it
listens for notifications (`saf.receiving.link`). After `stop`, SIGTERM or SIGINT, each thread
finishes the message in hand, commits its work and puts the rest back; `saf.receiving.stopping`
describes what happens if that takes too long. While a database does not answer, the loop keeps
trying without a time limit.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, get_args

import psycopg

from saf.errors import Refused, SafError, Unexpected, UsageError
from saf.failpoints import fail_point
from saf.log.pauses import Turn
from saf.received import Received
from saf.receiving.arrival import hook
from saf.receiving.delivery import Delivery
from saf.receiving.failures import exception, failure
from saf.receiving.growth import Idle
from saf.receiving.handlers import no_handler
from saf.receiving.link import Link, connected
from saf.receiving.receive import Receiver
from saf.receiving.retries import Policy
from saf.receiving.savepoints import Savepoints
from saf.receiving.stopping import STOP_SECONDS, Stopping
from saf.receiving.summary import SetAside, Summary
from saf.signing.verifier import Trust
from saf.telemetry.logger import Log
from saf.telemetry.metrics import FAILED_ATTEMPTS, RECEIVE_SECONDS, RECEIVED, count, observe

if TYPE_CHECKING:
    from saf.receiving.link import AsyncEngine, Engine
    from saf.signing.signer import Key, RequireSigned, Signer

RECONNECT_SECONDS = 2.0
WAIT_SECONDS = 60.0

OfUnhandled = Literal["wait", "dead"]
"""Treatment of a message without a handler."""

log = Log("saf.worker")


class Loop(ABC):
    """Handle the messages of one subscription in threads, each with its own connection.

    Raises:
        UsageError: a number is out of range, or keys to verify with are missing.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine,
        subscription: str,
        *,
        max_messages: int,
        threads: int,
        policy: Policy | None,
        listen: bool,
        stop_timeout: float = STOP_SECONDS,
        unhandled: OfUnhandled = "wait",
        require_signed: RequireSigned = False,
        keys: Mapping[str, Key] | None = None,
        signer: Signer | None = None,
    ) -> None:
        if max_messages < 1 or threads < 1:
            raise UsageError(f"max_messages ({max_messages}) and threads ({threads}): at least 1")
        if stop_timeout < 0:
            raise UsageError(f"stop_timeout: {stop_timeout} s is less than 0")
        if unhandled not in get_args(OfUnhandled):
            raise UsageError(f"unhandled: {unhandled!r} is neither 'wait' nor 'dead'")
        self.engine: Any = engine
        self.subscription = subscription
        self.max_messages = max_messages
        self.threads = threads
        self.policy = policy or Policy()
        self.listen = listen
        self.unhandled: OfUnhandled = unhandled
        self.trust = Trust.of(keys, required=require_signed)
        """Verification rules for messages; None: take all messages, unverified."""
        self.signer = signer
        self.summary = Summary()
        """The results of this worker so far."""
        self.beat: Callable[[bool], object] = lambda _: None
        """Called by each thread after each search, with whether it has found messages."""
        self.idle = Idle()
        """Measures how long this worker's threads are idle."""
        self._turn = Turn(threads)
        self._begun = threading.Event()
        """Set once a thread receives."""
        self._stopping = Stopping(stop_timeout)
        self._failed: list[Exception] = []

    @property
    def stop_timeout(self) -> float:
        """Seconds that the message in hand may take after the worker was told to stop."""
        return self._stopping.seconds

    @stop_timeout.setter
    def stop_timeout(self, seconds: float) -> None:
        self._stopping.seconds = seconds

    @property
    def message_types(self) -> tuple[str, ...]:
        """Message types that have a handler of their own."""
        return ()

    def run(self, *, drain: bool = False) -> int:
        """Handle messages until stopped; return the number of handled messages.

        In the main thread, the first SIGTERM or SIGINT stops in order; a second one stops
        immediately.

        Args:
            drain: stop once no message is due. Only one thread works.

        Raises:
            ConfigurationError: the subscription does not exist.
            UsageError: no handler is registered, or the engine cannot be received from.
            Refused: the database denies this login access.
            StopTimeout: the message in hand took longer than ``stop_timeout``.
            Unavailable: a drain's database does not answer.
        """
        self._check()
        self._turn = Turn(self.threads)
        with self._equipped():
            # daemon threads, because a second signal must end the process immediately, whatever
            # they do
            self._stopping.run(
                threading.Thread(
                    target=self._drain if drain else self._work,
                    name=f"saf {self.subscription} {number}",
                    daemon=True,
                )
                for number in range(1 if drain else self.threads)
            )
        if self._failed:
            first, self._failed = self._failed[0], []
            raise first
        return self.summary.handled

    def stop(self) -> None:
        """Stop in order, from any thread: finish the messages in hand, and put the others back."""
        self._stopping.tell()

    def drain(self) -> int:
        """Handle the messages that are due now, in this thread; return the number handled."""
        return sum(delivery.handled for delivery in self.deliveries())

    def deliveries(self) -> Iterator[Delivery[Any]]:
        """Handle the messages that are due now, in this thread; yield deliveries once committed."""
        self._check()
        try:
            with (
                self._equipped(),
                self._connected() as link,
                self._receiving(link) as receiver,
            ):
                while not self._stopping.told.is_set():
                    if not (delivery := self._deliver(receiver, wait_seconds=0)):
                        self.summary.held_up = receiver.held_up
                        return
                    yield delivery
        finally:
            self._stopping.begin_anew()

    @abstractmethod
    def _check(self) -> None:
        """Raise a `UsageError` if no handler is registered."""

    @abstractmethod
    def _handle(self, delivery: Delivery[Any], work: Savepoints) -> None:
        """Handle a delivery, which is not empty."""

    def handled_types(self) -> Sequence[str | None]:
        """Return the message types that have handlers; None: all other types."""
        return [None]

    def _types(self) -> Collection[str | None] | None:
        """Return the message types that have handlers; None: all."""
        types = self.handled_types()
        return None if None in types else types

    def _taken(self) -> Collection[str | None] | None:
        """Return the message types to take from lanes that wait for a handler; None: all."""
        return None if self.unhandled == "dead" else self._types()

    def _work(self) -> None:
        """Run one thread: handle deliveries, and connect again whenever the connection is lost."""
        stopping = self._stopping.told
        while not stopping.is_set():
            try:
                with ExitStack() as stack:
                    with self.idle.period():
                        link = stack.enter_context(self._connected())
                        receiver = stack.enter_context(self._receiving(link))
                    receiver.idle = self.idle.period
                    self._begun.set()
                    while not stopping.is_set():
                        self.beat(bool(self._deliver(receiver, wait_seconds=WAIT_SECONDS)))
            except (UsageError, Refused) as error:
                self._failed.append(error)
                self.stop()
            except BaseException as error:  # a handler may raise an error meant to end a process
                # whatever went wrong, the transaction is gone: the messages in hand are delivered
                # again
                fields = exception(error)
                if isinstance(error, (SafError, psycopg.Error)):
                    del fields["stack"]
                log.warning("delivery_failed", subscription=self.subscription, **fields)
                with self.idle.period():
                    stopping.wait(RECONNECT_SECONDS)

    def _drain(self) -> None:
        """Run the only thread of a drain."""
        try:
            self.drain()
        except Exception as error:
            self._failed.append(error)
        except BaseException as error:
            # a SystemExit would end the process as if nothing had failed
            self._failed.append(Unexpected(f"subscription {self.subscription!r}", error))

    def _equipped(self) -> AbstractContextManager[None]:
        """Provide what handlers need while a block runs."""
        return nullcontext()

    def _connected(self) -> AbstractContextManager[Link]:
        return connected(self.engine, self.subscription)

    @contextmanager
    def _receiving(self, link: Link) -> Iterator[Receiver]:
        receiver = Receiver(
            link,
            self.subscription,
            self.policy,
            self.max_messages,
            listen=self.listen,
            trust=self.trust,
            signer=self.signer,
            turn=None if self.listen else self._turn,  # a notification wakes each by itself
        )
        receiver.reader = replace(receiver.reader, types=self._taken())
        try:
            yield receiver
        finally:
            receiver.forget()

    def _deliver(self, receiver: Receiver, wait_seconds: float) -> Delivery[Any]:
        """Handle one delivery and return it; it is empty if no message was found."""
        raw = receiver.link.raw
        began = None
        handled, aside = 0, SetAside()
        try:
            with (
                self._stopping.using(raw),
                receiver.delivery(wait_seconds, self._stopping.told) as delivery,
            ):
                if delivery:
                    began = perf_counter()
                    delivery.until(self._stopping.told)
                    with Savepoints(raw, delivery.take_own(), receiver.link.state) as work:
                        self._handle(delivery, work)
            fail_point("receive_committed")
            handled, aside = delivery.handled, SetAside(delivery.parked, delivery.buried)
            if began is not None:
                observe(RECEIVE_SECONDS, perf_counter() - began, subscription=self.subscription)
        finally:
            # messages set aside without being handed out are committed, whatever has failed since
            self._count(handled, aside + receiver.unseen())
        return delivery

    def _count(self, handled: int, aside: SetAside) -> None:
        """Count messages by their results."""
        self.summary.add(handled, aside)
        for outcome, messages in (
            ("handled", handled),
            ("parked", aside.parked),
            ("dead", aside.buried),
        ):
            if messages:
                count(RECEIVED, messages, subscription=self.subscription, outcome=outcome)

    def _unhandled(
        self,
        delivery: Delivery[Any],
        work: Savepoints,
        message: Received,
        known: Iterable[str | None],
    ) -> None:
        """Set aside a message without a handler: it waits for one, or becomes a dead letter.

        A message of saf itself, such as the end of a dialog, takes effect instead.
        """
        effect = hook().by_itself(message)
        if effect is not None:
            self._one(delivery, work, message, lambda: work.as_saf(effect))
            return
        waits = self.unhandled == "wait"
        if self.summary.lacks_handler(message.message_type):
            log.warning(
                "no_handler",
                subscription=self.subscription,
                message_type=message.message_type,
                handled=[*known],
                detail="messages of this type wait, and the later ones of their keys behind them, "
                "until a worker has a handler for them: see `saf inbox status`"
                if waits
                else "messages of this type become dead letters: see `saf dead list`",
            )
        (delivery.wait if waits else delivery.reject)(message, no_handler(message, known))

    def _one(
        self,
        delivery: Delivery[Any],
        work: Savepoints,
        message: Received,
        call: Callable[[], object],
    ) -> bool:
        """Handle a message by a call; if that fails, set it aside and return False.

        The call may be repeated because another call failed: see `saf.receiving.savepoints`.
        """
        self._stopping.in_hand[threading.get_ident()] = [message]
        return work.do(Handling(self, delivery, work.raw, message, call))

    def _set_aside(
        self,
        delivery: Delivery[Any],
        raw: psycopg.Connection[Any],
        message: Received,
        error: Exception,
    ) -> None:
        """Set aside a message whose handling has raised, unless an earlier one of its key was.

        The earlier one may have failed when it was handled again: then this message waits behind
        it.
        """
        if delivery.is_behind(message):
            return
        last = self.policy.gives_up(message.attempt, error)
        count(FAILED_ATTEMPTS, subscription=self.subscription, last=str(last).lower())
        (log.error if last else log.warning)(
            "dead_letter" if last else "message_failed",
            subscription=self.subscription,
            **failure(error, message, self.policy, raw),
        )
        delivery.park(message, error)

    def _undone(self, message: Received) -> None:
        """Note that a message's work is undone; the message is handled again, or set aside."""
        del message  # a plain loop keeps no state per message


@dataclass(slots=True, eq=False)
class Handling:
    """A message's piece of work. There may be thousands, so it is one object and no closures."""

    loop: Loop
    delivery: Delivery[Any]
    raw: psycopg.Connection[Any]
    message: Received
    do: Callable[[], object]

    def failed(self, error: Exception) -> None:
        """Set the message aside."""
        self.loop._set_aside(self.delivery, self.raw, self.message, error)

    def undone(self) -> None:
        """Forget what the message's handler has done."""
        self.loop._undone(self.message)

    def may_go_on(self) -> bool:
        """Return False if the message waits behind another one of its key."""
        return not self.delivery.is_behind(self.message)
