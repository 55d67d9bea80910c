"""Addresses of servers with virtual hosts: URLs without a login, shared by several kinds.

SCHEME://host:port/vhost          one server; without a path, the virtual host ``/``
SCHEME://host,host:port           a cluster: the first host that answers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True, kw_only=True)
class Address:
    """Addresses of servers."""

    hosts: tuple[tuple[str, int], ...]
    virtual_host: str
    tls: bool


def parse(text: str, ports: Mapping[str, int], secure: str, named: str) -> Address:
    """Parse an address.

    >>> parse("amqps://n1,[::1]:7000/a%2Fb", {"amqp": 5672, "amqps": 5671}, "amqps", "server")
    Address(hosts=(('n1', 5671), ('::1', 7000)), virtual_host='a/b', tls=True)

    Args:
        text: the address.
        ports: the default port of each scheme.
        secure: the scheme with TLS.
        named: how an error describes a valid address.

    Raises:
        ValueError: the address is invalid.
    """
    if "@" in text:
        raise ValueError("give a login by username = … and password = …, not in the address")
    scheme, _, rest = text.partition("://")
    if scheme not in ports or not rest:
        raise ValueError(f"{text!r} is not an address of a {named}")
    places, slash, path = rest.partition("/")
    if "/" in path or "?" in path or (slash and not path):
        raise ValueError(f"{text!r}: a virtual host is one name, with %2F for a slash in it")
    hosts = tuple(_host(text, place, ports[scheme]) for place in places.split(","))
    return Address(hosts=hosts, virtual_host=unquote(path) or "/", tls=scheme == secure)


def _host(text: str, place: str, port: int) -> tuple[str, int]:
    url = urlsplit(f"//{place}")
    try:
        host, url_port = url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    if not host or url.query:
        raise ValueError(f"{text!r} lacks a host, or has something after it")
    return named_host(text, host), url_port or port


def named_host(text: str, host: str) -> str:
    """Return ``host``, which is part of the address ``text``.

    >>> named_host("nats://db..example", "db..example")
    Traceback (most recent call last):
    ...
    ValueError: 'nats://db..example': 'db..example' cannot be the name of a host

    Raises:
        ValueError: no resolver would accept it as a host name.
    """
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(f"{text!r}: {host!r} cannot be the name of a host") from None
    return host
