"""The guard: to which addresses a dispatcher connects.

A URL that somebody has chosen may name, or resolve to, an address inside of our own network. The
guard looks at each address at the moment of connecting to it. So it does not matter how the URL
writes the address, what a name resolves to now, or that it resolves to something else a moment
later, or where a redirect leads to.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Any

NOT_PUBLIC = (
    # IANA's registry of special-purpose IPv4 addresses, without those that are reachable globally
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
    *("198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4"),
    "224.0.0.0/4",  # multicast
    "168.63.129.16/32",  # at each machine of Azure, what looks after that machine
    # the same for IPv6, as far as it is in UNICAST
    *("2001::/23", "2001:db8::/32", "3fff::/20"),
)
"""Networks that are not on the public internet. They are listed here, because what Python's
`ipaddress` calls global depends on its version, and has let through what is in the registries:
https://www.iana.org/assignments/iana-ipv4-special-registry and iana-ipv6-special-registry."""
UNICAST = "2000::/3"
"""The addresses of IPv6 that IANA gives to anybody; what is elsewhere has a special purpose."""
STANDING_FOR = {"::ffff:0:0/96": 0, "64:ff9b::/96": 0, "2002::/16": 80}
"""Networks of IPv6 whose addresses stand for one of IPv4, each with the bits behind that one:
IPv4-mapped, NAT64, 6to4. The prefix of a network's own NAT64 is its own secret."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NOT_PUBLIC = [ipaddress.ip_network(one) for one in NOT_PUBLIC]
_UNICAST = ipaddress.IPv6Network(UNICAST)
_STANDING_FOR = {ipaddress.IPv6Network(one): bits for one, bits in STANDING_FOR.items()}


def is_public(address: str) -> bool:
    """Whether an address is on the public internet, and stands for no other that is not.

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
    """Return the address of IPv4 for which one of IPv6 stands; else the address."""
    for network, bits in _STANDING_FOR.items():
        if ip in network:
            return ipaddress.IPv4Address(int(ip) >> bits & 0xFFFFFFFF)
    return ip


AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]


def address_check(networks: Iterable[str]) -> Callable[[str], None]:
    """Return what raises a `PermissionError` for an address: neither public nor in a network."""
    known = [ipaddress.ip_network(one) for one in networks]

    def check(host: str) -> None:
        ip = _parsed(host)
        if not is_public(host) and not any(ip in network for network in known):
            # which address a name inside of our network has is nobody's business
            raise PermissionError(errno.EACCES, "its address is not on the public internet")

    return check


def guarded_sockets(networks: Iterable[str]) -> Callable[[AddressInfo], socket.socket]:
    """Return what makes a socket to connect to an address, once `address_check` has let it pass."""
    check = address_check(networks)

    def make(info: AddressInfo) -> socket.socket:
        family, kind, protocol, _, address = info
        check(str(address[0]))
        return socket.socket(family=family, type=kind, proto=protocol)

    return make
