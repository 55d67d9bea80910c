"""A processor: a class written by the application, with one instance per key.

    class OrderTotals(saf.Processor):
        def activate(self, connection):
            self.total = …                           # load the state of self.key

        @saf.handles("OrderPlaced")
        def placed(self, message, connection):
            self.total += message.json()["total"]
            connection.execute(…)

`saf.receiving.processors` calls the instances, and lists the guarantees for them.
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
