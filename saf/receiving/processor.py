"""A processor: a class that an application writes, and that has one instance per key.

    class OrderTotals(saf.Processor):
        def activate(self, connection):
            self.total = …                           # what is known of self.key

        @saf.handles("OrderPlaced")
        def placed(self, message, connection):
            self.total += message.json()["total"]
            connection.execute(…)

`saf.receiving.processors` calls the instances, and says what it promises about them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from saf.errors import UsageError
from saf.received import Received
from saf.receiving.handlers import check_handler, described, is_async, named

Handler = Callable[[Any, Received, Any], object]
H = TypeVar("H", bound=Callable[..., object])

_MARK = "_saf_handles"


def handles(*message_types: str) -> Callable[[H], H]:
    """Mark a method as the handler of some message types; of all others, if none is named.

    The method is called with the message and the delivery's connection.

    Raises:
        UsageError: it was written without parentheses.
    """
    if any(map(callable, message_types)):
        raise UsageError("write @saf.handles(), with parentheses")

    def mark(method: H) -> H:
        setattr(method, _MARK, message_types or (None,))
        return method

    return mark


class Processor:
    """Handles the messages of one key. Subclasses have methods marked by `handles`.

    ``connection`` is the delivery's, of the kind that was given to `saf.Processors`: write on it,
    but neither commit nor roll it back. If a call raises, what it has written is undone.

    Raises:
        UsageError: when a subclass is defined: two of its methods handle one type, a method does
            not take (message, connection), or one is async.
    """

    key: str
    """The messages' key; of a message without a key, its id as text. Set before `activate`."""

    handlers: ClassVar[dict[str | None, Handler]] = {}
    """The methods that `handles` has marked, by message type."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.handlers = {}
        for method in (getattr(cls, name) for name in dir(cls)):
            for message_type in getattr(method, _MARK, ()):
                what = described(message_type)
                there = cls.handlers.get(message_type)
                if there is not None:
                    raise UsageError(f"{what} has a handler already: {named(there)}")
                check_handler(method, what, "self", "message", "connection")
                cls.handlers[message_type] = method
        for method in (cls.activate, cls.passivate, cls.output):
            if is_async(method):
                raise UsageError(f"{named(method)} is async: only handlers of saf.Worker may be")

    def activate(self, connection: Any) -> None:
        """Load what is known of the key. Called before the first message, in its transaction.

        If it raises, that message has failed.
        """

    def passivate(self, connection: Any) -> None:
        """Save what is to be kept. Called before an instance goes in order.

        An instance goes when it is idle, when there are too many, when its shard moves, and at
        shutdown. If this raises, the error is logged, and the instance goes all the same.
        """

    def output(self, connection: Any) -> None:
        """Do what is to be done on a schedule. Called as long as the instance is live.

        If it raises, the error is logged and the instance is thrown away. Its transaction may still
        fail after it returns, so what it does outside of the database may be done twice. A call
        that was missed while the process was busy or down is not made up for.
        """
