"""A processor: the class that an application writes, of which each key has an instance.

    class OrderTotals(saf.Processor):
        def activate(self, connection):
            self.total = …                           # what is known of self.key

        @saf.handles("OrderPlaced")
        def placed(self, message, connection):
            self.total += message.json()["total"]
            connection.execute(…)

`saf.receiving.processors` feeds the instances, and says what is promised about them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from saf.errors import UsageError
from saf.received import Received
from saf.receiving.loop import check_handler, described

Handler = Callable[[Any, Received, Any], object]
H = TypeVar("H", bound=Callable[..., object])

_MARK = "_saf_handles"


def handles(*message_types: str) -> Callable[[H], H]:
    """Mark a method of (self, message, connection) for some types; for all others if none is named.

    Raises:
        UsageError: it is written without parentheses.
    """
    if any(map(callable, message_types)):
        raise UsageError("write @saf.handles(), with parentheses")

    def mark(method: H) -> H:
        setattr(method, _MARK, message_types or (None,))
        return method

    return mark


class Processor:
    """What is done for one key. Subclasses have methods marked by `handles`.

    ``connection`` is the delivery's, of the kind that was given to `saf.Processors`: write on it,
    and neither commit nor roll back. What a call that raises has written is undone.

    Raises:
        UsageError: when a subclass is defined, two of its methods are for one type, or one takes
            something else.
    """

    key: str
    """The messages' key; of a message without key, its id as text. Set before `activate`."""

    handlers: ClassVar[dict[str | None, Handler]] = {}
    """The marked methods, by message type."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.handlers = {}
        for method in (getattr(cls, name) for name in dir(cls)):
            for message_type in getattr(method, _MARK, ()):
                what = described(message_type)
                there = cls.handlers.get(message_type)
                if there is not None:
                    raise UsageError(f"{what} has a handler already: {there.__qualname__}")
                check_handler(method, what, "self", "message", "connection")
                cls.handlers[message_type] = method

    def activate(self, connection: Any) -> None:
        """Before the first message here, in its transaction: load what is known of the key.

        If it raises, the message has failed.
        """

    def passivate(self, connection: Any) -> None:
        """Before the instance goes in order: idle, one too many, its shard moves, or shutdown.

        If it raises, the error is logged, and the instance goes all the same.
        """

    def output(self, connection: Any) -> None:
        """On a schedule, as long as the instance is live.

        If it raises, the error is logged and the instance thrown away. What it does outside of the
        database may be done again, because its transaction may fail afterwards. A time that passed
        while the process was busy or down is not made up for.
        """
