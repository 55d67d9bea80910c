"""Settings of what is reached by a link: a connection of saf's own, which waits for so long only.

The driver asks by a link what a destination is and how far it has got. A kind says how one is made.
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
    """The fields of settings with TLS."""

    ca_file: Path | None
    certificate_file: Path | None
    key_file: Path | None


class LinkedSettings(DestinationSettings):
    """What the settings of each kind with links have."""

    _bounds: Bounds = PrivateAttr(default_factory=Bounds)

    @property
    def bounds(self) -> Bounds:
        """How long anything is waited for."""
        return self._bounds

    def bounded(self, bounds: Bounds) -> Self:
        """Return these settings with saf.toml's ``[bounds]``."""
        mine = self.model_copy()
        mine._bounds = bounds
        return mine

    def _connected(self, name: str) -> AbstractContextManager[Any]:
        """Make a link for a block; it has ``identity()``, ``known(source)``, and more by its kind.

        It is `Any`, because each kind's own stays out of modules that are imported early.
        """
        raise NotImplementedError(name)

    def identity(self, name: str) -> UUID:
        """Return what the other end says, or will say; see `DestinationSettings.identity`."""
        with self._connected(name) as link:
            found: UUID = link.identity()
            return found

    def known(self, name: str, source: UUID, *, role: str) -> Known:  # noqa: ARG002 - nobody asks
        """Return the marks of a source; see `DestinationSettings.known`."""
        with self._connected(name) as link:
            found: Known = link.known(source)
            return found


def check_certificates(given: Certificates, needed: str | None) -> None:
    """Raise a ValueError for a certificate without its key, and for certificates without TLS.

    ``needed`` says what TLS takes, if it is not there.
    """
    if (given.certificate_file is None) != (given.key_file is None):
        raise ValueError("certificate_file and key_file are given together")
    if needed is not None and (given.ca_file or given.certificate_file):
        raise ValueError(f"certificates need {needed}")
