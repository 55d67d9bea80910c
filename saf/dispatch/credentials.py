"""Credentials: the identity of a caller, its proof, and the texts that must be hidden."""

from __future__ import annotations

import base64
import ssl
from urllib.parse import parse_qsl, urlsplit

import pydantic

from saf.dispatch.settings import Endpoint
from saf.errors import ConfigurationError
from saf.receiving.failures import HIDDEN, SHORTEST


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
