"""Pools of HTTP/2 connections: one for new requests, and retired ones.

The unread rest of an answer, which came too late or is too long, uses up a connection's
flow-control window. httpcore2 does not tell the endpoint to stop sending. So the pool of such a
connection takes no new requests, and is closed when its last request is done.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from saf.dispatch.credentials import of_proxy, tls
from saf.dispatch.guard import address_check
from saf.dispatch.settings import Endpoint
from saf.dispatch.transport import HEADERS, IDLE_SECONDS

if TYPE_CHECKING:
    import httpcore2


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
