"""Addresses: where a RabbitMQ server takes streams, as a URL without its login.

rabbitmq-stream://host:5552/vhost         one server; without a path, the virtual host ``/``
rabbitmq-stream://host,host:5553          a cluster: whichever answers first
rabbitmq-stream+tls://host                the same, with TLS
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

PORTS = {"rabbitmq-stream": 5552, "rabbitmq-stream+tls": 5551}
"""The port by default, by the scheme."""
NAMED = "server's streams, such as rabbitmq-stream://host:5552 or rabbitmq-stream+tls://host:5551"


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where servers are."""

    hosts: tuple[tuple[str, int], ...]
    virtual_host: str
    tls: bool


def parse(text: str, ports: Mapping[str, int] = PORTS, named: str = NAMED) -> Address:
    """Return an address, with one of some schemes; ``named`` is said of what is none.

    >>> parse("rabbitmq-stream+tls://n1,[::1]:7000/a%2Fb")
    Address(hosts=(('n1', 5551), ('::1', 7000)), virtual_host='a/b', tls=True)
    >>> parse("rabbitmq-stream://n1").virtual_host
    '/'

    Raises:
        ValueError: it is none.
    """
    if "@" in text:
        raise ValueError("give a login by username = … and password = …, not in the address")
    scheme, _, rest = text.partition("://")
    if scheme not in ports or not rest:
        raise ValueError(f"{text!r} is no address of a RabbitMQ {named}")
    places, slash, path = rest.partition("/")
    if "/" in path or "?" in path or (slash and not path):
        raise ValueError(f"{text!r}: a virtual host is one name, with %2F for a slash in it")
    return Address(
        hosts=hosts(text, places, ports[scheme]),
        virtual_host=unquote(path) or "/",
        tls=scheme.endswith("s"),
    )


def hosts(text: str, places: str, port: int) -> tuple[tuple[str, int], ...]:
    """Return the hosts of an address, with their ports."""
    found = []
    for place in places.split(","):
        url = urlsplit(f"//{place}")
        try:
            host, given = url.hostname, url.port
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None
        if not host or url.query:
            raise ValueError(f"{text!r} lacks a host, or has something after it")
        found.append((host, given or port))
    return tuple(found)
