"""Queues: settings that all brokers of another make share, such as Redis.

A message that is given to one of them leaves saf: `saf.destinations.mapping` says what it becomes.
A queue knows no services, and no end of a dialog can live there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from string import Formatter
from typing import Annotated, Literal

from pydantic import AfterValidator

from saf.destinations.linked import LinkedSettings
from saf.errors import Refused

Format = Literal["saf", "cloudevents", "cloudevents-structured"]
"""How headers are named; structured: the body is the whole event."""

PLACEHOLDERS = {
    "service": "the service that the message is addressed to",
    "message_type": "its type; `untyped` if it has none",
    "source": "the broker_id of its source",
    "shard": "the shard of its key at its source",
}
"""What may stand in a template of topics, and what it is."""


def _template(text: str) -> str:
    """Refuse a template that is none.

    >>> _template("orders.{service}")
    'orders.{service}'
    >>> _template("orders.{sevice}")
    Traceback (most recent call last):
    ...
    ValueError: '{sevice}' is none of {service}, {message_type}, {source}, {shard}
    """
    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    try:
        parts = [*Formatter().parse(text)]
    except ValueError as error:
        raise ValueError(f"{text!r} is not a template ({error}); it may have {known}") from None
    for _, name, form, conversion in parts:
        if name is not None and (name not in PLACEHOLDERS or form or conversion):
            raise ValueError(f"{'{' + name + '}'!r} is not one of {known}")
    if not text:
        raise ValueError("is empty")
    return text


Topic = Annotated[str, AfterValidator(_template)]


class QueueSettings(LinkedSettings):
    """What the settings of each broker of another make have."""

    topic: Topic = "{service}"
    """What messages are stored under; `{service}`, `{message_type}`, `{source}` and `{shard}` may
    stand in it."""
    format: Format = "saf"
    """How headers are named: `saf-id` and so on, or as CloudEvents: `cloudevents` in binary mode,
    `cloudevents-structured` with the whole event as the body."""

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Raise what the server would be refused for; see `DestinationSettings.problems`."""
        with self._connected(name) as link:
            link.look()
        yield from ()


def unusable(what: str, reason: str, cure: str) -> Refused:
    """Return the error for a queue that a person has to mend, other than its login."""
    error = Refused(what, reason, cure)
    error.args = (f"{what} cannot be used: {reason}. {cure[0].upper()}{cure[1:]}",)
    return error


@contextmanager
def readable(what: str, said: str, cure: str) -> Iterator[None]:
    """Read, within it, what a destination says of itself: if it is damaged, no message is at fault.

    ``said``: what is read, such as "its marks".

    Raises:
        Refused: it is not what saf has written.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{said} cannot be read ({type(error).__name__}: {error})"
        raise unusable(what, reason, cure) from None


@contextmanager
def client_needed(name: str, extra: str) -> Iterator[None]:
    """Import a client within it: without one, only this destination's messages wait.

    Raises:
        Refused: the extra is not installed here.
    """
    try:
        yield
    except ImportError as error:
        raise unusable(
            f"destination {name!r}",
            f"its client is not installed here ({error})",
            f"install it: pip install 'saf-outbox[{extra}]', also where Spark's executors are",
        ) from None
