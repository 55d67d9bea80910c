"""Credentials: the identity of a caller, its proof, and the texts that must be hidden.

A caller identifies itself by a client certificate (`tls`), by a header that never changes
(`authorization`), or by a token of OAuth 2 (`Tokens`); a proxy gets a header of its own
(`of_proxy`). `hidden` lists the secrets in the endpoint's settings, each with the text to show in
its place. It leaves out texts shorter than `SHORTEST`, and tokens, which the settings lack.

`Tokens` gets tokens by client credentials (RFC 6749, section 4.4). A token is requested when it is
first needed, kept until shortly before it expires, and requested again once the endpoint has
refused it. Concurrent requests wait for the same answer. If the token server does not answer or
refuses, `Tokens.get` raises `NoToken`; it does not try again.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import ssl
import time
from urllib.parse import parse_qsl, urlencode, urlsplit

import pydantic

from saf.errors import ConfigurationError
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.dispatch.transport import Exchange, NoAnswer
from saf.receiving.failures import HIDDEN, SHORTEST

MOST = 64 * 1024
"""Maximum number of bytes to read of an answer."""

LIFETIME_SECONDS = 300.0
"""Assumed lifetime of a token whose answer does not give it."""

EARLY = 0.8
"""Part of a token's lifetime after which a new one is requested."""


class NoToken(Exception):
    """No token: the token server does not answer, or refuses."""


def tls(endpoint: Endpoint) -> ssl.SSLContext | bool:
    """Return how the endpoint's certificate is verified; True: by this system's defaults.

    Raises:
        ConfigurationError: a file cannot be read, or has other contents.
    """
    if endpoint.ca_file is None and endpoint.client_certificate is None:
        return True
    try:
        context = ssl.create_default_context(cafile=endpoint.ca_file)
        if endpoint.client_certificate is not None:
            context.load_cert_chain(endpoint.client_certificate, endpoint.client_key)
    except (OSError, ssl.SSLError) as error:
        files = (endpoint.ca_file, endpoint.client_certificate, endpoint.client_key)
        named = ", ".join(str(file) for file in files if file)
        raise ConfigurationError(f"cannot use {named}: {error.strerror or error}") from None
    return context


def authorization(endpoint: Endpoint) -> dict[str, str]:
    """Return the header that identifies the caller, if it never changes."""
    if endpoint.bearer is not None:
        return {"Authorization": f"Bearer {endpoint.bearer.get_secret_value()}"}
    if endpoint.user is not None and endpoint.password is not None:
        return {"Authorization": basic(endpoint.user, endpoint.password)}
    return {}


def of_client(endpoint: Endpoint) -> dict[str, str]:
    """Return the header that identifies the client that requests a token."""
    if endpoint.client_id is None or endpoint.client_secret is None:
        return {}
    return {"Authorization": basic(endpoint.client_id, endpoint.client_secret)}


def of_proxy(endpoint: Endpoint) -> dict[str, str]:
    """Return the header for a proxy; aiohttp turns it into Proxy-Authorization."""
    if endpoint.proxy_user is None or endpoint.proxy_password is None:
        return {}
    return {"Authorization": basic(endpoint.proxy_user, endpoint.proxy_password)}


def basic(user: str, password: pydantic.SecretStr) -> str:
    """Return a user and a password in HTTP's basic scheme.

    >>> basic("saf", pydantic.SecretStr("x"))
    'Basic c2FmOng='
    """
    both = f"{user}:{password.get_secret_value()}".encode()
    return f"Basic {base64.b64encode(both).decode()}"


class Tokens:
    """The token of one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = asyncio.Lock()
        self._token: str | None = None
        self._until = 0.0

    async def get(self, exchange: Exchange) -> str:
        """Return a token that is still valid for a while.

        Raises:
            NoToken: no token is available.
        """
        async with self._lock:
            if self._token is None or time.monotonic() >= self._until:
                try:
                    self._token, lifetime = await self._asked(exchange)
                except NoAnswer as error:
                    raise NoToken(f"no token: {error}") from None
                self._until = time.monotonic() + EARLY * lifetime
            return self._token

    def forget(self, token: str | None) -> None:
        """Note that an endpoint has refused a token."""
        if token == self._token:
            self._token = None

    async def _asked(self, exchange: Exchange) -> tuple[str, float]:
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
        response = await exchange(endpoint.token_url, headers, body, MOST)
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
    if not math.isfinite(lifetime):
        raise NoToken(f"no token: the answer's expires_in is {lifetime}")
    return token, lifetime


def hidden(endpoint: Endpoint) -> list[tuple[str, str]]:
    """Return the secrets, each with the text to show in its place."""
    secrets = [*endpoint.secrets, endpoint.bearer, endpoint.password]
    secrets += [endpoint.client_secret, endpoint.proxy_password]
    found = [(endpoint.url, endpoint.shown)] if endpoint.url != endpoint.shown else []
    found += [(text.get_secret_value(), HIDDEN) for text in secrets if text is not None]
    header_sets = (authorization(endpoint), of_client(endpoint), of_proxy(endpoint))
    credentials = [text.partition(" ")[2] for headers in header_sets for text in headers.values()]
    queries = [urlsplit(text).query for text in (endpoint.url, endpoint.token_url or "")]
    values = [value for query in queries for value in values_of(query)]
    found += [(text, HIDDEN) for text in (*credentials, *queries, *values)]
    return [(text, shown) for text, shown in found if len(text) >= SHORTEST]


def values_of(query: str) -> list[str]:
    """Return the values in a URL's query, both as written and decoded.

    >>> values_of("key=a%2Fb&page=2&flag")
    ['a%2Fb', '2', 'a/b', '2']
    """
    written = [value for pair in query.split("&") if (value := pair.partition("=")[2])]
    return [*written, *(value for _, value in parse_qsl(query))]
