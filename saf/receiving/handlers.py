"""Handlers: functions that an application registers, their checks, and their watched calls.

A wrong handler is found when it is registered, not at its first message: `Handlers.add` and
`check_handler` raise a `UsageError` that names the function. `watched` adds durations and traces to
a handler's call; errors of the handler pass through. Processes that keep neither metrics nor traces
skip this.

A handler for an event's class (`saf.typed.event`) gets an object of the class in place of the
message: `of_type` returns a handler that decodes the body first. If the function needs a third
argument, it gets the message as well.

This file decides nothing about messages. `saf.receiving.loop` decides what happens after an error,
or to a message without a handler; `no_handler` is only the text for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Protocol, TypeGuard, TypeVar, overload

from saf.errors import UsageError
from saf.received import Received
from saf.telemetry import carried
from saf.telemetry.metrics import HANDLER_SECONDS, counting, timed
from saf.telemetry.tracing import processing
from saf.typed.event import Event, the_event

E = TypeVar("E")
C = TypeVar("C")
R = TypeVar("R")
S = TypeVar("S")


class OfEvent(Protocol[E]):
    """Decorator of a handler that gets an event."""

    @overload
    def __call__(self, call: Callable[[E, C], R], /) -> Callable[[E, C], R]: ...
    @overload
    def __call__(self, call: Callable[[E, C, Received], R], /) -> Callable[[E, C, Received], R]: ...


class OfEvents(Protocol[E]):
    """Decorator of a handler that gets several events of one type."""

    @overload
    def __call__(self, call: Callable[[list[E], C], R], /) -> Callable[[list[E], C], R]: ...
    @overload
    def __call__(
        self, call: Callable[[list[E], C, list[Received]], R], /
    ) -> Callable[[list[E], C, list[Received]], R]: ...


class MethodOfEvent(Protocol[E]):
    """Decorator of a processor's method that gets an event."""

    @overload
    def __call__(self, call: Callable[[S, E, C], R], /) -> Callable[[S, E, C], R]: ...
    @overload
    def __call__(
        self, call: Callable[[S, E, C, Received], R], /
    ) -> Callable[[S, E, C, Received], R]: ...


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A handler of a worker."""

    call: Callable[..., Any]
    batch: bool
    waits: bool
    """True if the handler is async."""

    def call_for(self, message: Received, connection: object) -> Callable[[], Any]:
        """Return the call that handles one message."""
        return partial(self.call, [message] if self.batch else message, connection)


class Handlers(dict[str | None, Registered]):
    """Handlers of a worker by message type; None is for all types without their own handler."""

    @property
    def are_async(self) -> bool:
        """True if the handlers are async; either all are or none."""
        return any(handler.waits for handler in self.values())

    def of(self, message: Received) -> Registered | None:
        """Return the handler for a message, if any."""
        return self.get(message.message_type) or self.get(None)

    def add(self, message_type: str | None, call: Callable[..., Any], *, batch: bool) -> None:
        """Register a handler.

        Raises:
            UsageError: the handler has the wrong form, or conflicts with the other handlers.
        """
        label, waits = described(message_type), is_async(call)
        if message_type in self:
            raise UsageError(f"{label} has a handler already: {named(self[message_type].call)}")
        check_handler(call, label, "messages" if batch else "message", "connection", may_wait=True)
        for other in self.values():
            if other.waits != waits:
                raise UsageError(
                    "either all handlers of a worker are async or none: "
                    f"{named(other.call)} is{' not' * waits} async, and "
                    f"{named(call)} is{' not' * (not waits)}"
                )
        self[message_type] = Registered(call=call, batch=batch, waits=waits)


def is_function(given: object) -> TypeGuard[Callable[..., Any]]:
    """Return whether a decorator was given its function: it was written without parentheses.

    >>> is_function(print), is_function("OrderPlaced"), is_function(str)
    (True, False, False)
    """
    return callable(given) and not isinstance(given, type)


def checked_type(given: object) -> str | type:
    """Return the message type, or the event's class, that a decorator was given.

    Raises:
        UsageError: it is neither text nor an event's class.
    """
    if isinstance(given, type):
        the_event(given)
    elif not isinstance(given, str):
        raise UsageError(
            "a handler's message type is text, such as 'OrderPlaced', or an event's class, and not "
            f"{given!r:.200}"
        )
    return given


def check_handler(
    call: Callable[..., object], what: str, *arguments: str, may_wait: bool = False
) -> None:
    """Raise a `UsageError` unless a function can be called with these arguments.

    An async function is allowed only with ``may_wait``.
    """
    if not _takes(call, *arguments):
        raise UsageError(
            f"the handler {named(call)} for {what} takes "
            f"{inspect.signature(call)}: expected ({', '.join(arguments)})"
        )
    if is_async(call) and not may_wait:
        raise UsageError(
            f"the handler {named(call)} for {what} is async: only those of saf.Worker may be"
        )


def of_type(
    message_type: str | type | None, call: Callable[..., Any], *, batch: bool, before: str = ""
) -> tuple[str | None, Callable[..., Any]]:
    """Return the name of a message type, and the handler of its messages.

    Args:
        message_type: a name, None for any type, or an event's class.
        call: the application's function.
        batch: True if it takes several messages.
        before: name of the argument before the message, if any.

    Raises:
        UsageError: the class is not an event, or the function has the wrong form.
    """
    if not isinstance(message_type, type):
        return message_type, call
    event: Event[Any] = the_event(message_type)
    event.adapter  # noqa: B018 - raises now, not at the first message
    arguments = [*filter(None, [before]), "events" if batch else "event", "connection"]
    wants_message = not _takes(call, *arguments) and _takes(call, *arguments, "message")
    if not wants_message:
        check_handler(call, described(event.name), *arguments, may_wait=True)

    def decoded(*given: Any) -> list[Any]:
        *first, message, connection = given
        value = [event.decode(one) for one in message] if batch else event.decode(message)
        return [*first, value, connection, *([message] if wants_message else [])]

    if is_async(call):

        @wraps(call)
        async def awaited(*given: Any) -> Any:
            return await call(*decoded(*given))

        return event.name, _as_itself(awaited)

    @wraps(call)
    def called(*given: Any) -> Any:
        return call(*decoded(*given))

    return event.name, _as_itself(called)


def _takes(call: Callable[..., object], *arguments: str) -> bool:
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError:
        return False
    return True


def _as_itself(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that `check_handler` checks by its own arguments."""
    del wrapper.__wrapped__  # type: ignore[attr-defined]
    return wrapper


