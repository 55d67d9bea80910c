"""Dispatching: messages a second to an endpoint, beside the bare client, and beside one that hangs.

The endpoint is an application under uvicorn in a process of its own, which accepts everything. The
bare client is what the dispatcher uses, aiohttp on uvloop, in a loop that posts with as many
requests in flight, and neither reads nor marks anything: the same requests, whose headers are made
before; and the bodies alone. So does httpx2, the other client that one would take. They take turns
in each round.

An endpoint that hangs accepts connections and never answers. A dispatcher in the same process has
as many requests in flight to it as it may.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
import httpx2
import uvicorn
import uvloop

from benchmarks.receive import FILL, READ_AGAIN
from benchmarks.stage import Stage, execute
from saf.broker.services import create_service, create_subscription
from saf.database import Dsn
from saf.receiving.dispatch.dispatcher import Dispatcher
from saf.receiving.dispatch.dispatcher import run as run_dispatchers
from saf.receiving.dispatch.settings import Endpoint

MESSAGES, IN_FLIGHT, ROUNDS = 20_000, 100, 3
BODY = b'{"order": 1'.ljust(200, b"x")
HEADERS = {
    "ce-specversion": "1.0",
    "ce-id": "5f0cbd1e-6a53-4b9e-8f0e-0b8d4d1c7f55",
    "ce-source": "/saf/",
    "ce-type": "OrderPlaced",
    "ce-time": "2026-01-31T12:00:00.000001Z",
    "ce-subject": "order%20123",
    "ce-partitionkey": "order%20123",
    "Content-Type": "application/json",
    "Idempotency-Key": "5f0cbd1e-6a53-4b9e-8f0e-0b8d4d1c7f55",
}
"""What a dispatcher sends with each of these messages."""

HANGING = "hanging"


async def accept(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that accepts everything."""
    assert scope["type"] == "http"
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def serve(listening: socket.socket) -> None:
    """The endpoint's process."""
    config = uvicorn.Config(accept, log_level="error", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listening])


@contextmanager
def endpoint() -> Iterator[str]:
    """The URL of an endpoint that accepts everything."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listening:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=[listening])
        process.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/hook"
        finally:
            process.kill()
            process.join()


@contextmanager
def hanging() -> Iterator[str]:
    """The URL of an endpoint that accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/hook"


def bare(url: str, headers: Mapping[str, str] | None) -> float:
    """Messages a second of the client alone."""

    async def work() -> float:
        left = MESSAGES
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=IN_FLIGHT), cookie_jar=aiohttp.DummyCookieJar()
        ) as client:

            async def post() -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    async with client.post(url, data=BODY, headers=headers) as response:
                        await response.read()

            began = time.monotonic()
            await asyncio.gather(*(post() for _ in range(IN_FLIGHT)))
            return MESSAGES / (time.monotonic() - began)

    return uvloop.run(work())


def bare_httpx2(url: str) -> float:
    """Messages a second of httpx2 alone."""

    async def work() -> float:
        left = MESSAGES
        limits = httpx2.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
        async with httpx2.AsyncClient(limits=limits, trust_env=False) as client:

            async def post() -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    await client.post(url, content=BODY, headers=HEADERS)

            began = time.monotonic()
            await asyncio.gather(*(post() for _ in range(IN_FLIGHT)))
            return MESSAGES / (time.monotonic() - began)

    return uvloop.run(work())


def dispatched(mom: Dsn, url: str, beside: str | None = None) -> float:
    """Messages a second of a dispatcher; ``beside``: the URL of an endpoint that hangs."""
    one = Dispatcher("billing", Endpoint(url=url, max_in_flight=IN_FLIGHT), mom)
    if beside is None:
        began = time.monotonic()
        run_dispatchers([one], drain=True)
        return one.summary.handled / (time.monotonic() - began)
    other = Dispatcher(
        HANGING, Endpoint(url=beside, max_in_flight=IN_FLIGHT), mom, stop_seconds=0.0
    )

    async def work() -> float:
        stopping = asyncio.Event()
        hangs = asyncio.create_task(other.run(stopping))
        await asyncio.sleep(2)  # by then, it has as many requests in flight as it may
        began = time.monotonic()
        await one.run(asyncio.Event(), drain=True)
        took = time.monotonic() - began
        stopping.set()
        await hangs
        return one.summary.handled / took

    return uvloop.run(work())


def alone(what: Callable[..., float], *arguments: Any) -> float:
    """What a function returns in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(what, arguments)


def run(stage: Stage) -> None:
    """Notes dispatch_per_second, its ratios, and dispatch_beside_hanging_ratio."""
    with stage.mom.connect(role="bench", autocommit=True) as connection:
        create_service(connection, "billing")
        connection.execute("TRUNCATE saf.inbox")
        connection.execute(FILL, [MESSAGES])
        create_subscription(connection, HANGING, service="billing")
        connection.execute("VACUUM ANALYZE saf.inbox")

    def again() -> None:
        execute(stage.mom, READ_AGAIN, "VACUUM saf.cursor", "CHECKPOINT")

    rates, ratios, of_bodies, of_httpx2, kept = [], [], [], [], []
    with endpoint() as url, hanging() as silent:
        for _ in range(ROUNDS):
            client, bodies = alone(bare, url, HEADERS), alone(bare, url, None)
            other = alone(bare_httpx2, url)
            again()
            mine = alone(dispatched, stage.mom, url)
            again()
            beside = alone(dispatched, stage.mom, url, silent)
            rates.append(mine)
            ratios.append(mine / client)
            of_bodies.append(mine / bodies)
            of_httpx2.append(mine / other)
            kept.append(beside / mine)
    stage.note("dispatch_per_second", rates, "1/s")
    stage.note("dispatch_ratio", ratios, "to the bare client", ">= 0.7")
    stage.note("dispatch_ratio_of_bodies", of_bodies, "to the bare client")
    stage.note("dispatch_ratio_to_httpx2", of_httpx2, "to the bare client", ">= 0.7")
    stage.note("dispatch_beside_hanging_ratio", kept, "to alone", ">= 0.95")
