"""Settings of a destination: a table ``[destinations.NAME]`` of saf.toml, with a class per kind.

Each kind has a class derived from `DestinationSettings`, in a module that is quick to import: a
forwarder's driver reads settings and has no Arrow. The class declares the kind's capabilities, and
opens the destination. `saf.destinations.kinds` finds the class by the kind's name.

Each of saf's own kinds is a folder of `saf.destinations` with the kind's name. The folder's other
modules are imported where they are used, because drivers lack Arrow, and some machines the kind's
client. A package's own kind overrides `DestinationSettings.open` instead.

*Links.* A link is a connection of saf's own with bounded waits, maybe with TLS. The driver uses a
link to ask a destination for its identity and its marks: `LinkedSettings`, `SecuredSettings`.

*Secrets.* Settings are logged, printed and shown in errors. So a secret is a `pydantic.SecretStr`,
or part of a `saf.database.Dsn`: both hide it. Any other field whose name suggests a secret is
rejected when its class is defined. A message of a server or a driver may quote a secret:
`DestinationSettings.redact` removes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast, get_args
from uuid import UUID

import pydantic
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    model_validator,
)

from saf.database import Dsn
from saf.database.bounds import Bounds
from saf.destinations import Capabilities, Destination, FewMessages, Reading
from saf.destinations.marks import Known
from saf.errors import CannotReadBack, Refused
from saf.log.rates import per_second

if TYPE_CHECKING:
    from saf.log.ring import Archive

Quality = Literal["at_most_once", "at_least_once", "exactly_once"]

MAY_HOLD_A_SECRET = re.compile(r"pass|secret|token|credential|dsn|ur[il]\b|ur[il]_", re.IGNORECASE)


def within(lowest: float, highest: float) -> AfterValidator:
    """Return a validator of a number's range, so that later code never gets an unusable number."""

    def check(value: float) -> float:
        if not lowest <= value <= highest:  # so is nan
            raise ValueError(f"{value!r} is not from {lowest:,} to {highest:,}")
        return value

    check.__doc__ = f"from {lowest:,} to {highest:,}"
    return AfterValidator(check)


class Written(str):
    """A dsn of saf.toml, with its variables replaced."""

    __slots__ = ("origin",)
    origin: str
    """Where an operator can fix it."""

    def __new__(cls, text: str, origin: str) -> Self:
        """Return the text with its origin."""
        result = super().__new__(cls, text)
        result.origin = origin
        return result


def _dsn(value: object) -> object:
    if isinstance(value, Written):
        return Dsn(value, origin=value.origin)
    return Dsn(value) if isinstance(value, str) else value


def _is_rate(text: str) -> str:
    """such as `100/s`"""
    per_second(text)
    return text


Rate = Annotated[str, AfterValidator(_is_rate)]
Connections = Annotated[int, within(1, 100_000)]
DsnField = Annotated[Dsn, BeforeValidator(_dsn), PlainSerializer(str)]


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """Promise of a destination as it is set up now."""

    server: str
    """Name of the server or table, with its version."""
    promise: str
    """Guarantee for a message, and the events that may still undo it."""
    more: Sequence[tuple[str, str]] = ()
    """Missing guarantees, each with the setting that would provide it."""


def refuse_shown_secrets(cls: type[BaseModel]) -> None:
    """Raise if a class of settings has a field that may show a secret.

    Raises:
        TypeError: names the field.
    """
    for name, field in cls.model_fields.items():
        types = set(get_args(field.annotation) or [field.annotation]) - {type(None)}
        if MAY_HOLD_A_SECRET.search(name) and not types <= {pydantic.SecretStr, Dsn}:
            raise TypeError(
                f"{cls.__name__}.{name} may hold a secret, which would be shown: make it a "
                "pydantic.SecretStr, or a saf.database.Dsn"
            )


