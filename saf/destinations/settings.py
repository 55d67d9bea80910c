"""Settings of a destination: a table ``[destinations.NAME]`` of saf.toml, with a class per kind.

Each kind has a class derived from `DestinationSettings`, in a module that is quick to import: a
forwarder's driver reads settings and has no Arrow. The class declares the kind's capabilities, and
opens the destination. `saf.destinations.kinds` finds the class by the kind's name.

*Secrets.* Settings are logged, printed and shown in errors. So a secret is a `pydantic.SecretStr`,
or part of a `saf.database.Dsn`: both hide it. Any other field whose name suggests a secret is
rejected when its class is defined. A message of a server or a driver may quote a secret:
`DestinationSettings.redact` removes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args
from uuid import UUID

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from saf.database import Dsn
from saf.database.bounds import Bounds
from saf.destinations import Capabilities, Destination
from saf.destinations.marks import Known
from saf.destinations.reading import Reading
from saf.errors import CannotReadBack

if TYPE_CHECKING:
    from saf.log.ring import Archive

Quality = Literal["at_most_once", "at_least_once", "exactly_once"]


def within(lowest: float, highest: float) -> AfterValidator:
    """Return a validator of a number's range, so that later code never gets an unusable number."""

    def check(value: float) -> float:
        if not lowest <= value <= highest:  # so is nan
            raise ValueError(f"{value!r} is not from {lowest:,} to {highest:,}")
        return value

    check.__doc__ = f"from {lowest:,} to {highest:,}"
    return AfterValidator(check)


def _dsn(value: object) -> object:
    return Dsn(value) if isinstance(value, str) else value


Connections = Annotated[int, within(1, 100_000)]
DsnField = Annotated[Dsn, BeforeValidator(_dsn), PlainSerializer(str)]

MAY_HOLD_A_SECRET = re.compile(r"pass|secret|token|credential|dsn|ur[il]\b|ur[il]_", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """Promise of a destination as it is set up now."""

    server: str
    """Name of the server or table, with its version."""
    promise: str
    """Guarantee for a message, and the events that may still undo it."""
    more: Sequence[tuple[str, str]] = ()
    """Missing guarantees, each with the setting that would provide it."""


class DestinationSettings(BaseModel):
    """Address and use of a destination, and how to open it."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    capabilities: ClassVar[Capabilities] = Capabilities()

    kind: str
    """Kind of destination; see `saf.destinations.kinds`."""
    quality: Quality = Field(default=None, validate_default=True)
    """Quality of service. Default: the best that the kind supports."""
    max_connections: Connections | None = None
    """Most connections that one run opens to the destination, and so most tasks at a time."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Reject a field that may show a secret."""
        for name, field in cls.model_fields.items():
            types = set(get_args(field.annotation) or [field.annotation]) - {type(None)}
            if MAY_HOLD_A_SECRET.search(name) and not types <= {pydantic.SecretStr, Dsn}:
                raise TypeError(
                    f"{cls.__name__}.{name} may hold a secret, which would be shown: make it a "
                    "pydantic.SecretStr, or a saf.database.Dsn"
                )

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

    def open(self, name: str, *, keep: bool = False) -> Destination:
        """Return the destination, not connected yet. ``keep``: stay connected for the next task."""
        raise NotImplementedError(name, keep)

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
        """Open the destination for reading back; see `saf.destinations.reading`.

        Raises:
            CannotReadBack: the destination cannot be read back, or can no longer be.
        """
        raise CannotReadBack(name, f"its kind, {self.kind!r}, cannot be read back")

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
