"""The guard: adds headers to every response, and rejects unknown hosts.

The headers restrict browsers to what the pages need. Where a header names the visitor, anyone who
makes a browser send a request acts as that visitor. A page from elsewhere can do this if its own
name resolves to an address of this dashboard (DNS rebinding). But it cannot change the host name
that the browser sends. So only requests for known hosts are answered.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saf.logger import Log
from saf.operating.wording import shown

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

log = Log("saf.ui")


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