class DestinationSettings(BaseModel):
    """Address and use of a destination, and how to open it."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    capabilities: ClassVar[Capabilities] = Capabilities()
    client: ClassVar[str | None] = None
    """Module of the client; None if saf needs no client."""
    stores: ClassVar[tuple[str, str]]
    """Module of the kind's folder, and its class of the destination. The module's function `read`
    opens the destination for reading back."""

    kind: str
    """Kind of destination; see `saf.destinations.kinds`."""
    quality: Quality = Field(default=None, validate_default=True)
    """Quality of service. Default: the best that the kind supports."""
    max_connections: Connections | None = None
    """Most connections that one run opens to the destination, and so most tasks at a time."""
    rate: Rate | None = None
    """Most messages that all forwarders of a source store there in a time. Default: unlimited."""
    concurrency: Connections | None = None
    """Most tasks of all forwarders of a source that store there at a time. Default: unlimited."""

    @property
    def is_limited(self) -> bool:
        """Whether forwarders must keep a rate or a concurrency."""
        return self.rate is not None or self.concurrency is not None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Reject a field that may show a secret."""
        refuse_shown_secrets(cls)

    @pydantic.field_validator("quality", mode="before")
    @classmethod
    def _can_be(cls, quality: object) -> object:
        if quality is None:
            return "exactly_once" if cls.capabilities.exactly_once else "at_least_once"
        cls.check_quality(quality)
        return quality

    @classmethod
    def check_quality(cls, quality: object) -> None:
        """Raise a ValueError for a quality of service that the kind does not support."""
        if quality == "exactly_once" and not cls.capabilities.exactly_once:
            kind = cls.model_fields["kind"].default
            raise ValueError(
                f"a destination of kind {kind!r} cannot store exactly once: set 'at_least_once'"
            )

    # For every kind

    def open(self, name: str, *, keep: bool = False) -> Destination:  # noqa: ARG002 - for some kinds
        """Return the destination, not connected yet. ``keep``: stay connected for the next task."""
        module, destination = self.stores
        return cast("Destination", getattr(self._module(name, module), destination)(name, self))

    def few_messages(self) -> Callable[[], FewMessages] | None:
        """Return what opens a session for few messages; None if the kind has no such sessions."""
        return None

    def identity(self, name: str) -> UUID:
        """Return the destination's identity like `Destination.identity`, over its own connection.

        The driver calls this. It has no Arrow, and waits only briefly.
        """
        raise NotImplementedError(name)

    # For some kinds

    def known(self, name: str, source: UUID, *, role: str) -> Known:
        """Return how far the destination has got with a source, if it stores exactly once.

        ``role`` names the caller, for display at the server.
        """
        raise NotImplementedError(name, source, role)

    def reading(self, name: str) -> AbstractContextManager[Reading]:
        """Open the destination for reading back; see `saf.destinations`.

        Raises:
            CannotReadBack: the destination cannot be read back, or can no longer be.
        """
        if not self.capabilities.reads_back:
            raise CannotReadBack(name, f"its kind, {self.kind!r}, cannot be read back")
        module, _ = self.stores
        return cast("AbstractContextManager[Reading]", self._module(name, module).read(name, self))

    def broker(self) -> Dsn | None:
        """Return the dsn if this is a broker, where services and ends of dialogs live."""
        return None

    def bounded(self, bounds: Bounds) -> Self:  # noqa: ARG002 - for kinds that wait
        """Return these settings with saf.toml's ``[bounds]``, if the kind ever waits."""
        return self

    @classmethod
    def at(cls, place: str) -> Self:  # noqa: ARG003 - for kinds with archives
        """Return the settings of a log archive at a place, such as a table's address.

        Raises:
            ValueError: the kind has no archives, or the place is invalid.
        """
        raise ValueError(f"the kind {cls.model_fields['kind'].default!r} takes no archive of a log")

    def archive(self, dsn: Dsn) -> Archive:
        """Return the archive that stores slots of a broker's logs at the place given to `at`.

        Raises:
            MissingExtra: the client is not installed here.
        """
        raise NotImplementedError(dsn)

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield each problem and its cure, for `saf doctor`, which examines brokers itself.

        Raises the same errors as opening the destination.
        """
        destination = self.open(name)
        try:
            destination.connect()
        finally:
            destination.close()
        yield from ()

    def probe(self, name: str) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - for object stores
        """Yield each problem and its cure that only writing reveals, for `saf destination check`.

        An object store does not report whether it keeps the guarantees that a table relies on. So
        this writes a probe there, and deletes it. Raises the same errors as opening the
        destination.
        """
        yield from ()

    def guarantee(self, name: str) -> Guarantee:  # noqa: ARG002 - for kinds that ask
        """Return the destination's promise, for `saf destination check` and `saf doctor`.

        A kind asks its server for the settings that its promise depends on. Raises the same errors
        as opening the destination.
        """
        return Guarantee(server=f"kind {self.kind!r}", promise=self.quality.replace("_", " "))

    # For saf's own kinds

    @classmethod
    def _folder(cls) -> str:
        return str(cls.model_fields["kind"].default)

    def _module(self, name: str, module: str) -> ModuleType:
        """Import a module of the kind's folder; raise `Refused` if the client is missing."""
        folder = self._folder()
        with client_needed(f"destination {name!r}", folder) if self.client else nullcontext():
            return import_module(f"{__package__}.{folder}.{module}")

    # Secrets

    def redact(self, text: str) -> str:
        """Return ``text`` on one line, without the secrets of these settings."""
        values = self.__dict__.values()
        nested = [item for value in values if isinstance(value, Mapping) for item in value.values()]
        for value in [*values, *nested]:
            if isinstance(value, Dsn):
                text = value.redact(text)
            elif isinstance(value, pydantic.SecretStr) and value.get_secret_value():
                text = text.replace(value.get_secret_value(), "***")
        return " ".join(text.split())


