"""The entrance of an application: signed requests come in, so many at a time, each so large.

A request has a place from when its body is read until it is answered, so that memory is bounded.
Whoever has no place is told to come later. What the headers say of a signature is looked at before
that: a request that has none, or one of long ago, has no place and is not read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from saf.signing.webhook import stated
from saf.webhooks import asgi

if TYPE_CHECKING:
    from saf.webhooks.asgi import Receive, Scope


class Full(Exception):
    """As many requests as are taken at a time are in hand; the text says so."""


class Entrance:
    """Where requests come in; for one event loop.

    Args:
        at_once: how many requests have a place at a time.
        max_bytes: how large each may be.
        seconds: how long the body of each may take to come.
    """

    def __init__(self, *, at_once: int, max_bytes: int, seconds: float) -> None:
        self._at_once, self._max_bytes, self._seconds = at_once, max_bytes, seconds
        self._inside = 0

    @asynccontextmanager
    async def let_in(
        self, scope: Scope, receive: Receive
    ) -> AsyncIterator[tuple[dict[str, str], bytes]]:
        """Give a request its place until the block ends; yield its headers and its body.

        Raises:
            NotVerified: its headers state no signature of now.
            Full: there is no place.
            TooLarge, Gone: as `asgi.body_of`.
        """
        headers = asgi.headers_of(scope)
        stated(headers)
        if self._inside >= self._at_once:
            raise Full(f"{self._at_once} requests are in hand already")
        self._inside += 1
        try:
            body = await asgi.body_of(scope, receive, most=self._max_bytes, seconds=self._seconds)
            yield headers, body
        finally:
            self._inside -= 1
