"""The endpoint of a soak, which `saf dispatch` sends to: it fails now and then.

    python -m tests.soak.endpoint PORT

What it takes is in the ledger before it answers. A request may come twice, and a gap is a fault.
Requests that wait are noted together: so it is quicker than the dispatcher, whatever else takes the
machine's time.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from typing import Any

import psycopg
import uvicorn

from saf.signals import stop_on_signals
from tests.soak.ledger import Said, hear

FAILS = 0.002
"""Of its requests, so many are answered with 503."""


class Endpoint:
    """An ASGI application."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn, application_name="endpoint", autocommit=True)
        # no crash of the server is a part of a soak
        self._connection.execute("SET synchronous_commit = off")
        self._chance = random.Random()
        self._waiting: list[tuple[Said, asyncio.Future[None]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Take one event."""
        assert scope["type"] == "http"
        body, more = b"", True
        while more:
            part = await receive()
            body += part.get("body", b"")
            more = part.get("more_body", False)
        status = 503 if self._chance.random() < FAILS else 204
        if status == 204:
            await self._noted(Said.of(body))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def _noted(self, said: Said) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._note)
        noted = loop.create_future()
        self._waiting.append((said, noted))
        return noted

    def _note(self) -> None:
        waiting, self._waiting = self._waiting, []
        with self._connection.transaction():
            hear(self._connection, "hooks", [said for said, _ in waiting], once=False)
        for _, noted in waiting:
            if not noted.done():  # whoever asked may have gone
                noted.set_result(None)


if __name__ == "__main__":
    with stop_on_signals(lambda: None):  # uvicorn raises them again when it has ended in order
        uvicorn.run(
            Endpoint(os.environ["SOAK_MOM"]),
            host="127.0.0.1",
            port=int(sys.argv[1]),
            log_level="error",
            access_log=False,
            lifespan="off",
        )
