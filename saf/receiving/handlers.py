"""Handlers: what an application may register, and the words for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from saf.errors import UsageError
from saf.received import Received


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A handler of a worker."""

    call: Callable[..., Any]
    batch: bool
    waits: bool
    """Whether it is async."""

    def call_for(self, message: Received, connection: object) -> Callable[[], Any]:
        """Return the call that handles one message."""
        return partial(self.call, [message] if self.batch else message, connection)


class Handlers(dict[str | None, Registered]):
    """The handlers of a worker by message type; None is for all types without one of their own."""

    @property
    def are_async(self) -> bool:
        """Whether they are async; all of them are or none is."""
        return any(one.waits for one in self.values())

    def of(self, message: Received) -> Registered | None:
        """Return the handler for a message, if there is any."""
        return self.get(message.message_type) or self.get(None)

    def add(self, message_type: str | None, call: Callable[..., Any], *, batch: bool) -> None:
        """Register a handler.

        Raises:
            UsageError: it does not fit, or not to the other handlers.
        """
        what, waits = described(message_type), is_async(call)
        if message_type in self:
            raise UsageError(f"{what} has a handler already: {named(self[message_type].call)}")
        check_handler(call, what, "messages" if batch else "message", "connection", may_wait=True)
        for other in self.values():
            if other.waits != waits:
                raise UsageError(
                    "either all handlers of a worker are async or none: "
                    f"{named(other.call)} is{' not' * waits} async, and "
                    f"{named(call)} is{' not' * (not waits)}"
                )
        self[message_type] = Registered(call=call, batch=batch, waits=waits)


def named(call: Callable[..., object]) -> str:
    """What an error calls a function: a partial, or an object that can be called, has no name."""
    return getattr(call, "__qualname__", None) or repr(call)


def is_async(call: Callable[..., object]) -> bool:
    """Whether a function is to be awaited."""
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - of an object with such a method
    )


def check_handler(
    call: Callable[..., object], what: str, *arguments: str, may_wait: bool = False
) -> None:
    """Raise a `UsageError` unless a function can be called with these arguments.

    It may be async only if it ``may_wait``.
    """
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError:
        raise UsageError(
            f"the handler {named(call)} for {what} takes "
            f"{inspect.signature(call)}: expected ({', '.join(arguments)})"
        ) from None
    if is_async(call) and not may_wait:
        raise UsageError(
            f"the handler {named(call)} for {what} is async: only those of saf.Worker may be"
        )


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
