"""Attempts: how many wrong tokens are allowed before an address is ignored for a while.

Wrong tokens are counted by their client's address; for IPv6, by the 64-bit network that one
customer has. Behind a trusted reverse proxy, the address seen by the proxy counts. Memory is
bounded: with very many addresses, the oldest are forgotten.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from threading import Lock

MOST_WRONG = 10
"""Wrong tokens of an address that are answered within `WITHIN_SECONDS`."""
WITHIN_SECONDS = 300.0
MOST_ADDRESSES = 10_000
OF_A_CUSTOMER = 64
"""Bits of an IPv6 address that its owner does not choose."""


class Attempts:
    """Counts wrong tokens. Safe to use from several threads."""

    def __init__(self) -> None:
        self._wrong: dict[str, deque[float]] = {}
        self._lock = Lock()

    def wait_seconds(self, address: str, now: float) -> float:
        """Return the seconds until an address may try again; 0 if it may now.

        >>> attempts = Attempts()
        >>> for second in range(MOST_WRONG):
        ...     attempts.wrong("192.0.2.7", second)
        >>> attempts.wait_seconds("192.0.2.7", 100), attempts.wait_seconds("192.0.2.8", 100)
        (200.0, 0.0)
        >>> attempts.wait_seconds("192.0.2.7", 300)
        0.0
        """
        with self._lock:
            known = self._wrong.get(network(address), ())
            recent = [moment for moment in known if moment > now - WITHIN_SECONDS]
        if len(recent) < MOST_WRONG:
            return 0.0
        return recent[-MOST_WRONG] + WITHIN_SECONDS - now

    def wrong(self, address: str, now: float) -> None:
        """Record a wrong token."""
        name = network(address)
        with self._lock:
            times = self._wrong.pop(name, None) or deque(maxlen=MOST_WRONG)
            times.append(now)
            while len(self._wrong) >= MOST_ADDRESSES:
                self._wrong.pop(next(iter(self._wrong)))
            self._wrong[name] = times


def network(address: str) -> str:
    """Return the address or network that attempts are counted by.

    >>> network("192.0.2.7"), network("2001:db8::1:2"), network("no address")
    ('192.0.2.7', '2001:db8::/64', 'no address')
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4 or ip.ipv4_mapped is not None:  # noqa: PLR2004 - the older version
        return str(getattr(ip, "ipv4_mapped", None) or ip)
    return str(ipaddress.ip_network((ip, OF_A_CUSTOMER), strict=False))
