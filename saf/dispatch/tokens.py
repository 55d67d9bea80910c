"""Tokens of OAuth 2, by client credentials (RFC 6749, section 4.4).

A token is requested when it is first needed, kept until shortly before it expires, and requested
again once an endpoint has refused it. Concurrent requests wait for the same answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from urllib.parse import urlencode

from saf.dispatch.credentials import of_client
from saf.dispatch.settings import Endpoint
from saf.dispatch.transport import NoAnswer, Transport

MOST = 64 * 1024
"""Maximum number of bytes to read of an answer."""

LIFETIME_SECONDS = 300.0
"""Assumed lifetime of a token whose answer does not give it."""

EARLY = 0.8
"""Part of a token's lifetime after which a new one is requested."""


class NoToken(Exception):
    """No token: the token server does not answer, or refuses."""


class Tokens:
    """The token of one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = asyncio.Lock()
        self._token: str | None = None
        self._until = 0.0

    async def get(self, transport: Transport) -> str:
        """Return a token that is still valid for a while.

        Raises:
            NoToken: no token is available.
        """
        async with self._lock:
            if self._token is None or time.monotonic() >= self._until:
                try:
                    self._token, lifetime = await self._asked(transport)
                except NoAnswer as error:
                    raise NoToken(f"no token: {error}") from None
                self._until = time.monotonic() + EARLY * lifetime
            return self._token

    def forget(self, token: str | None) -> None:
        """Note that an endpoint has refused a token."""
        if token == self._token:
            self._token = None

    async def _asked(self, transport: Transport) -> tuple[str, float]:
        endpoint = self._endpoint
        assert endpoint.token_url is not None  # noqa: S101 - the settings guarantee it
        form = {"grant_type": "client_credentials"}
        if endpoint.scope is not None:
            form["scope"] = endpoint.scope
        headers = {
            "Accept": "application/json",
            "Content-Type": "application/x-www-form-urlencoded",
            **of_client(endpoint),
        }
        body = urlencode(form).encode()
        response = await transport.post(endpoint.token_url, headers, body, MOST)
        if response.status != 200:  # noqa: PLR2004 - as the RFC says
            raise NoToken(f"no token: HTTP {response.status}")
        return parsed(response.body)


def parsed(body: bytes) -> tuple[str, float]:
    """Return the token in an answer, and its lifetime in seconds.

    >>> parsed(b'{"access_token": "abc", "token_type": "Bearer", "expires_in": 60}')
    ('abc', 60.0)

    Raises:
        NoToken: the answer does not contain a token.
    """
    try:
        reply = json.loads(body)
        token, lifetime = reply["access_token"], float(reply.get("expires_in", LIFETIME_SECONDS))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise NoToken("no token: the answer has no access_token") from None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token:
        raise NoToken("no token: the answer's access_token is invalid")
    return token, lifetime
