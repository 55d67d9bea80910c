"""Access: identifies visitors, decides about their rights, and guards the pages.

*By token.* The holder of ``[ui] token`` may view, and the holder of ``operate_token`` may also
operate. A login creates a session with a new random id, whatever cookie the browser had before. The
cookie contains nothing else; it is HttpOnly and SameSite=Lax. Over https it is also Secure, and its
name has a prefix that keeps other hosts, and sites without https, from setting it. `Attempts`
decides how many wrong tokens are allowed before an address is ignored for a while. Wrong tokens are
counted by their client's address; for IPv6, by the 64-bit network that one customer has. Behind a
trusted reverse proxy, the address seen by the proxy counts. Memory is bounded: with very many
addresses, the oldest are forgotten.

*By a reverse proxy.* The proxy logs users in, and names them in the header ``[ui] user_header``.
The header is trusted only from an address in ``[ui] proxies``, and ignored from elsewhere.
`KnownHosts` rejects unknown hosts. Where a header names the visitor, anyone who makes a browser
send a request acts as that visitor. A page from elsewhere can do this if its own name resolves to
an address of this dashboard (DNS rebinding). But it cannot change the host name that the browser
sends. So only requests for known hosts are answered.

*Forms* carry a token that is only in the pages of the same session, or user (CSRF). `Guarded` adds
headers to every response, which restrict browsers to the needs of the pages.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from urllib.parse import urlsplit

from pydantic import SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saf.config import Ui
from saf.operating.wording import shown
from saf.telemetry.logger import Log

COOKIE = "saf_session"
MOST_SESSIONS = 10_000
LONGEST_NAME = 200


class Role(StrEnum):
    """Permissions of a visitor."""

    VIEW = "view"
    OPERATE = "operate"


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """A logged-in user."""

    name: str
    """Name for the audit."""
    role: Role
    csrf: str
    by_proxy: bool = False
    """True if the reverse proxy logs the user in and out."""

    @property
    def operates(self) -> bool:
        """True if the visitor may change anything."""
        return self.role is Role.OPERATE


@dataclass(frozen=True, kw_only=True)
class Session:
    """A login by token."""

    name: str
    role: Role
    until: float
    """End of the session, by the monotonic clock."""


class Access:
    """Logs visitors in and out, and recognises them. Safe to use from several threads."""

    def __init__(self, ui: Ui, *, write: bool) -> None:
        self._ui = ui
        self._write = write
        self._proxies = [ipaddress.ip_network(network) for network in ui.proxies]
        self._key = secrets.token_bytes(32)
        self._sessions: dict[str, Session] = {}
        self._lock = Lock()

    @property
    def by_token(self) -> bool:
        """True if login by token is configured."""
        return bool(self._ui.token or self._ui.operate_token)

    def visitor(self, request: HTTPConnection) -> Visitor | None:
        """Return the visitor of a request; None without a login."""
        if (name := self._named_by_proxy(request)) is not None:
            operates = "*" in self._ui.operators or name in self._ui.operators
            role = self._role(operates=operates)
            return Visitor(name=name, role=role, csrf=self._csrf(f"user {name}"), by_proxy=True)
        number = request.cookies.get(self.cookie(request), "")
        with self._lock:
            session = self._sessions.get(number)
        if session is None or session.until < time.monotonic():
            return None
        return Visitor(name=session.name, role=session.role, csrf=self._csrf(f"session {number}"))

    def cookie(self, request: HTTPConnection) -> str:
        """Return the name of the session's cookie for a request."""
        if not self.secure(request):
            return COOKIE
        return f"__Secure-{COOKIE}" if request.scope.get("root_path") else f"__Host-{COOKIE}"

    def address(self, request: HTTPConnection) -> str:
        """Return the address of a client, as reported by a trusted proxy if there is one."""
        forwarded = request.headers.getlist("x-forwarded-for")
        if forwarded and self._from_proxy(request):
            return forwarded[-1].rpartition(",")[2].strip()  # what the nearest proxy has seen
        return request.client.host if request.client is not None else "a unix socket"

    def login(self, token: str, name: str) -> str | None:
        """Return the id of a new session; None if the token is wrong."""
        operates = _same(token, self._ui.operate_token)
        if not (_same(token, self._ui.token) | operates):
            return None
        role = self._role(operates=operates)
        end = time.monotonic() + self._ui.session_seconds
        number = secrets.token_urlsafe(32)
        with self._lock:
            now = time.monotonic()
            kept = {n: session for n, session in self._sessions.items() if session.until > now}
            while len(kept) >= MOST_SESSIONS:
                kept.pop(next(iter(kept)))
            known_as = " ".join(name.split())[:LONGEST_NAME] or "somebody with the token"
            self._sessions = {**kept, number: Session(name=known_as, role=role, until=end)}
        return number

    def logout(self, request: HTTPConnection) -> None:
        """End the session of a request."""
        with self._lock:
            self._sessions.pop(request.cookies.get(self.cookie(request), ""), None)

    def secure(self, request: HTTPConnection) -> bool:
        """Return whether the browser uses https, as reported by a trusted proxy if there is one."""
        if self._from_proxy(request):
            scheme = request.headers.get("x-forwarded-proto", request.url.scheme)
            return scheme == "https"
        return request.url.scheme in ("https", "wss")

    def right_csrf(self, visitor: Visitor, given: str) -> bool:
        """Return whether a form comes from one of the visitor's own pages."""
        return hmac.compare_digest(visitor.csrf.encode(), given.encode())

    def _role(self, *, operates: bool) -> Role:
        return Role.OPERATE if operates and self._write else Role.VIEW

    def _csrf(self, session: str) -> str:
        return hmac.new(self._key, session.encode(), hashlib.sha256).hexdigest()

    def _named_by_proxy(self, request: HTTPConnection) -> str | None:
        if self._ui.user_header is None or not self._from_proxy(request):
            return None
        values = request.headers.getlist(self._ui.user_header)
        if len(values) != 1:  # a second value may be forged
            return None
        return values[0].strip()[:LONGEST_NAME] or None

    def _from_proxy(self, request: HTTPConnection) -> bool:
        if request.client is None:
            return True  # a unix socket: file permissions protect it
        try:
            address = ipaddress.ip_address(request.client.host)
        except ValueError:
            return False
        return any(address in network for network in self._proxies)


def _same(given: str, token: SecretStr | None) -> bool:
    known = token.get_secret_value() if token is not None else secrets.token_hex()
    return hmac.compare_digest(given.encode(), known.encode())


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
