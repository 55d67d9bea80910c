"""Settings of a destination: a table ``[destinations.NAME]`` of saf.toml, whose kind is a class.

Each kind has a class of its own, derived from `DestinationSettings`, in a module that is quick to
import, because a forwarder's driver reads settings and has no Arrow. The class says what the kind
can do, and opens what does the work. `saf.destinations.kinds` finds the class by the kind's name.

*Secrets.* Settings are logged, printed and shown in errors. So a secret is a `pydantic.SecretStr`,
or a part of a `saf.database.Dsn`: both are shown without it. Any other field whose name says that
it may hold a secret is refused when its class is defined. A message of a server or a driver may
quote a secret: `DestinationSettings.redact` takes it out.
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
    """The range that a number must have, so that nothing later meets one it cannot work with."""

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
    """What a destination really promises, as it is set up now."""

    server: str
    """What it is, with its version."""
    promise: str
    """What becomes of a message, and what may take it back after all."""
    more: Sequence[tuple[str, str]] = ()
    """What it does not give, each with the setting that would give it."""


class DestinationSettings(BaseModel):
    """Where a destination is, how it is used, and what opens it."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    capabilities: ClassVar[Capabilities] = Capabilities()

    kind: str
    """What the destination is; see `saf.destinations.kinds`."""
    quality: Quality = Field(default=None, validate_default=True)
    """The quality of service; by default, the best that the kind can give."""
    max_connections: Connections | None = None
    """The most connections that one run opens to it, which is the most tasks at a time."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Refuse a field that may show a secret."""
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
        """Raise a ValueError for a quality of service that the kind cannot give."""
        if quality == "exactly_once" and not cls.capabilities.exactly_once:
            kind = cls.model_fields["kind"].default
            raise ValueError(
                f"a destination of kind {kind!r} cannot store exactly once: set 'at_least_once'"
            )

    # What every kind has

    def open(self, name: str, *, keep: bool = False) -> Destination:
        """Return the destination, not connected yet. ``keep``: stay connected for the next task."""
        raise NotImplementedError(name, keep)

    @classmethod
    def preload(cls) -> None:
        """Import the modules that `open` imports; called for saf's own kinds only."""

    def identity(self, name: str) -> UUID:
        """Return what the destination is, as `Destination.identity` does; by its own connection.

        The driver asks this. It has no Arrow, and waits only shortly.
        """
        raise NotImplementedError(name)

    # What some kinds have

    def known(self, name: str, source: UUID, *, role: str) -> Known:
        """Return how far the destination has got with a source, if it stores exactly once.

        ``role`` says who asks, as servers show it.
        """
        raise NotImplementedError(name, source, role)

    def reading(self, name: str) -> AbstractContextManager[Reading]:
        """Open what the destination holds for reading; see `saf.destinations.reading`.

        Raises:
            CannotReadBack: it cannot be read, or not any more.
        """
        raise CannotReadBack(name, f"its kind, {self.kind!r}, cannot be read back")

    def broker(self) -> Dsn | None:
        """The dsn of its broker, if it is one: then services and ends of dialogs live there."""
        return None

    def bounded(self, bounds: Bounds) -> Self:  # noqa: ARG002 - for those that wait
        """Return these settings with saf.toml's ``[bounds]``, if the kind waits for anything."""
        return self

    @classmethod
    def at(cls, place: str) -> Self:  # noqa: ARG003 - for those that have archives
        """Return the settings of an archive of logs, which is at a place such as a table's address.

        Raises:
            ValueError: the kind has no archives, or this is no place for one.
        """
        raise ValueError(f"the kind {cls.model_fields['kind'].default!r} takes no archive of a log")

    def archive(self, dsn: Dsn) -> Archive:
        """Return what writes slots of a broker's logs to what `at` has returned.

        Raises:
            MissingExtra: its client is not installed here.
        """
        raise NotImplementedError(dsn)

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Give each problem and its cure, for `saf doctor`, which itself examines a broker.

        Raises what opening the destination raises.
        """
        destination = self.open(name)
        try:
            destination.connect()
        finally:
            destination.close()
        yield from ()

    def probe(self, name: str) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - for object stores
        """Give each problem and its cure that only writing shows, for `saf destination check`.

        An object store does not tell whether it keeps what the promise of a table rests on. So a
        probe is written there, and deleted. It raises what opening the destination raises.
        """
        yield from ()

    def guarantee(self, name: str) -> Guarantee:  # noqa: ARG002 - for those that ask there
        """Return what the destination promises, for `saf destination check` and `saf doctor`.

        A kind asks its server for the settings on which that depends. It raises what opening the
        destination raises.
        """
        return Guarantee(server=f"kind {self.kind!r}", promise=self.quality.replace("_", " "))

    # Secrets

    def redact(self, text: str) -> str:
        """Return ``text`` on one line, without the secrets of these settings."""
        values = self.__dict__.values()
        nested = [one for value in values if isinstance(value, Mapping) for one in value.values()]
        for value in [*values, *nested]:
            if isinstance(value, Dsn):
                text = value.redact(text)
            elif isinstance(value, pydantic.SecretStr) and value.get_secret_value():
                text = text.replace(value.get_secret_value(), "***")
        return " ".join(text.split())
