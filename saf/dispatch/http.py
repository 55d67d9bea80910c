"""The client: one request to an endpoint, and what its answer means.

It never raises because of an endpoint, whatever that does. Connections are kept. Redirects are not
followed, cookies are not kept, and a proxy of the environment is not used. An answer is read up to
`MOST`, as it is sent and without unpacking it; the connection of a longer one is closed. The
timeout is for the whole request, so an endpoint that sends a byte now and then does not extend it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from types import TracebackType
from typing import TYPE_CHECKING

from saf.dispatch.answers import KEPT, Answer, Meaning, meaning_of, retry_after
from saf.dispatch.envelope import Request
from saf.dispatch.settings import Endpoint
from saf.errors import MissingExtra
from saf.setaside.isolation import kept

if TYPE_CHECKING:
    import aiohttp

MOST = 64 * 1024
"""How many bytes of an answer are read."""

IDLE_SECONDS = 30.0
"""How long a connection is kept that nobody uses."""


class Client:
    """Sends requests to one endpoint. Use it inside of a running loop, as an async context.

    Raises:
        MissingExtra: aiohttp is not installed.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        try:
            import aiohttp
        except ImportError:
            raise MissingExtra("dispatch", "calling an endpoint") from None
        self._library = aiohttp
        self.endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        library, endpoint = self._library, self.endpoint
        self._session = library.ClientSession(
            connector=library.TCPConnector(
                limit=endpoint.max_in_flight, keepalive_timeout=IDLE_SECONDS
            ),
            timeout=library.ClientTimeout(
                total=endpoint.timeout_seconds, sock_connect=endpoint.connect_seconds
            ),
            cookie_jar=library.DummyCookieJar(),
            headers={"User-Agent": "saf"},
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        assert self._session is not None  # noqa: S101 - it was entered
        await self._session.close()

    async def post(self, request: Request) -> Answer:
        """Send a request; whatever comes of it is an answer."""
        assert self._session is not None  # noqa: S101 - it was entered
        library, began = self._library, time.monotonic()
        try:
            async with self._session.post(
                self.endpoint.url, data=request.body, headers=request.headers, allow_redirects=False
            ) as response:
                head = await self._read(response)
                status = response.status
                meaning = meaning_of(status, rejects=self.endpoint.client_errors == "reject")
                return Answer(
                    meaning=meaning,
                    seconds=time.monotonic() - began,
                    status=status,
                    error="" if meaning is Meaning.DONE else said_by(status, head),
                    retry_after=retry_after(response.headers),
                )
        except TimeoutError:
            error = f"no answer within {self.endpoint.timeout_seconds:g} s"
        except library.ClientConnectorError as problem:
            error = f"cannot connect: {problem.os_error.strerror or problem.os_error}"
            if isinstance(problem, library.ClientConnectorCertificateError):
                error = f"its certificate is refused: {problem.certificate_error}"
        except (library.ClientError, ssl.SSLError, OSError, ValueError, EOFError) as problem:
            error = f"no answer: {type(problem).__name__}: {problem}"
        return Answer(meaning=Meaning.WAITS, seconds=time.monotonic() - began, error=kept(error))

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Read the answer to its end, so that the connection can be kept; return its beginning."""
        head, size = b"", 0
        while size < MOST:
            some = await response.content.read(min(MOST, MOST - size))
            if not some:
                return head
            size += len(some)
            if len(head) < KEPT:
                head += some[: KEPT - len(head)]
        response.close()
        return head


def said_by(status: int, head: bytes) -> str:
    r"""An answer in words: its status and its first bytes, on one line.

    >>> said_by(503, b"down for\n maintenance"), said_by(500, b"")
    ('HTTP 503: down for maintenance', 'HTTP 500')
    """
    words = " ".join(kept(head[:KEPT].decode(errors="replace")).split())
    return f"HTTP {status}: {words}" if words else f"HTTP {status}"


async def gather(*ones: asyncio.Task[None]) -> None:
    """Wait for tasks to end, however they do."""
    if ones:
        await asyncio.wait(ones)
