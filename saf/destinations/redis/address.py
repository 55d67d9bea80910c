"""Addresses of Redis servers, as URLs without a login.

redis://host:6379/0                        one server
rediss://host:6379/0                       one server, with TLS
unix:///run/redis.sock?db=0                a server on this machine
redis+sentinel://host:26379,host/name/0    the server that the sentinels call the master
redis+cluster://host:6379,host             a cluster, whose nodes know each other
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from saf.destinations.addresses import named_host

PORTS = {"": 6379, "cluster": 6379, "sentinel": 26379}
"""Default port, by the part of the scheme after ``+``."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address of a server."""

    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    """Socket on this machine; otherwise empty."""
    found_by: str = ""
    """How to find the host: ``sentinel``, ``cluster``, or empty if the address names it."""
    master: str = ""
    """The master's name at the sentinels."""
    database: int = 0
    tls: bool = False


def parse(text: str) -> Address:
    """Parse an address.

    >>> parse("rediss://r1/2")
    Address(hosts=(('r1', 6379),), path='', found_by='', master='', database=2, tls=True)
    >>> parse("redis+sentinel://s1:7000,[::1]/mymaster").hosts
    (('s1', 7000), ('::1', 26379))
    >>> parse("unix:///run/redis.sock?db=1").database
    1

    Raises:
        ValueError: the address is invalid.
    """
    if "@" in text:
        raise ValueError("give a login by username = … and password = …, not in the address")
    scheme, _, rest = text.partition("://")
    if scheme == "unix":
        url = urlsplit(text)
        (number,) = parse_qs(url.query).get("db", ["0"])
        return Address(path=unquote(url.path), database=_number(text, number))
    protocol, _, found_by = scheme.partition("+")
    if protocol not in ("redis", "rediss") or found_by not in PORTS or scheme.endswith("+"):
        raise ValueError(
            f"{text!r} is not an address of a Redis server, such as redis://host:6379/0, "
            "rediss://…, unix:///path, redis+sentinel://host/name, redis+cluster://host"
        )
    places, _, path = rest.partition("/")
    hosts = tuple(_host(text, host, PORTS[found_by]) for host in places.split(","))
    parts = path.split("/") if path else []
    master = parts.pop(0) if found_by == "sentinel" and parts else ""
    if found_by == "sentinel" and not master:
        raise ValueError(f"{text!r} lacks the name of its master: redis+sentinel://host/name")
    if len(hosts) > 1 and not found_by:
        raise ValueError(f"{text!r} has several hosts, but names neither sentinel nor cluster")
    database = _number(text, parts.pop(0) if parts else "0")
    if parts or (database and found_by == "cluster"):
        raise ValueError(f"{text!r} has too much after its host")
    return Address(
        hosts=hosts, found_by=found_by, master=master, database=database, tls=protocol == "rediss"
    )


def _host(text: str, place: str, port: int) -> tuple[str, int]:
    url = urlsplit(f"//{place}")
    try:
        host, url_port = url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    if not host or url.query:
        raise ValueError(f"{text!r} lacks a host, or has something after it that is not a database")
    return named_host(text, host), url_port or port


def _number(text: str, database: str) -> int:
    if not database.isdecimal():
        raise ValueError(f"{text!r}: database {database!r} is not a number")
    return int(database)
