"""Attempts: how often somebody may be wrong at the login before nobody listens for a while.

Wrong tokens are counted by the address that they come from; of IPv6, by the network of 64 bits that
one customer has. Behind a reverse proxy that is believed, it is the address that this has seen.
What is remembered is bounded: of very many addresses, the oldest are forgotten.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from threading import Lock

MOST_WRONG = 10
"""So many wrong tokens of an address are answered within `WITHIN_SECONDS`."""
WITHIN_SECONDS = 300.0
MOST_ADDRESSES = 10_000
OF_A_CUSTOMER = 64
"""The bits of an address of IPv6 that its owner does not choose."""


class Attempts:
    """Counts wrong tokens. Safe to use from several threads."""

    def __init__(self) -> None:
        self._wrong: dict[str, deque[float]] = {}
        self._lock = Lock()

    def wait_seconds(self, address: str, now: float) -> float:
        """Return how long an address has to wait until it is listened to; 0: it is now.

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
            recent = [at for at in known if at > now - WITHIN_SECONDS]
        if len(recent) < MOST_WRONG:
            return 0.0
        return recent[-MOST_WRONG] + WITHIN_SECONDS - now

    def wrong(self, address: str, now: float) -> None:
        """Note a wrong token."""
        name = network(address)
        with self._lock:
            times = self._wrong.pop(name, None) or deque(maxlen=MOST_WRONG)
            times.append(now)
            while len(self._wrong) >= MOST_ADDRESSES:
                self._wrong.pop(next(iter(self._wrong)))
            self._wrong[name] = times


def network(address: str) -> str:
    """Return what an address is counted as.

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
