"""Settings of kinds that use a link: a connection of saf's own with bounded waits, maybe with TLS.

The driver uses a link to ask a destination for its identity and its marks. Each kind defines how
its links are made.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Self
from uuid import UUID

from pydantic import PrivateAttr, model_validator

from saf.database.bounds import Bounds
from saf.destinations.marks import Known
from saf.destinations.settings import DestinationSettings


class LinkedSettings(DestinationSettings):
    """Base class for the settings of kinds with links."""

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

    def connected(self, name: str) -> AbstractContextManager[Any]:
        """Open a link for a ``with`` block; it has ``identity()`` and ``known(source)`` at least.

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
