"""Transports: connections that carry a request's bytes to an endpoint, and its answer's bytes back.

A transport is a context: `connections` of `saf.receiving.dispatch.http1` or
`saf.receiving.dispatch.http2`. It yields an `Exchange`. It is entered inside a running loop, opens
connections when they are needed, and keeps them until its end. It follows no redirect, keeps no
cookie, ignores the environment's proxy, and decompresses nothing. It reads an answer up to a number
of bytes; a longer answer is cut, and not read to its end. The endpoint's timeout is for a whole
exchange, so an endpoint that sends a byte from time to time does not extend it. An exchange that
fails for any reason raises `NoAnswer`. Entering a transport raises `MissingExtra` if its library is
not installed, and `ConfigurationError` if a certificate cannot be read.

Each version of HTTP has the library that costs less. httpcore2 speaks HTTP/1.1 too, but takes five
times the processor's time of aiohttp for a request.

A guard (`address_check`) restricts the addresses that a transport connects to. A URL written by a
user may name, or resolve to, an address inside our own network. The guard checks each address at
the moment of connecting to it. So neither the spelling of the address in the URL, nor a name that
resolves differently a moment later, nor the target of a redirect can evade the guard. The guard
cannot check the addresses behind a proxy, so an endpoint with a proxy has no guard.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

IDLE_SECONDS = 30.0
"""Time for which an unused connection is kept."""

HEADERS = {"User-Agent": "saf", "Accept-Encoding": "identity"}
"""Headers of every request."""

NOT_PUBLIC = (
    # IANA's registry of special-purpose IPv4 addresses, without those that are reachable globally
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
    *("198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4"),
    "224.0.0.0/4",  # multicast
    "168.63.129.16/32",  # the host agent of each Azure machine
    # special-purpose IPv6 addresses inside UNICAST
    *("2001::/23", "2001:db8::/32", "3fff::/20"),
)
"""Networks that are not on the public internet. They are listed here, because the result of
`ipaddress.is_global` depends on Python's version, and has been wrong about registered networks:
https://www.iana.org/assignments/iana-ipv4-special-registry and iana-ipv6-special-registry."""
UNICAST = "2000::/3"
"""IPv6 addresses that IANA assigns publicly; all other networks have a special purpose."""
STANDING_FOR = {"::ffff:0:0/96": 0, "64:ff9b::/96": 0, "2002::/16": 80}
"""IPv6 networks whose addresses stand for IPv4 addresses, each with the number of bits after the
IPv4 address: IPv4-mapped, NAT64, 6to4. The prefix of a network's own NAT64 is unknown here."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]

_NOT_PUBLIC = [ipaddress.ip_network(one) for one in NOT_PUBLIC]
_UNICAST = ipaddress.IPv6Network(UNICAST)
_STANDING_FOR = {ipaddress.IPv6Network(one): bits for one, bits in STANDING_FOR.items()}


class NoAnswer(Exception):
    """An exchange without an answer; the message gives the reason, and may contain secrets."""


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    """By name, case-insensitive."""
    body: bytes
    """At most as many bytes as were requested."""


Exchange = Callable[[str, Mapping[str, str], bytes, int], Awaitable[Exchanged]]
"""Sends a body to a URL, with headers; returns at most a number of bytes of the answer's body."""


PRIVATE_REFUSED = (
    "its address is not on the public internet; private addresses are refused. Allow them in "
    "saf.toml: `[dispatch] networks = […]`"
)


def address_check(networks: Iterable[str]) -> Callable[[str], None]:
    """Return a check that raises `PermissionError` unless an address is public or allowed."""
    known = [ipaddress.ip_network(text) for text in networks]

    def check(host: str) -> None:
        ip = _parsed(host)
        if not is_public(host) and not any(ip in network for network in known):
            # do not reveal the addresses of names inside our network
            raise PermissionError(errno.EACCES, PRIVATE_REFUSED)

    return check


def guarded_sockets(networks: Iterable[str]) -> Callable[[AddressInfo], socket.socket]:
    """Return a factory of sockets to addresses that pass `address_check`."""
    check = address_check(networks)

    def make(info: AddressInfo) -> socket.socket:
        family, kind, protocol, _, address = info
        check(str(address[0]))
        return socket.socket(family=family, type=kind, proto=protocol)

    return make


def is_public(address: str) -> bool:
    """Return whether an address is public, and does not stand for one that is not.

    >>> is_public("93.184.216.34"), is_public("2606:2800:220:1::1")
    (True, True)
    >>> [is_public(one) for one in ("127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.0", "::1")]
    [False, False, False, False, False]
    >>> [is_public(one) for one in ("::ffff:10.0.0.1", "64:ff9b::a00:1", "fe80::1%2", "224.0.0.1")]
    [False, False, False, False]
    """
    ip = _meant(_parsed(address))
    if isinstance(ip, ipaddress.IPv6Address) and ip not in _UNICAST:
        return False
    return not any(ip in network for network in _NOT_PUBLIC)


def _parsed(address: str) -> Address:
    return ipaddress.ip_address(address.partition("%")[0])


def _meant(ip: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for; otherwise the address itself."""
    for network, bits in _STANDING_FOR.items():
        if ip in network:
            return ipaddress.IPv4Address(int(ip) >> bits & 0xFFFFFFFF)
    return ip
