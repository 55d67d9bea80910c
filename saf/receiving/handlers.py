"""Handlers: what an application may register, and the words for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from saf.errors import UsageError
from saf.received import Received


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
