"""Access: identifies visitors and decides about their rights.

*By token.* The holder of ``[ui] token`` may view, and the holder of ``operate_token`` may also
operate. A login creates a session with a new random id, whatever cookie the browser had before. The
cookie contains nothing else; it is HttpOnly and SameSite=Lax. Over https it is also Secure, and its
name has a prefix that keeps other hosts, and sites without https, from setting it. After too many
wrong tokens, an address is ignored for a while (`saf.ui.guard`).

*By a reverse proxy.* The proxy logs users in, and names them in the header ``[ui] user_header``.
The header is trusted only from an address in ``[ui] proxies``, and ignored from elsewhere. Requests
for an unknown host are rejected (`saf.ui.guard`).

*Forms* carry a token that is only in the pages of the same session, or user (CSRF).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock

from pydantic import SecretStr
from starlette.requests import HTTPConnection

from saf.config import Ui

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
