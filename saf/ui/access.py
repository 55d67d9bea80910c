"""Access: who a visitor is, and what they may do.

*By token.* Whoever knows ``[ui] token`` may view, and with ``operate_token`` operate. A login makes
a session with a new random id, whatever cookie the browser had before. The cookie holds nothing
else; it is HttpOnly and SameSite=Lax. Where the browser came by https it is Secure, and its name
begins so that no other host, and nobody without https, can set it. Who is wrong too often is not
listened to for a while (`saf.ui.attempts`).

*By a reverse proxy.* It logs people in by itself, and names them in the header ``[ui]
user_header``. That is believed only from an address in ``[ui] proxies``; a request from elsewhere
that has the header is like one that has not. Nobody is answered who asks for a host that is not
known (`saf.ui.guard`).

*Forms* carry a token that only the pages of the same session, or user, have (CSRF).
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
    """What a visitor may do."""

    VIEW = "view"
    OPERATE = "operate"


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """Somebody who is logged in."""

    name: str
    """For the audit."""
    role: Role
    csrf: str
    by_proxy: bool = False
    """The reverse proxy logs them in and out."""

    @property
    def operates(self) -> bool:
        """Whether they may change anything."""
        return self.role is Role.OPERATE


@dataclass(frozen=True, kw_only=True)
class Session:
    """A login by token."""

    name: str
    role: Role
    until: float
    """By the monotonic clock."""


class Access:
    """Logs visitors in and out, and knows them again. Safe to use from several threads."""

    def __init__(self, ui: Ui, *, write: bool) -> None:
        self._ui = ui
        self._write = write
        self._proxies = [ipaddress.ip_network(one) for one in ui.proxies]
        self._key = secrets.token_bytes(32)
        self._sessions: dict[str, Session] = {}
        self._lock = Lock()

    @property
    def by_token(self) -> bool:
        """Whether anybody can log in here."""
        return bool(self._ui.token or self._ui.operate_token)

    def visitor(self, request: HTTPConnection) -> Visitor | None:
        """Return who makes a request; None if they are not logged in."""
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
        """Return the name of the cookie that has the session of a request."""
        if not self.secure(request):
            return COOKIE
        return f"__Secure-{COOKIE}" if request.scope.get("root_path") else f"__Host-{COOKIE}"

    def address(self, request: HTTPConnection) -> str:
        """Return where a request comes from, as far as a proxy that is believed says so."""
        said = request.headers.getlist("x-forwarded-for")
        if said and self._from_proxy(request):
            return said[-1].rpartition(",")[2].strip()  # what the nearest proxy has seen
        return request.client.host if request.client is not None else "a unix socket"

    def login(self, token: str, name: str) -> str | None:
        """Return the id of a new session; None if the token is wrong."""
        operates = _same(token, self._ui.operate_token)
        if not (_same(token, self._ui.token) | operates):
            return None
        role = self._role(operates=operates)
        until = time.monotonic() + self._ui.session_seconds
        number = secrets.token_urlsafe(32)
        with self._lock:
            now = time.monotonic()
            kept = {n: one for n, one in self._sessions.items() if one.until > now}
            while len(kept) >= MOST_SESSIONS:
                kept.pop(next(iter(kept)))
            known_as = " ".join(name.split())[:LONGEST_NAME] or "somebody with the token"
            self._sessions = {**kept, number: Session(name=known_as, role=role, until=until)}
        return number

    def logout(self, request: HTTPConnection) -> None:
        """End the session of a request."""
        with self._lock:
            self._sessions.pop(request.cookies.get(self.cookie(request), ""), None)

    def secure(self, request: HTTPConnection) -> bool:
        """Whether the browser came by https, as far as a proxy that is believed says so."""
        if self._from_proxy(request):
            said = request.headers.get("x-forwarded-proto", request.url.scheme)
            return said == "https"
        return request.url.scheme in ("https", "wss")

    def right_csrf(self, visitor: Visitor, given: str) -> bool:
        """Whether a form comes from a page of the visitor's own."""
        return hmac.compare_digest(visitor.csrf.encode(), given.encode())

    def _role(self, *, operates: bool) -> Role:
        return Role.OPERATE if operates and self._write else Role.VIEW

    def _csrf(self, of: str) -> str:
        return hmac.new(self._key, of.encode(), hashlib.sha256).hexdigest()

    def _named_by_proxy(self, request: HTTPConnection) -> str | None:
        if self._ui.user_header is None or not self._from_proxy(request):
            return None
        values = request.headers.getlist(self._ui.user_header)
        if len(values) != 1:  # a second one may be somebody else's
            return None
        return values[0].strip()[:LONGEST_NAME] or None

    def _from_proxy(self, request: HTTPConnection) -> bool:
        if request.client is None:
            return True  # a unix socket's, which only who may write to it reaches
        try:
            address = ipaddress.ip_address(request.client.host)
        except ValueError:
            return False
        return any(address in network for network in self._proxies)


def _same(given: str, token: SecretStr | None) -> bool:
    known = token.get_secret_value() if token is not None else secrets.token_hex()
    return hmac.compare_digest(given.encode(), known.encode())
