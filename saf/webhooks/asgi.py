"""The parts of ASGI that an application for signed requests needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TooLarge(Exception):
    """A body exceeds the limit."""


class Gone(Exception):
    """The client has disconnected, or is too slow."""


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


async def live(receive: Receive, send: Send, at_end: Callable[[], None] = lambda: None) -> None:
    """Answer lifespan events; call ``at_end`` at shutdown."""
    while True:
        event = (await receive())["type"]
        if event == "lifespan.shutdown":
            at_end()
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return
