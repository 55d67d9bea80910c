"""Address of a broker behind a URL."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from saf.destinations.addresses import named_host


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
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"it is not a URL: {error}") from None
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
