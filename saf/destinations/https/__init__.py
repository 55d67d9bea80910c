"""The kind ``https``: the inbox of a broker that is reached by HTTPS alone, exactly once.

    [destinations.partner]
    kind = "https"
    server = "https://partner.example.com/saf"
    secret = "${PARTNER_SECRET}"            # of Standard Webhooks: whsec_ and base64

The other end serves `saf.webhooks.broker`. `saf.destinations.https.wire` tells what the two say to
each other, `saf.destinations.https.remote` how a chunk is stored. It needs no client.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self
from uuid import UUID

import pydantic
from pydantic import AfterValidator, PrivateAttr, SecretStr

from saf.database.bounds import Bounds
from saf.destinations import Capabilities, Destination
from saf.destinations.https.address import Address, parse
from saf.destinations.marks import Known
from saf.destinations.settings import DestinationSettings, Guarantee
from saf.errors import UsageError
from saf.signing.webhook import key_of

if TYPE_CHECKING:
    from saf.destinations.https.link import Link


def _address(text: str) -> str:
    parse(text)
    return text


class Https(DestinationSettings):
    """The inbox of a broker behind a URL."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        exactly_once=True, fences=True, knows_services=True
    )

    kind: Literal["https"] = "https"
    server: Annotated[str, AfterValidator(_address)]
    """The URL at which the other end serves `saf.webhooks.broker`."""
    secret: SecretStr
    """A secret that the other end knows too, as Standard Webhooks has it: `whsec_` and base64."""
    ca_file: Path | None = None
    """Certificates that the server's is checked with; by default, the system's."""
    certificate_file: Path | None = None
    """The client's certificate."""
    key_file: Path | None = None
    """The key of the client's certificate."""

    _bounds: Bounds = PrivateAttr(default_factory=Bounds)

    @pydantic.field_validator("secret")
    @classmethod
    def _is_secret(cls, secret: SecretStr) -> SecretStr:
        try:
            key_of(secret.get_secret_value())
        except UsageError as error:
            raise ValueError(str(error)) from None
        return secret

    @pydantic.model_validator(mode="after")
    def _has_what_tls_needs(self) -> Self:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file are given together")
        if (self.ca_file or self.certificate_file) and not self.address.tls:
            raise ValueError("certificates need TLS: say https:// instead of http://")
        return self

    @property
    def address(self) -> Address:
        """Where the URL leads to."""
        return parse(self.server)

    @property
    def bounds(self) -> Bounds:
        """How long anything is waited for."""
        return self._bounds

    def bounded(self, bounds: Bounds) -> Self:
        """Return these settings with saf.toml's ``[bounds]``."""
        mine = self.model_copy()
        mine._bounds = bounds
        return mine

    def open(self, name: str, *, keep: bool = False) -> Destination:  # noqa: ARG002 - nothing to keep
        """Return the inbox as a destination; see `DestinationSettings.open`."""
        from saf.destinations.https.remote import RemoteInbox  # needs Arrow; a driver has none

        return RemoteInbox(name, self)

    @classmethod
    def preload(cls) -> None:
        """Import what `open` imports."""
        import saf.destinations.https.remote  # noqa: F401 - to have it imported

    @contextmanager
    def _linked(self, name: str) -> Iterator[Link]:
        from saf.destinations.https.link import linked

        with linked(name, self) as link:
            yield link

    def identity(self, name: str) -> UUID:
        """Return the broker_id; see `DestinationSettings.identity`."""
        with self._linked(name) as link:
            return link.identity()

    def known(self, name: str, source: UUID, *, role: str) -> Known:  # noqa: ARG002 - nobody asks
        """Return the marks of a source; see `DestinationSettings.known`."""
        with self._linked(name) as link:
            return link.known(source)

    def guarantee(self, name: str) -> Guarantee:
        """Return what the other end's database gives; see `DestinationSettings.guarantee`."""
        with self._linked(name) as link:
            return link.guarantee()
