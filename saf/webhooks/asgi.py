"""The entrance of an ASGI application: a limited number of requests at a time, of limited size.

`Entrance` is for signed requests. A request occupies a place from reading its body to its answer,
so that memory is bounded. Further clients are told to retry later. The signature's headers are
checked first: a request without them, or with an old time, gets no place and is not read. The
application verifies the signature, because that needs the complete body.

The other functions are the parts of ASGI that such an application needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from saf.signing.webhook import stated

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TooLarge(Exception):
    """A body exceeds the limit."""


class Gone(Exception):
    """The client has disconnected, or is too slow."""


class Full(Exception):
    """The limit of concurrent requests is reached; the text names the limit."""


async def live(receive: Receive, send: Send, at_end: Callable[[], None] = lambda: None) -> None:
    """Answer lifespan events; call ``at_end`` at shutdown."""
    while True:
        event = (await receive())["type"]
        if event == "lifespan.shutdown":
            at_end()
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return


class Entrance:
    """Admits requests; for one event loop.

    Args:
        at_once: how many requests have a place at a time.
        max_bytes: the largest size of a request.
        seconds: the longest time for a request's body to arrive.
    """

    def __init__(self, *, at_once: int, max_bytes: int, seconds: float) -> None:
        self._at_once, self._max_bytes, self._seconds = at_once, max_bytes, seconds
        self._inside = 0

    @asynccontextmanager
    async def let_in(
        self, scope: Scope, receive: Receive
    ) -> AsyncIterator[tuple[dict[str, str], bytes]]:
        """Give a request a place until the block ends; yield its headers and its body.

        Raises:
            NotVerified: the headers have no current signature.
            Full: all places are taken.
            TooLarge, Gone: as for `body_of`.
        """
        headers = headers_of(scope)
        stated(headers)
        if self._inside >= self._at_once:
            raise Full(f"{self._at_once} requests are in hand already")
        self._inside += 1
        try:
            body = await body_of(scope, receive, most=self._max_bytes, seconds=self._seconds)
            yield headers, body
        finally:
            self._inside -= 1


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of a request; names are in lower case."""
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }


async def body_of(scope: Scope, receive: Receive, *, most: int, seconds: float) -> bytes:
    """Return the body of a request.

    Raises:
        TooLarge: it has more than ``most`` bytes, or its content-length says so in advance.
        Gone: it has not arrived within ``seconds``.
    """
    length = headers_of(scope).get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise TooLarge
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(seconds):
            while more:
                part = await receive()
                if part["type"] != "http.request":
                    raise Gone
                body += part.get("body", b"")
                more = part.get("more_body", False)
                if len(body) > most:
                    raise TooLarge
    except TimeoutError:
        raise Gone from None
    return bytes(body)


async def answer(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Send a complete response."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
