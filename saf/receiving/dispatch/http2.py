"""HTTP/2, by httpcore2: many concurrent requests over one connection.

HTTP/2 is used if the endpoint offers it when TLS begins (ALPN); otherwise HTTP/1.1.

When a connection ends, the requests in flight end without an answer. The end may be regular:
servers close a connection after some number of requests (GOAWAY), and h2, the base of httpcore2,
then reads no further answers to earlier requests. So a request without an answer is sent again
immediately, over another connection: the endpoint may get it twice, with the same id. After
`CONNECTIONS` connections, or at the endpoint's timeout, the exchange ends with `NoAnswer`.

The unread rest of an answer, which came too late or is too long, uses up a connection's
flow-control window. httpcore2 does not tell the endpoint to stop sending. So `Pools` has one pool
of connections for new requests, and retired pools: the pool of such a connection takes no new
requests, and is closed when its last request is done.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from saf.errors import MissingExtra
from saf.receiving.dispatch.credentials import of_proxy, tls
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.dispatch.transport import (
    HEADERS,
    IDLE_SECONDS,
    Exchange,
    Exchanged,
    NoAnswer,
    address_check,
)

if TYPE_CHECKING:
    import httpcore2


CONNECTIONS = 5
"""Maximum number of connections, one after the other, to send a request over."""

UNSENDABLE = (OSError, ValueError, TypeError)
"""Other errors without an answer: the system's, and those that httpcore2 raises for a malformed
URL, such as an endpoint's redirect target."""


@asynccontextmanager
async def connections(endpoint: Endpoint) -> AsyncIterator[Exchange]:
    """Open a transport (see `.transport`); the rest of a long answer is not read."""
    try:
        import h2  # noqa: F401 - httpcore2 looks for it late
        import httpcore2
        import multidict
    except ImportError:
        raise MissingExtra("http2", "calling an endpoint by HTTP/2") from None
    pools = Pools(endpoint)

    async def attempt(url: str, headers: Mapping[str, str], body: bytes, most: int) -> Exchanged:
        read = bytearray()
        async with (
            pools.use() as pool,
            pool.stream(
                "POST",
                url,
                headers=[
                    (name.encode(), value.encode())
                    for name, value in {**HEADERS, **headers}.items()
                ],
                content=body,
                extensions={"timeout": {"connect": endpoint.connect_seconds}},
            ) as response,
        ):
            async for chunk in response.aiter_stream():
                read += chunk
                if len(read) >= most:
                    pools.retire(pool)
                    break
            return Exchanged(
                status=response.status,
                headers=multidict.CIMultiDict(
                    (name.decode("latin-1"), value.decode("latin-1"))
                    for name, value in response.headers
                ),
                body=bytes(read[:most]),
            )

    async def exchange(url: str, headers: Mapping[str, str], body: bytes, most: int) -> Exchanged:
        try:
            async with asyncio.timeout(endpoint.timeout_seconds):
                for left in reversed(range(CONNECTIONS)):
                    try:
                        return await attempt(url, headers, body, most)
                    except (httpcore2.ProtocolError, httpcore2.ReadError, httpcore2.WriteError):
                        if not left:
                            raise
            raise AssertionError("the last one raises or returns")
        except httpcore2.ConnectTimeout:
            reason = f"cannot connect within {endpoint.connect_seconds:g} s"
        except TimeoutError:
            reason = f"no answer within {endpoint.timeout_seconds:g} s"
        except (httpcore2.ConnectError, httpcore2.ProxyError) as problem:
            reason = _unconnected(problem)
        except httpcore2.ProtocolError as problem:
            reason = f"no answer in HTTP: {_protocol(problem)}"
        except (httpcore2.NetworkError, httpcore2.TimeoutException, *UNSENDABLE) as problem:
            reason = f"no answer: {type(problem).__name__}: {problem}"
        raise NoAnswer(reason)

    try:
        yield exchange
    finally:
        await pools.aclose()


def _unconnected(problem: Exception) -> str:
    """Return why a connection failed: the cause is more precise than the library's error."""
    cause: BaseException = problem
    while (further := cause.__cause__ or cause.__context__) is not None:
        cause = further
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is refused: {cause}"
    reason = str(cause)
    if isinstance(cause, ConnectionError) and cause.errno:
        reason = os.strerror(cause.errno)
    elif isinstance(cause, OSError) and cause.strerror:
        reason = cause.strerror
    return f"cannot connect: {reason or type(cause).__name__}"


def _protocol(problem: Exception) -> str:
    """Return the endpoint's error that ended a connection or a request."""
    code = getattr(problem.args[0] if problem.args else None, "error_code", None)
    if code is not None:
        return f"error {code!s} of HTTP/2"
    return str(problem) or type(problem).__name__


class Pools:
    """The pools of one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        import httpcore2

        self._library = httpcore2
        self._endpoint = endpoint
        self._users: Counter[httpcore2.AsyncConnectionPool] = Counter()
        """Number of requests in flight, by pool."""
        self._current = self._new()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[httpcore2.AsyncConnectionPool]:
        """Yield the pool for one request; retire it if the request is given up."""
        pool = self._current
        self._users[pool] += 1
        try:
            yield pool
        except asyncio.CancelledError:
            self.retire(pool)
            raise
        finally:
            self._users[pool] -= 1
            if pool is not self._current and not self._users[pool]:
                del self._users[pool]
                await pool.aclose()

    def retire(self, pool: httpcore2.AsyncConnectionPool) -> None:
        """Use another pool for later requests."""
        if pool is self._current:
            self._current = self._new()

    async def aclose(self) -> None:
        """Close all connections."""
        for pool in {self._current, *self._users}:
            await pool.aclose()

    def _new(self) -> httpcore2.AsyncConnectionPool:
        endpoint = self._endpoint
        context = tls(endpoint)
        options: dict[str, Any] = {
            "ssl_context": context if isinstance(context, ssl.SSLContext) else None,
            "max_connections": endpoint.max_in_flight,
            "keepalive_expiry": IDLE_SECONDS,
            "http2": True,
        }
        if endpoint.proxy is not None:
            credentials = [("Proxy-Authorization", value) for value in of_proxy(endpoint).values()]
            options |= {"proxy_headers": [*HEADERS.items(), *credentials]}
            return self._library.AsyncHTTPProxy(endpoint.proxy, **options)
        if endpoint.public_only:
            options |= {"network_backend": _guarded(self._library, endpoint.networks)}
        return self._library.AsyncConnectionPool(**options)


def _guarded(library: Any, networks: Iterable[str]) -> httpcore2.AsyncNetworkBackend:
    """Return a backend that checks each address before it connects to it."""
    check = address_check(networks)

    class Guarded(library.AnyIOBackend):  # type: ignore[misc]
        async def connect_tcp(self, host: str, port: int, *rest: Any, **options: Any) -> Any:
            problem: Exception = library.ConnectError(f"{host} has no address")
            for address in await _addresses(host, port):
                try:
                    check(address)
                    return await super().connect_tcp(address, port, *rest, **options)
                except PermissionError as error:
                    problem = library.ConnectError(error.strerror)
                except (library.ConnectError, library.ConnectTimeout) as error:
                    problem = error
            raise problem

    backend: httpcore2.AsyncNetworkBackend = Guarded()
    return backend


async def _addresses(host: str, port: int) -> list[str]:
    import httpcore2

    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpcore2.ConnectError(error.strerror) from error
    return list(dict.fromkeys(str(info[4][0]) for info in found))
