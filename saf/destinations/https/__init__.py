"""The kind ``https``: the inbox of a broker that is reachable only by HTTPS, exactly once.

    [destinations.partner]
    kind = "https"
    server = "https://partner.example.com/saf"
    secret = "${PARTNER_SECRET}"            # of Standard Webhooks: whsec_ and base64

The other end serves `saf.webhooks.broker` at the URL ``server``. A URL with a login, a query or a
fragment is rejected; ``http://`` is allowed only for this machine.

`saf.destinations.https.wire` describes the protocol, `saf.destinations.https.link` how a chunk is
stored. No client library is needed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import AfterValidator, SecretStr

from saf.destinations import Capabilities
from saf.destinations.addresses import named_host, reading_url
from saf.destinations.settings import SecuredSettings
from saf.errors import UsageError
from saf.signing.webhook import key_of

if TYPE_CHECKING:
    from saf.destinations.https.link import Link


@dataclass(frozen=True, kw_only=True)
class Address:
    """Parts of a URL."""

    tls: bool
    host: str
    port: int
    path: str


def parse(text: str) -> Address:
    """Parse a URL.

    >>> parse("https://partner.example.com/saf")
    Address(tls=True, host='partner.example.com', port=443, path='/saf')
    >>> parse("http://partner.example.com/saf")
    Traceback (most recent call last):
    ...
    ValueError: http:// is for this machine only, such as http://127.0.0.1:8000: use https://
    """
    with reading_url(text):
        parts = urlsplit(text)
        port = parts.port
    if parts.scheme not in ("https", "http") or not parts.hostname or port == 0:
        raise ValueError("it is not a URL such as https://partner.example.com/saf")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("a URL has printable ASCII characters only: encode the others")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a URL holds no user and password here, and nothing after ? or #")
    tls = parts.scheme == "https"
    if not tls and not _is_here(parts.hostname):
        raise ValueError(
            "http:// is for this machine only, such as http://127.0.0.1:8000: use https://"
        )
    return Address(
        tls=tls,
        host=named_host(text, parts.hostname),
        port=port or (443 if tls else 80),
        path=parts.path or "/",
    )


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(text: str) -> str:
    parse(text)
    return text


class Https(SecuredSettings):
    """Settings of the inbox of a broker behind a URL."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        holds=True, exactly_once=True, fences=True, knows_services=True
    )

    turn_on_tls: ClassVar[str] = "TLS: use https:// instead of http://"

    stores: ClassVar[tuple[str, str]] = ("link", "RemoteInbox")

    kind: Literal["https"] = "https"
    server: Annotated[str, AfterValidator(_address)]
    """URL at which the other end serves `saf.webhooks.broker`."""
    secret: SecretStr
    """Secret shared with the other end, in the form of Standard Webhooks: `whsec_` and base64."""

    @pydantic.field_validator("secret")
    @classmethod
    def _is_secret(cls, secret: SecretStr) -> SecretStr:
        try:
            key_of(secret.get_secret_value())
        except UsageError as error:
            raise ValueError(str(error)) from None
        return secret

    @property
    def address(self) -> Address:
        """Parts of the URL."""
        return parse(self.server)

    @contextmanager
    def connected(self, name: str) -> Iterator[Link]:
        """Open a link; see `LinkedSettings.connected`."""
        from saf.destinations.https.link import linked

        with linked(name, self) as link:
            yield link