def is_async(call: Callable[..., object]) -> bool:
    """Return whether a function must be awaited."""
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - for an object with such a method
    )


def named(call: Callable[..., object]) -> str:
    """Return a function's name for an error; a partial or a callable object has no name."""
    return getattr(call, "__qualname__", None) or repr(call)


def described(message_type: str | None) -> str:
    """Return a message type as an error names it.

    >>> described("OrderPlaced"), described(None)
    ("message type 'OrderPlaced'", 'any type')
    """
    return "any type" if message_type is None else f"message type {message_type!r}"


def no_handler(message: Received, known: Iterable[str | None]) -> str:
    """Return the error for a message without a handler."""
    types = ", ".join(map(repr, known))
    return f"no handler for message type {message.message_type!r}, only for {types}"


def watched(
    call: Callable[[], Any], subscription: str, messages: Sequence[Received], *, waits: bool = False
) -> Callable[[], Any]:
    """Return a handler's call, timed and traced. ``waits``: the handler is async."""
    if not counting() and not carried.on():
        return call
    if waits:

        async def awaited() -> Any:
            with (
                timed(HANDLER_SECONDS, subscription=subscription),
                processing(subscription, messages),
            ):
                return await call()

        return awaited

    def called() -> Any:
        with (
            timed(HANDLER_SECONDS, subscription=subscription),
            processing(subscription, messages),
        ):
            return call()

    return called
