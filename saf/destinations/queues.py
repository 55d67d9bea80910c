"""Queues: settings shared by all brokers of another make, such as Redis.

A message that is sent to a queue leaves saf: `saf.destinations.mapping` defines its form there. A
queue knows no services, and no end of a dialog can live there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from string import Formatter
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator

from saf.destinations import Destination
from saf.destinations.linked import SecuredSettings
from saf.destinations.reading import Reading
from saf.destinations.settings import Guarantee
from saf.errors import Refused

Format = Literal["saf", "cloudevents", "cloudevents-structured"]
"""Names of headers. With `cloudevents-structured`, the body is the whole event."""

PLACEHOLDERS = {
    "service": "the service that the message is addressed to",
    "message_type": "its type; `untyped` if it has none",
    "source": "the broker_id of its source",
    "shard": "the shard of its key at its source",
}
"""Placeholders in a template of topics, each with its meaning."""

FOLDER = "saf.destinations"
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


class QueueSettings(SecuredSettings):
    """Base class for the settings of queues.

    A kind is a folder of `saf.destinations` with its name. The modules of the folder are imported
    where they are used, because drivers lack Arrow, and some machines the kind's client:

        server     `open_link` connects a link, and `errors` translates its errors; `guarantee`
                   returns the promise of the server's settings
        reading    `read` opens what is stored there for reading, if the kind reads back
        `stores`   the module and the class of the destination
    """

    client: ClassVar[str | None] = None
    """Module of the client; None if saf speaks the protocol itself."""
    stores: ClassVar[tuple[str, str]]
    """Module and class of the destination."""

    topic: Topic = "{service}"
    """Template of the topic that messages are stored under, with `{service}`, `{message_type}`,
    `{source}` and `{shard}`."""
    format: Format = "saf"
    """Names of headers: `saf-id` and so on, or as CloudEvents: `cloudevents` in binary mode,
    `cloudevents-structured` with the whole event as the body."""

    def open(self, name: str, *, keep: bool = False) -> Destination:  # noqa: ARG002 - nothing to keep
        """Return the destination; see `DestinationSettings.open`."""
        module, destination = self.stores
        return cast("Destination", getattr(self._module(name, module), destination)(name, self))

    @classmethod
    def _folder(cls) -> str:
        return str(cls.model_fields["kind"].default)

    def _module(self, name: str, module: str) -> ModuleType:
        """Import a module of the kind's folder; raise `Refused` if the client is missing."""
        folder = self._folder()
        with client_needed(name, folder) if self.client else nullcontext():
            return import_module(f"{FOLDER}.{folder}.{module}")

    @contextmanager
    def connected(self, name: str) -> Iterator[Any]:
        """Open a link, and translate its errors; see `LinkedSettings.connected`."""
        server = self._module(name, "server")
        link = server.open_link(name, self)
        try:
            with server.errors(link.what, self):
                yield link
        finally:
            link.close()

    def reading(self, name: str) -> AbstractContextManager[Reading]:
        """Open what is stored there for reading; see `DestinationSettings.reading`.

        Raises:
            CannotReadBack: the kind cannot be read back, or messages were removed.
        """
        if not self.capabilities.reads_back:
            return super().reading(name)
        return cast(
            "AbstractContextManager[Reading]", self._module(name, "reading").read(name, self)
        )

    def guarantee(self, name: str) -> Guarantee:
        """Return the promise of the server's settings; see `DestinationSettings.guarantee`."""
        with self.connected(name) as link:
            return cast("Guarantee", self._module(name, "server").guarantee(link))

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Raise if messages must not be stored there; see `DestinationSettings.problems`."""
        with self.connected(name) as link:
            link.look()
        yield from ()


def kept_by(servers: int) -> str:
    """Return the part of a promise that depends on how many servers keep each message."""
    if servers == 1:
        return (
            "one server has each message; a crash of its process loses nothing that was "
            "acknowledged"
        )
    return f"{servers} servers have each message, most of them before it is acknowledged"


def unusable(what: str, reason: str, cure: str) -> Refused:
    """Return the error for a queue that an operator must fix; not for a refused login."""
    error = Refused(what, reason, cure)
    error.args = (f"{what} cannot be used: {reason}. {cure[0].upper()}{cure[1:]}",)
    return error


@contextmanager
def readable(what: str, said: str, cure: str) -> Iterator[None]:
    """Read a destination's own state in this block. If it is damaged, no message is at fault.

    ``said`` names the state, such as "its marks".

    Raises:
        Refused: the state is not as saf writes it.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{said} cannot be read ({type(error).__name__}: {error})"
        raise unusable(what, reason, cure) from None


@contextmanager
def client_needed(name: str, extra: str) -> Iterator[None]:
    """Import a client in this block. If it is missing, only this destination's messages wait.

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
