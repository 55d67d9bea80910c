"""HTTP/2, by httpcore2: many requests at once over one connection.

It is spoken where the endpoint offers it when TLS begins (ALPN); with others, HTTP/1.1. A
connection that ends takes the requests in flight with it, and says nothing about any of them. It
may end in good order: servers end theirs after some number of requests (GOAWAY), and h2, which
httpcore2 stands on, then hears no more of those before. So what had no answer yet is sent again
at once, over another connection: the endpoint may get it twice, with the same id.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from typing import Self

from saf.dispatch.pools import Pools
from saf.dispatch.settings import Endpoint
from saf.dispatch.transport import HEADERS, Exchanged, NoAnswer, Transport
from saf.errors import MissingExtra

CONNECTIONS = 5
"""Over so many connections, one after the other, a request is sent at most."""

UNSENDABLE = (ValueError, TypeError)
"""What a URL makes httpcore2 raise that is none, as an endpoint may say where it leads to."""


class Http2(Transport):
    """Connections of HTTP/2. What is left of an answer that is too long is not read."""

    def __init__(self, endpoint: Endpoint) -> None:
        try:
            import h2  # noqa: F401 - httpcore2 looks for it late
            import httpcore2
            import multidict
        except ImportError:
            raise MissingExtra("http2", "calling an endpoint by HTTP/2") from None
        self._library = httpcore2
        self._dict = multidict.CIMultiDict
        self._endpoint = endpoint
        self._pools: Pools | None = None

    async def __aenter__(self) -> Self:
        self._pools = Pools(self._endpoint)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._pools is not None  # noqa: S101 - it was entered
        await self._pools.aclose()

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, most: int) -> Exchanged:
        """See `Transport.post`."""
        library, endpoint = self._library, self._endpoint
        try:
            async with asyncio.timeout(endpoint.timeout_seconds):
                for left in reversed(range(CONNECTIONS)):
                    try:
                        return await self._exchange(url, headers, body, most)
                    except (library.ProtocolError, library.ReadError, library.WriteError):
                        if not left:
                            raise
            raise AssertionError("the last one raises or returns")
        except library.ConnectTimeout:
            said = f"cannot connect within {endpoint.connect_seconds:g} s"
        except TimeoutError:
            said = f"no answer within {endpoint.timeout_seconds:g} s"
        except (library.ConnectError, library.ProxyError) as problem:
            said = _unconnected(problem)
        except library.ProtocolError as problem:
            said = f"no answer in HTTP: {_protocol(problem)}"
        except (library.NetworkError, library.TimeoutException, OSError, *UNSENDABLE) as problem:
            said = f"no answer: {type(problem).__name__}: {problem}"
        raise NoAnswer(said)

    async def _exchange(
        self, url: str, headers: Mapping[str, str], body: bytes, most: int
    ) -> Exchanged:
        assert self._pools is not None  # noqa: S101 - it was entered
        read = bytearray()
        async with (
            self._pools.use() as pool,
            pool.stream(
                "POST",
                url,
                headers=[
                    (name.encode(), value.encode())
                    for name, value in {**HEADERS, **headers}.items()
                ],
                content=body,
                extensions={"timeout": {"connect": self._endpoint.connect_seconds}},
            ) as response,
        ):
            async for some in response.aiter_stream():
                read += some
                if len(read) >= most:
                    self._pools.retire(pool)
                    break
            return Exchanged(
                status=response.status,
                headers=self._dict(
                    (name.decode("latin-1"), value.decode("latin-1"))
                    for name, value in response.headers
                ),
                body=bytes(read[:most]),
            )


def _protocol(problem: Exception) -> str:
    """What the endpoint did, if its connection or the request on it has ended with an error."""
    code = getattr(problem.args[0] if problem.args else None, "error_code", None)
    if code is not None:
        return f"error {code!s} of HTTP/2"
    return str(problem) or type(problem).__name__


def _unconnected(problem: Exception) -> str:
    """What a connection failed of: the cause says more than the library's error."""
    cause: BaseException = problem
    while (further := cause.__cause__ or cause.__context__) is not None:
        cause = further
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is refused: {cause}"
    said = str(cause)
    if isinstance(cause, ConnectionError) and cause.errno:
        said = os.strerror(cause.errno)
    elif isinstance(cause, OSError) and cause.strerror:
        said = cause.strerror
    return f"cannot connect: {said or type(cause).__name__}"
