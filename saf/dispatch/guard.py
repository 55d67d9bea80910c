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

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an address is on the public internet, and stands for no other that is not.

    >>> is_public("93.184.216.34"), is_public("2606:2800:220:1::1")
    (True, True)
    >>> [is_public(one) for one in ("127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.0", "::1")]
    [False, False, False, False, False]
    >>> [is_public(one) for one in ("::ffff:10.0.0.1", "64:ff9b::a00:1", "fe80::1%2", "224.0.0.1")]
    [False, False, False, False]
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    inside: ipaddress.IPv4Address | None = None
    if isinstance(ip, ipaddress.IPv6Address):
        inside = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in NAT64:
            inside = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if inside is not None and not is_public(str(inside)):
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return True
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]


def address_check(networks: Iterable[str]) -> Callable[[str], None]:
    """Return what raises a `PermissionError` for an address: neither public nor in a network."""
    known = [ipaddress.ip_network(one) for one in networks]

    def check(host: str) -> None:
        ip = ipaddress.ip_address(host.partition("%")[0])
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
