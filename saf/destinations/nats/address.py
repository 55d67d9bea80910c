"""Addresses of a NATS server, or of the servers of a cluster, as URLs without a login.

nats://host:4222            one server
nats://host,host:4223       a cluster: the first host that answers
tls://host                  one server, with TLS
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from saf.destinations.addresses import named_host

PORT = 4222


@dataclass(frozen=True, kw_only=True)
class Address:
    """Addresses of servers."""

    hosts: tuple[tuple[str, int], ...]
    tls: bool


def parse(text: str) -> Address:
    """Parse an address.

    >>> parse("tls://n1,[::1]:7000")
    Address(hosts=(('n1', 4222), ('::1', 7000)), tls=True)

    Raises:
        ValueError: the address is invalid.
    """
    if "@" in text:
        raise ValueError("give a login by username = … and password = …, not in the address")
    scheme, _, places = text.partition("://")
    if scheme not in ("nats", "tls") or not places:
        raise ValueError(f"{text!r} is not an address of a NATS server, such as nats://host:4222")
    hosts = []
    for place in places.split(","):
        url = urlsplit(f"//{place}")
        try:
            host, port = url.hostname, url.port
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None
        if not host or url.query or url.path.strip("/"):
            raise ValueError(f"{text!r} lacks a host, or has something after it")
        hosts.append((named_host(text, host), port or PORT))
    return Address(hosts=tuple(hosts), tls=scheme == "tls")
