"""HTTP/1.1, by aiohttp: one request at a time per connection, as many connections as requests."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from saf.errors import MissingExtra
from saf.receiving.dispatch.credentials import of_proxy, tls
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.dispatch.transport import (
    HEADERS,
    IDLE_SECONDS,
    Exchange,
    Exchanged,
    NoAnswer,
    guarded_sockets,
)

if TYPE_CHECKING:
    import aiohttp

LARGE = 1 << 20
"""Size in bytes above which a body is written in parts, so that other requests continue."""


@asynccontextmanager
async def connections(endpoint: Endpoint) -> AsyncIterator[Exchange]:
    """Open a transport (see `.transport`); the connection of a long answer is closed."""
    try:
        import aiohttp
    except ImportError:
        raise MissingExtra("dispatch", "calling an endpoint") from None
    guard = guarded_sockets(endpoint.networks) if endpoint.public_only else None
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=endpoint.max_in_flight,
            keepalive_timeout=IDLE_SECONDS,
            ssl=tls(endpoint),
            socket_factory=guard,
        ),
        timeout=aiohttp.ClientTimeout(
            total=endpoint.timeout_seconds, sock_connect=endpoint.connect_seconds
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        proxy=endpoint.proxy,
        headers=HEADERS,  # these go to a proxy too
        auto_decompress=False,
        trust_env=False,
    ) as session:
        for_proxy = of_proxy(endpoint) or None

        async def exchange(
            url: str, headers: Mapping[str, str], body: bytes, most: int
        ) -> Exchanged:
            try:
                async with session.post(
                    url,
                    data=body if len(body) <= LARGE else io.BytesIO(body),
                    headers=headers,
                    allow_redirects=False,
                    proxy_headers=for_proxy,
                ) as response:
                    return Exchanged(
                        status=response.status,
                        headers=response.headers,
                        body=await _read(response, most),
                    )
            except Exception as problem:
                reason = _reason(problem, endpoint)
                if reason is None:
                    raise
                raise NoAnswer(reason) from problem

        yield exchange


def _reason(problem: Exception, endpoint: Endpoint) -> str | None:
    """Return a request's error as text; None if the error is not the network's."""
    import aiohttp

    match problem:
        case aiohttp.ConnectionTimeoutError():
            reason = f"cannot connect within {endpoint.connect_seconds:g} s"
        case TimeoutError():
            reason = f"no answer within {endpoint.timeout_seconds:g} s"
        case aiohttp.ClientConnectorCertificateError():
            reason = f"its certificate is refused: {problem.certificate_error}"
        case aiohttp.ClientConnectorError():
            reason = f"cannot connect: {problem.os_error.strerror or problem.os_error}"
        case aiohttp.ClientResponseError():
            reason = f"no answer in HTTP: {problem.message}"  # its text contains the URL
        case aiohttp.ClientError() | OSError() | ValueError() | EOFError():
            reason = f"no answer: {type(problem).__name__}: {problem}"
        case _:
            return None
    return reason


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Read an answer to its end, so that its connection can be kept; a long one only in part."""
    body = bytearray()
    while len(body) < most:
        chunk = await response.content.read(most - len(body))
        if not chunk:
            return bytes(body)
        body += chunk
    response.close()
    return bytes(body)
