"""The guard of a dashboard: headers for browsers, known hosts only, and few wrong tokens.

`Guarded` adds headers to every response. They restrict browsers to the needs of the pages.

`KnownHosts` rejects unknown hosts. Where a header names the visitor, anyone who makes a browser
send a request acts as that visitor. A page from elsewhere can do this if its own name resolves to
an address of this dashboard (DNS rebinding). But it cannot change the host name that the browser
sends. So only requests for known hosts are answered.

`Attempts` decides how many wrong tokens are allowed before an address is ignored for a while. Wrong
tokens are counted by their client's address; for IPv6, by the 64-bit network that one customer has.
Behind a trusted reverse proxy, the address seen by the proxy counts. Memory is bounded: with very
many addresses, the oldest are forgotten.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Collection
from threading import Lock
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saf.operating.wording import shown
from saf.telemetry.logger import Log

log = Log("saf.ui")

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "X-Robots-Tag": "noindex",
}

MISDIRECTED = 421

MOST_WRONG = 10
"""Wrong tokens of an address that are answered within `WITHIN_SECONDS`."""
WITHIN_SECONDS = 300.0
MOST_ADDRESSES = 10_000
OF_A_CUSTOMER = 64
"""Bits of an IPv6 address that its owner does not choose."""


class Guarded:
    """An application whose responses have the security headers; caches do not keep its pages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if "Cache-Control" not in headers:
                    headers["Cache-Control"] = "no-store"
            await send(message)

        await self._app(scope, receive, guarded)


class KnownHosts:
    """An application that answers only requests for an IP address or a known name."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = {"localhost", *hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            host = host_of(Headers(scope=scope).get("host", ""))
            if host not in self._hosts and not _is_address(host):
                log.warning("host_refused", host=shown(host))
                text = f"this dashboard is not known as {shown(host)!r}: add it to [ui] hosts"
                await PlainTextResponse(text, status_code=MISDIRECTED)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def host_of(header: str) -> str:
    """Return the host of a Host header without its port; empty if it has none.

    >>> host_of("Saf.Example.com:8400"), host_of("[::1]:8400"), host_of("127.0.0.1"), host_of("[x")
    ('saf.example.com', '::1', '127.0.0.1', '')
    """
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
