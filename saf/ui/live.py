"""Live: a stream of server-sent events that tells a page when to reload itself.

An event only signals that new figures exist. A page loads them from its own address, with its own
filters, so its content is the same with and without JavaScript.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from saf.ui.site import Site

LOOK_SECONDS = 0.5
LONGEST_SECONDS = 300.0
"""Longest duration of a stream. The browser then opens another, which checks the login again."""
MOST = 200
"""Most streams at a time."""


def endpoint(site: Site) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of the stream."""
    streams = 0

    async def stream(request: Request) -> AsyncIterator[str]:
        nonlocal streams
        streams += 1
        try:
            seen = site.pulse.number
            loop = asyncio.get_running_loop()
            end = loop.time() + LONGEST_SECONDS
            yield "retry: 3000\n\n"
            while loop.time() < end and not (site.ending or site.pulse.over):
                if site.access.visitor(request) is None:
                    return
                if site.pulse.number != seen:
                    seen = site.pulse.number
                    yield f"event: tick\ndata: {seen}\n\n"
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            streams -= 1

    async def answer(request: Request) -> Response:
        if site.access.visitor(request) is None:
            return Response(status_code=401)
        if streams >= MOST:
            return Response(status_code=503)
        return StreamingResponse(
            stream(request),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return answer
