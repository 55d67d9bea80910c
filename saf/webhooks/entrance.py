"""The entrance of an application: a limited number of signed requests at a time, of limited size.

A request occupies a place from reading its body to its answer, so that memory is bounded. Further
clients are told to retry later. The signature's headers are checked first: a request without them,
or with an old time, gets no place and is not read.
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
    """The limit of concurrent requests is reached; the text says so."""


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
            TooLarge, Gone: as for `asgi.body_of`.
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
