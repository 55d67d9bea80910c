"""Processors: one instance per key, which handles its key's messages and may keep state in memory.

    class OrderTotals(saf.Processor):
        def activate(self, connection):
            self.total = …                           # load the state of self.key

        @saf.handles("OrderPlaced")
        def placed(self, message, connection):
            self.total += message.json()["total"]
            connection.execute(…)

    runner = saf.Processors(engine, "billing", OrderTotals)
    runner.run()                      # or, from a shell: saf worker module:runner

A faulty class raises `UsageError` when it is defined, not at its first message. `Instances` holds a
member's live instances and calls none of their methods; `Processors` does.

The idea is Dempsy's message processor. Any number of processes share the keys: each process is a
member of the subscription, owns its fair share of the shards (`saf.log.shards`) and gets only their
messages. When a member joins or leaves, as few shards as possible move; instances in all other
shards stay where they are.

Guarantees:

- *One at a time.* An instance is called only in a transaction that has found the owner and epoch of
  its shard unchanged, and that locks the cursor's row until it ends. So two members never write for
  a key at the same time. A member that was taken over while it slept writes nothing when it wakes:
  its instances are thrown away without being called.
- *In order, exactly once.* An instance's writes on ``connection`` commit together with the
  position, as with any receiver.
- *Memory is never ahead of the database.* When a call raises, its instance is thrown away, and so
  are instances whose work is undone with it (`saf.receiving.savepoints`). When a transaction does
  not commit, all instances that were called in it are thrown away. The next message of the key
  activates a new instance from the committed state.

An instance may be removed without being called. `Processor.passivate` is called when an instance is
removed in order, but a process that is killed or taken over calls nothing. So a handler must write
everything that must not be lost in its own transaction; memory is only a cache.

A message without a key has an instance of its own, which is passivated in the same transaction.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import psycopg

from saf.errors import Fenced, UsageError
from saf.failpoints import fail_point
from saf.received import Received
from saf.receiving.delivery import Delivery
from saf.receiving.failures import exception
from saf.receiving.handlers import (
    MethodOfEvent,
    check_handler,
    checked_type,
    described,
    is_async,
    is_function,
    named,
    of_type,
    watched,
)
from saf.receiving.link import Link
from saf.receiving.loop import Loop, OfUnhandled, log
from saf.receiving.membership import Membership
from saf.receiving.receive import Receiver
from saf.receiving.retries import Policy
from saf.receiving.savepoints import Savepoints
from saf.receiving.stopping import STOP_SECONDS

if TYPE_CHECKING:
    from saf.receiving.link import Engine
    from saf.signing.signer import Key, RequireSigned, Signer

Handler = Callable[[Any, Received, Any], object]
H = TypeVar("H", bound=Callable[..., object])
E = TypeVar("E")

_MARK = "_saf_handles"

LOOK_SECONDS = 1.0
"""Interval at which a member checks whether others have joined or left, in seconds."""

# A member that hangs in a transaction would keep its shards from the others beyond its lease
NO_LONGER = "SET LOCAL idle_in_transaction_session_timeout = {milliseconds}"

# Short until `balance` has its locks: from then on, only the moving shards wait (PATIENTLY)
BRIEFLY = "SET LOCAL lock_timeout = '200ms'"
PATIENTLY = "SET LOCAL lock_timeout TO DEFAULT"


@overload
def handles(message_type: type[E], /) -> MethodOfEvent[E]: ...
@overload
def handles(*message_types: str) -> Callable[[H], H]: ...
@overload
def handles(method: H, /) -> H: ...
def handles(*message_types: Any) -> Any:
    """Mark a method as the handler of message types; without types, of all other types.

    ``@saf.handles`` without parentheses marks a method for all other types, too. The method is
    called with the message and the delivery's connection. For an event's class, it is called with
    the event instead of the message, as the handlers of `saf.Worker` are.

    Raises:
        UsageError: a message type is neither text nor an event's class.
    """
    first = message_types[0] if len(message_types) == 1 else None
    types = () if is_function(first) else tuple(map(checked_type, message_types))

    def mark(method: Any) -> Any:
        setattr(method, _MARK, types or (None,))
        return method

    return mark(first) if is_function(first) else mark


class Processor:
    """Handles the messages of one key. Subclasses have methods marked by `handles`.

    ``connection`` is the delivery's, of the kind given to `saf.Processors`: write on it, but
    neither commit nor roll back. If a call raises, its writes are undone.

    Raises:
        UsageError: raised when a subclass is defined: two of its methods handle one type, a method
            does not take (message, connection), or a method is async.
    """

    key: str
    """Key of the messages; for a message without a key, its id as text. Set before `activate`."""

    handlers: ClassVar[dict[str | None, Handler]] = {}
    """Methods marked by `handles`, by message type."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.handlers = {}
        for method in (getattr(cls, name) for name in dir(cls)):
            for marked in getattr(method, _MARK, ()):
                message_type, handler = of_type(marked, method, batch=False, before="self")
                description = described(message_type)
                existing = cls.handlers.get(message_type)
                if existing is not None:
                    raise UsageError(f"{description} has a handler already: {named(existing)}")
                check_handler(handler, description, "self", "message", "connection")
                cls.handlers[message_type] = handler
        for method in (cls.activate, cls.passivate, cls.output):
            if is_async(method):
                raise UsageError(f"{named(method)} is async: only handlers of saf.Worker may be")

    def activate(self, connection: Any) -> None:
        """Load the state of the key. Called before the first message, in its transaction.

        If it raises, that message has failed.
        """

    def passivate(self, connection: Any) -> None:
        """Save the state to keep. Called before an instance is removed in order.

        An instance is removed when it is idle, when there are too many, when its shard moves, and
        at shutdown. If this raises, the error is logged, and the instance is removed all the same.
        """

    def output(self, connection: Any) -> None:
        """Do scheduled work. Called repeatedly while the instance is live.

        If it raises, the error is logged and the instance is thrown away. Its transaction may still
        fail after it returns, so its effects outside the database may happen twice. A call that was
        missed while the process was busy or down is skipped.
        """


