"""Queues: what all brokers of another make share, such as Redis: settings, and an open link.

A message that is sent to a queue leaves saf: `saf.destinations.mapping` defines its form there. A
queue knows no services, and no end of a dialog can live there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from string import Formatter
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, cast
from uuid import UUID

from pydantic import AfterValidator

from saf.destinations.settings import SecuredSettings
from saf.errors import Unavailable

Format = Literal["saf", "cloudevents", "cloudevents-structured"]
"""Names of headers. With `cloudevents-structured`, the body is the whole event."""

PLACEHOLDERS = {
    "service": "the service that the message is addressed to",
    "message_type": "its type; `untyped` if it has none",
    "source": "the broker_id of its source",
    "shard": "the shard of its key at its source",
}
"""Placeholders in a template of topics, each with its meaning."""

ENOUGH = 3
"""Fewest servers that tolerate the loss of one server."""


def _template(text: str) -> str:
    """Reject an invalid template.

    >>> _template("orders.{service}")
    'orders.{service}'
    >>> _template("orders.{sevice}")
    Traceback (most recent call last):
    ...
    ValueError: '{sevice}' is not one of {service}, {message_type}, {source}, {shard}
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


class Closable(Protocol):
    """A link."""

    def close(self) -> None:
        """Close the connection."""


class QueueSettings(SecuredSettings):
    """Base class for the settings of queues.

    The folder of a kind has a module ``server``: its class `Link` connects to the server when it is
    made, and its function `errors` translates the errors of a link.
    """

    topic: Topic = "{service}"
    """Template of the topic that messages are stored under, with `{service}`, `{message_type}`,
    `{source}` and `{shard}`."""
    format: Format = "saf"
    """Names of headers: `saf-id` and so on, or as CloudEvents: `cloudevents` in binary mode,
    `cloudevents-structured` with the whole event as the body."""

    @property
    def headers_as(self) -> Format:
        """Names of headers."""
        return self.format

    def link(self, name: str) -> Any:
        """Return a link that is connected; the caller closes it.

        Raises:
            Unavailable: the server does not answer, or refuses.
        """
        with self.errors(name):
            return self._module(name, "server").Link(name, self)

    def errors(self, name: str) -> AbstractContextManager[None]:
        """Translate the errors of a link."""
        errors = self._module(name, "server").errors
        return cast("AbstractContextManager[None]", errors(f"destination {name!r}", self))

    @contextmanager
    def connected(self, name: str) -> Iterator[Any]:
        """Open a link, and translate its errors; see `LinkedSettings.connected`."""
        with closing(self.link(name)) as link, self.errors(name):
            yield link

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Raise if messages must not be stored there; see `DestinationSettings.problems`."""
        with self.connected(name) as link:
            link.look()
        yield from ()


Link = TypeVar("Link", bound=Closable)
Settings = TypeVar("Settings", bound=QueueSettings)


class Queue(ABC, Generic[Link, Settings]):
    """Part of a `saf.destinations.Destination`: its link, which stays open while a task uses it."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.what = f"destination {name!r}"
        self.settings = settings
        self._link: Link | None = None
        self._identity: UUID | None = None

    @abstractmethod
    def _prepare(self, link: Link) -> UUID:
        """Ensure that the server keeps its messages; return its identity."""

    def identity(self) -> UUID:
        """Return the server's identity; a server without one becomes a destination."""
        self.connect()
        assert self._identity is not None  # noqa: S101 - set by connect()
        return self._identity

    def connect(self) -> None:
        """Connect, and ensure that the server keeps its messages."""
        if self._link is not None:
            return
        self._link = self.settings.link(self.name)
        try:
            with self._connected() as link:
                self._identity = self._prepare(link)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the link, if one is open."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    @contextmanager
    def _connected(self) -> Iterator[Link]:
        """Yield the link; after an error, translate the error and close the link."""
        link = self._link
        assert link is not None  # noqa: S101 - connected before
        try:
            with self.settings.errors(self.name):
                yield link
        except Unavailable:
            self.close()
            raise


def kept_by(servers: int) -> str:
    """Return the part of a promise that depends on how many servers keep each message."""
    if servers == 1:
        return (
            "one server has each message; a crash of its process loses nothing that was "
            "acknowledged"
        )
    return f"{servers} servers have each message, most of them before it is acknowledged"