class BoundedSettings(pydantic.BaseModel):
    """Base class for settings that know saf.toml's ``[bounds]``."""

    _bounds: Bounds = PrivateAttr(default_factory=Bounds)

    @property
    def bounds(self) -> Bounds:
        """Limits of all waits."""
        return self._bounds

    def bounded(self, bounds: Bounds) -> Self:
        """Return these settings with saf.toml's ``[bounds]``."""
        copy = self.model_copy()
        copy._bounds = bounds
        return copy


class LinkedSettings(BoundedSettings, DestinationSettings):
    """Base class for the settings of kinds with links."""

    def connected(self, name: str) -> AbstractContextManager[Any]:
        """Open a link for a ``with`` block; it has `identity`, `known` and `guarantee` at least.

        Typed as `Any`, so that modules imported early do not need each kind's own type.
        """
        raise NotImplementedError(name)

    def identity(self, name: str) -> UUID:
        """Return the identity of the other end; see `DestinationSettings.identity`."""
        with self.connected(name) as link:
            identity: UUID = link.identity()
            return identity

    def known(self, name: str, source: UUID, *, role: str) -> Known:  # noqa: ARG002 - unused here
        """Return the marks of a source; see `DestinationSettings.known`."""
        with self.connected(name) as link:
            known: Known = link.known(source)
            return known

    def guarantee(self, name: str) -> Guarantee:
        """Return the promise of the other end's settings; see `DestinationSettings.guarantee`."""
        with self.connected(name) as link:
            promise: Guarantee = link.guarantee()
            return promise


class SecuredSettings(LinkedSettings):
    """Base class for the settings of kinds with TLS."""

    turn_on_tls: ClassVar[str]
    """How to turn TLS on, for an error."""

    ca_file: Path | None = None
    """With TLS: CA certificates that verify the server's. Default: the system's."""
    certificate_file: Path | None = None
    """With TLS: the client's certificate."""
    key_file: Path | None = None
    """With TLS: the key of the client's certificate."""

    @property
    def address(self) -> Any:
        """Address of the server, in the kind's own form, with ``tls``."""
        raise NotImplementedError

    @property
    def uses_tls(self) -> bool:
        """Return True if TLS is on."""
        return bool(self.address.tls)

    @model_validator(mode="after")
    def _has_what_tls_needs(self) -> Self:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file belong together")
        if not self.uses_tls and (self.ca_file or self.certificate_file):
            raise ValueError(f"certificates need {self.turn_on_tls}")
        return self


def unusable(what: str, reason: str, cure: str) -> Refused:
    """Return the error for a queue that an operator must fix; not for a refused login."""
    error = Refused(what, reason, cure)
    error.args = (f"{what} cannot be used: {reason}. {cure[0].upper()}{cure[1:]}",)
    return error


def rights(what: str) -> str:
    """Return the cure if a server denies a right.

    >>> rights("source 'payments'")
    'let its user do what docs/sources.md lists'
    """
    page = "sources" if what.startswith("source ") else "destinations"
    return f"let its user do what docs/{page}.md lists"


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
def client_needed(what: str, extra: str) -> Iterator[None]:
    """Import a client in this block. If it is missing, only the messages of ``what`` wait.

    Raises:
        Refused: the extra is not installed here.
    """
    try:
        yield
    except ImportError as error:
        raise unusable(
            what,
            f"its client is not installed here ({error})",
            f"install it: pip install 'saf-outbox[{extra}]', also where Spark's executors are",
        ) from None
