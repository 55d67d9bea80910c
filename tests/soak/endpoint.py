"""The endpoint of a soak, which `saf dispatch` sends to: it fails now and then.

    python -m tests.soak.endpoint PORT

What it takes is in the ledger before it answers. A request may come twice, and a gap is a fault.
"""

from __future__ import annotations

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
            with self._connection.transaction():
                hear(self._connection, "hooks", [Said.of(body)], once=False)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


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