@dataclass(kw_only=True, eq=False)
class Instance:
    """A processor, with the shard and the epoch in which it is owned."""

    processor: Processor
    lane: str
    shard: int
    epoch: int
    used_at: float = field(default_factory=time.monotonic)
    active: bool = False
    """True once the processor has been activated."""


class Instances:
    """Live instances, one for each key."""

    def __init__(self) -> None:
        self._by_lane: OrderedDict[str, Instance] = OrderedDict()
        """Instances by lane, the least recently used first."""
        self._due: deque[Instance] = deque()

    def __len__(self) -> int:
        return len(self._by_lane)

    def __iter__(self) -> Iterator[Instance]:
        """Iterate over the instances live now, even if some are thrown away during the loop."""
        return iter(list(self._by_lane.values()))

    def use(self, message: Received, epoch: int, processor: type[Processor]) -> Instance:
        """Return the instance of a message's key; create one if none of this epoch exists."""
        lane = message.lane
        instance = self._by_lane.get(lane)
        if instance is None or instance.epoch != epoch:
            created = processor()
            created.key = str(message.message_id) if message.key is None else message.key
            instance = Instance(processor=created, lane=lane, shard=message.shard, epoch=epoch)
            self._by_lane[lane] = instance
        self._by_lane.move_to_end(lane)
        instance.used_at = time.monotonic()
        return instance

    def forget(self, lane: str) -> None:
        """Throw away the instance of a lane, if any."""
        self._by_lane.pop(lane, None)

    def throw_away(self, ones: Iterable[Instance]) -> None:
        """Throw away these instances without calling them."""
        for instance in ones:
            if self._by_lane.get(instance.lane) is instance:
                del self._by_lane[instance.lane]

    def used_since(self, moment: float) -> list[Instance]:
        """Return the instances used at or after this time of `time.monotonic`."""
        return [instance for instance in self if instance.used_at >= moment]

    def superfluous(self, most: int, idle_seconds: float, limit: int) -> list[Instance]:
        """Return up to ``limit`` instances that are idle or exceed ``most``, least recent first."""
        found: list[Instance] = []
        too_many = len(self) - most
        idle_since = time.monotonic() - idle_seconds
        for instance in self._by_lane.values():
            if len(found) == limit or (len(found) >= too_many and instance.used_at > idle_since):
                break
            found.append(instance)
        return found

    def oldest(self) -> Instance | None:
        """Return the least recently used instance."""
        return next(iter(self._by_lane.values()), None)

    # The instances that take turns

    @property
    def due(self) -> bool:
        """True if any instance still has to take its turn."""
        return bool(self._due)

    def let_all_be_due(self) -> None:
        """Give each instance that is live now a turn."""
        self._due = deque(self._by_lane.values())

    def next_due(self, limit: int) -> list[Instance]:
        """Return the next instances whose turn it is and that are still live."""
        found: list[Instance] = []
        while self._due and len(found) < limit:
            instance = self._due.popleft()
            if self._by_lane.get(instance.lane) is instance:
                found.append(instance)
        return found

    def clear(self) -> None:
        """Throw away all instances."""
        self._by_lane.clear()
        self._due.clear()


