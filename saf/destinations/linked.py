"""Settings of kinds that use a link: a connection of saf's own with bounded waits.

The driver uses a link to ask a destination for its identity and its marks. Each kind defines how
its links are made.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, Self
from uuid import UUID

from pydantic import PrivateAttr

from saf.database.bounds import Bounds
from saf.destinations.marks import Known
from saf.destinations.settings import DestinationSettings


class Certificates(Protocol):
    """Fields of settings with TLS."""

    ca_file: Path | None
    certificate_file: Path | None
    key_file: Path | None


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


def check_certificates(given: Certificates, needed: str | None) -> None:
    """Raise a ValueError for a certificate without its key, or for certificates without TLS.

    ``needed`` is how to turn TLS on; None if it is on.
    """
    if (given.certificate_file is None) != (given.key_file is None):
        raise ValueError("certificate_file and key_file are given together")
    if needed is not None and (given.ca_file or given.certificate_file):
        raise ValueError(f"certificates need {needed}")
