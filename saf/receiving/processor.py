"""Processors: classes written by the application, with one instance per key.

    class OrderTotals(saf.Processor):
        def activate(self, connection):
            self.total = …                           # load the state of self.key

        @saf.handles("OrderPlaced")
        def placed(self, message, connection):
            self.total += message.json()["total"]
            connection.execute(…)

A faulty class raises `UsageError` when it is defined, not at its first message.

`Instances` holds a member's live instances: it finds them by key, and selects the old ones, which
are then passivated. It calls none of their methods. `saf.receiving.processors` calls the instances,
and lists the guarantees for them.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from saf.errors import UsageError
from saf.received import Received
from saf.receiving.handlers import check_handler, described, is_async, named

Handler = Callable[[Any, Received, Any], object]
H = TypeVar("H", bound=Callable[..., object])

_MARK = "_saf_handles"


def handles(*message_types: str) -> Callable[[H], H]:
    """Mark a method as the handler of message types; without types, of all other types.

    The method is called with the message and the delivery's connection.

    Raises:
        UsageError: the decorator was written without parentheses.
    """
    if any(map(callable, message_types)):
        raise UsageError("write @saf.handles(), with parentheses")

    def mark(method: H) -> H:
        setattr(method, _MARK, message_types or (None,))
        return method

    return mark


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
            for message_type in getattr(method, _MARK, ()):
                description = described(message_type)
                existing = cls.handlers.get(message_type)
                if existing is not None:
                    raise UsageError(f"{description} has a handler already: {named(existing)}")
                check_handler(method, description, "self", "message", "connection")
                cls.handlers[message_type] = method
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