class Processors(Loop):
    """Handle the messages of one subscription by instances of a class, one for each key.

    Args:
        engine: as for `saf.receive`. Running uses two of its connections, which must not go through
            a pooler.
        subscription: the subscription to receive from. While it has processors, no other receiver
            may use it.
        processor: the class; instances are made without arguments.
        max_messages: maximum number of messages in one transaction, and of instances on which one
            transaction calls `Processor.passivate` or `Processor.output`.
        max_instances: maximum number of instances that stay live between deliveries; beyond it, the
            least recently used instances are passivated.
        idle_seconds: time without a message after which an instance is passivated.
        output_seconds: interval at which `Processor.output` is called on each live instance.
        lease_seconds: time after which a hanging process is taken over by others. A call that sends
            no statement for this time counts as hanging, and its transaction is ended.
        policy: how to treat messages whose handling fails.
        listen: be notified of new messages; see `saf.receiving.link`.
        stop_timeout: seconds that the messages in hand, and `Processor.passivate` of all live
            instances, may take after SIGTERM, SIGINT or `stop`; then `run` raises `StopTimeout`.
        unhandled: treatment of a message whose type has no handler: "wait" until processors have
            one, or "dead", a dead letter.
        require_signed: hand only messages that are signed with one of the ``keys`` to handlers;
            "origin" requires the signatures of their first senders; as for `saf.receive`.
        keys: the keys that senders sign with; as for `saf.receive`.
        signer: signs what handlers send on the dialogs of their messages.

    Raises:
        UsageError: a number is out of range, or keys to verify with are missing.
    """

    def __init__(
        self,
        engine: Engine,
        subscription: str,
        processor: type[Processor],
        *,
        max_messages: int = 100,
        max_instances: int = 10_000,
        idle_seconds: float = 60.0,
        output_seconds: float = 10.0,
        lease_seconds: float = 30.0,
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
            threads=1,
            policy=policy,
            listen=listen,
            stop_timeout=stop_timeout,
            unhandled=unhandled,
            require_signed=require_signed,
            keys=keys,
            signer=signer,
        )
        if max_instances < 0 or min(idle_seconds, output_seconds, lease_seconds) <= 0:
            raise UsageError(
                f"max_instances ({max_instances}) is not negative, and idle_seconds "
                f"({idle_seconds}), output_seconds ({output_seconds}) and lease_seconds "
                f"({lease_seconds}) are above 0"
            )
        self.processor = processor
        self.max_instances = max_instances
        self.idle_seconds = idle_seconds
        self.output_seconds = output_seconds
        self.lease_seconds = lease_seconds
        self._live = Instances()
        self._output_at = time.monotonic() + output_seconds
        self._look_at = 0.0
        self._membership: Membership | None = None

    @property
    def message_types(self) -> tuple[str, ...]:
        """Message types that have a handler of their own."""
        return tuple(sorted(name for name in self.processor.handlers if name is not None))

    def deliveries(self) -> Iterator[Delivery[Any]]:
        """Handle messages as `Loop.deliveries` does, and leave at the end."""
        try:
            yield from super().deliveries()
        finally:
            self._leave()

    def _work(self) -> None:
        try:
            super()._work()
        finally:
            self._leave()

    def _check(self) -> None:
        if not self.processor.handlers:
            raise UsageError(f"{self.processor.__qualname__} has no method with @saf.handles(…)")

    def handled_types(self) -> Sequence[str | None]:
        """Return the message types that have a method; None: all other types."""
        return [*self.processor.handlers]

    @contextmanager
    def _receiving(self, link: Link) -> Iterator[Receiver]:
        milliseconds = max(1, round(self.lease_seconds * 1000))
        bound = NO_LONGER.format(milliseconds=milliseconds)
        link = replace(link, always=bound)
        receiver = Receiver(
            link,
            self.subscription,
            self.policy,
            self.max_messages,
            beside_members=True,
            listen=self.listen,
            trust=self.trust,
            signer=self.signer,
        )
        receiver.reader = replace(receiver.reader, types=self._taken())
        try:
            yield receiver
            while self._live:
                self._passivate(receiver, list(self._live)[: self.max_messages])
        finally:
            receiver.forget()

    def _deliver(self, receiver: Receiver, wait_seconds: float) -> Delivery[Any]:
        self._be_member(receiver)
        self._passivate(
            receiver,
            self._live.superfluous(self.max_instances, self.idle_seconds, self.max_messages),
        )
        self._put_out(receiver)
        began = time.monotonic()
        try:
            return super()._deliver(receiver, min(wait_seconds, self._until_next_duty()))
        except BaseException:
            self._live.throw_away(self._live.used_since(began))
            raise

    def _handle(self, delivery: Delivery[Any], work: Savepoints) -> None:
        handlers = self.processor.handlers
        for message in delivery:
            handler = handlers.get(message.message_type) or handlers.get(None)
            if handler is None:
                self._unhandled(delivery, work, message, handlers)
                continue
            call = partial(
                self._call, handler, message, delivery.epoch(message), delivery.connection
            )
            self._one(delivery, work, message, watched(call, self.subscription, [message]))

    def _call(self, handler: Handler, message: Received, epoch: int, connection: Any) -> None:
        instance = self._live.use(message, epoch, self.processor)
        if not instance.active:
            instance.processor.activate(connection)
            instance.active = True
        handler(instance.processor, message, connection)
        if message.key is None:
            instance.processor.passivate(connection)
            self._live.forget(message.lane)

    def _undone(self, message: Received) -> None:
        self._live.forget(message.lane)

    # Between deliveries

    def _be_member(self, receiver: Receiver) -> None:
        """Join, or rejoin if forgotten. Periodically take over shards or pass them on."""
        if self._membership is not None and self._membership.lost:
            self._leave()
        if self._membership is None:
            subscription_id = receiver.reader.subscription_id
            self._membership = Membership(self.engine, subscription_id, self.lease_seconds)
            self._membership.enter(self._stopping.using)
            self._look_at = 0.0
        member = self._membership.member
        receiver.reader = replace(receiver.reader, owner=member.member_id)
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        link = receiver.link
        try:
            with link.transaction():
                if not member.settled(link.raw):
                    link.raw.execute(BRIEFLY)
                    member.balance(link.raw, partial(self._pass_on, link))
        except psycopg.errors.LockNotAvailable:
            log.debug("not_balanced", subscription=self.subscription)
        except Fenced as error:
            log.warning("taken_over", subscription=self.subscription, detail=str(error))
            self._leave()
            self._be_member(receiver)

    def _pass_on(self, link: Link, shards: Sequence[int]) -> None:
        """Passivate the instances of leaving shards, in the transaction that frees the shards."""
        link.raw.execute(PATIENTLY)
        leaving = set(shards)
        instances = [instance for instance in self._live if instance.shard in leaving]
        self._live.throw_away(instances)
        with Savepoints(link.raw, link.own, link.state) as work:
            for instance in instances:
                self._try(work, link.connection, instance, "passivate")

    def _passivate(self, receiver: Receiver, instances: Sequence[Instance]) -> None:
        self._live.throw_away(instances)
        self._visit(receiver.link, instances, "passivate")

    def _put_out(self, receiver: Receiver) -> None:
        """Call `Processor.output` on the next instances whose turn it is."""
        if time.monotonic() >= self._output_at and not self._live.due:
            self._live.let_all_be_due()
            self._output_at = time.monotonic() + self.output_seconds
        self._visit(receiver.link, self._live.next_due(self.max_messages), "output")

    def _visit(self, link: Link, instances: Sequence[Instance], method: str) -> None:
        """Call a method of these instances, in one transaction that holds their shards.

        Instances of lost shards are thrown away; if the transaction does not commit, all are.
        """
        if not instances or getattr(self.processor, method) is getattr(Processor, method):
            return
        assert self._membership is not None  # noqa: S101 - there are instances
        member = self._membership.member
        lost = list(instances)
        try:
            with link.transaction():
                held = member.hold(
                    link.raw, {(instance.shard, instance.epoch) for instance in instances}
                )
                with Savepoints(link.raw, link.own, link.state) as work:
                    failed = [
                        instance
                        for instance in instances
                        if (instance.shard, instance.epoch) not in held
                        or not self._try(work, link.connection, instance, method)
                    ]
                fail_point(f"processors_{method}")
            lost = failed
        finally:
            self._live.throw_away(lost)

    def _try(self, work: Savepoints, connection: Any, instance: Instance, method: str) -> bool:
        try:
            with work.piece():
                getattr(instance.processor, method)(connection)
        except Exception as error:
            if work.raw.broken:
                raise
            log.warning(
                f"{method}_failed",
                subscription=self.subscription,
                key=instance.processor.key,
                **exception(error, work.raw),
            )
            return False
        return True

    def _until_next_duty(self) -> float:
        """Return the seconds until this member's next duty: the longest wait for a delivery."""
        if self._live.due:
            return 0.0
        duties = [self._look_at]
        if oldest := self._live.oldest():
            duties += [self._output_at, oldest.used_at + self.idle_seconds]
        return max(0.0, min(duties) - time.monotonic())

    def _leave(self) -> None:
        """Free the shards. Instances that are still live are not called."""
        self._live.clear()
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.leave()
