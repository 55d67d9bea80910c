"""HTTP/1.1, by aiohttp: one request at a time per connection, as many connections as requests."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from saf.dispatch.credentials import of_proxy, tls
from saf.dispatch.settings import Endpoint
from saf.dispatch.transport import (
    HEADERS,
    IDLE_SECONDS,
    Exchanged,
    NoAnswer,
    Transport,
    guarded_sockets,
)
from saf.errors import MissingExtra

if TYPE_CHECKING:
    import aiohttp

LARGE = 1 << 20
"""Size in bytes above which a body is written in parts, so that other requests continue."""


class Http1(Transport):
    """Connections of HTTP/1.1. A connection whose answer is too long is closed."""

    def __init__(self, endpoint: Endpoint) -> None:
        try:
            import aiohttp
        except ImportError:
            raise MissingExtra("dispatch", "calling an endpoint") from None
        self._library = aiohttp
        self._endpoint = endpoint
        self._for_proxy = of_proxy(endpoint) or None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        library, endpoint = self._library, self._endpoint
        self._session = library.ClientSession(
            connector=library.TCPConnector(
                limit=endpoint.max_in_flight,
                keepalive_timeout=IDLE_SECONDS,
                ssl=tls(endpoint),
                socket_factory=(
                    guarded_sockets(endpoint.networks) if endpoint.public_only else None
                ),
            ),
            timeout=library.ClientTimeout(
                total=endpoint.timeout_seconds, sock_connect=endpoint.connect_seconds
            ),
            cookie_jar=library.DummyCookieJar(),
            proxy=endpoint.proxy,
            headers=HEADERS,  # these go to a proxy too
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None  # noqa: S101 - it was entered
        await self._session.close()

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, most: int) -> Exchanged:
        """See `Transport.post`."""
        assert self._session is not None  # noqa: S101 - it was entered
        try:
            async with self._session.post(
                url,
                data=body if len(body) <= LARGE else io.BytesIO(body),
                headers=headers,
                allow_redirects=False,
                proxy_headers=self._for_proxy,
            ) as response:
                return Exchanged(
                    status=response.status,
                    headers=response.headers,
                    body=await _read(response, most),
                )
        except Exception as problem:
            reason = self._problem(problem)
            if reason is None:
                raise
            raise NoAnswer(reason) from problem

    def _problem(self, problem: Exception) -> str | None:
        """Return a request's error as text; None if the error is not the network's."""
        library, endpoint = self._library, self._endpoint
        match problem:
            case library.ConnectionTimeoutError():
                reason = f"cannot connect within {endpoint.connect_seconds:g} s"
            case TimeoutError():
                reason = f"no answer within {endpoint.timeout_seconds:g} s"
            case library.ClientConnectorCertificateError():
                reason = f"its certificate is refused: {problem.certificate_error}"
            case library.ClientConnectorError():
                reason = f"cannot connect: {problem.os_error.strerror or problem.os_error}"
            case library.ClientResponseError():
                reason = f"no answer in HTTP: {problem.message}"  # its text contains the URL
            case library.ClientError() | OSError() | ValueError() | EOFError():
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
