"""The demo's webhooks: a receiver in a separate process, and the dispatcher that sends to it.

    python -m saf_demo.webhooks FILE PAUSE_AFTER       (with SECRET set; it prints its port)

The receiver verifies each signature, and drops messages that it has already received. It adds a
line to the file for each message before it accepts it. In the middle of a run, it pauses for some
seconds and answers that it is in maintenance. It ends with its parent process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pydantic import SecretStr

import saf.webhooks
from saf.broker.services import create_service
from saf.database import Dsn
from saf.errors import MissingExtra, NotVerified, SafError
from saf.message import CONTENT_TYPE
from saf.receiving.dispatch.dispatcher import Dispatcher
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.inbox import inbox_status
from saf_demo.flights import SERVICE
from saf_demo.proof import Received

FLIGHTS = 20_000
"""Default number of flights to send."""

SECRET = "whsec_" + "ZGVt" * 8
"""Secret that both sides of this demo know; it protects nothing."""

PAUSE_SECONDS = 3.0
LOOK_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a run."""

    requests: int
    """Number of accepted messages."""
    seconds: float
    paused: bool
    """True if the receiver has paused."""


def prepare(mom: Dsn) -> None:
    """Create the service at the MOM store, so that it has a subscription."""
    with mom.connect(role="demo", autocommit=True) as connection:
        create_service(connection, SERVICE)


def send(mom: Dsn, folder: Path) -> Result:
    """Send all messages of the inbox to a receiver that writes to a file in the folder.

    Raises:
        MissingExtra: aiohttp is not installed.
        SafError: the receiver does not start.
    """
    began = time.monotonic()
    pause_after = max(1, left(mom) // 2)
    with _serve(folder, pause_after=pause_after) as url:
        endpoint = Endpoint(url=url, subscription=SERVICE, secrets=(SecretStr(SECRET),))
        dispatcher = Dispatcher(SERVICE, endpoint, mom)
        asyncio.run(_until_nothing_is_left(dispatcher, mom))
    handled = dispatcher.summary.handled
    return Result(requests=handled, seconds=time.monotonic() - began, paused=handled > pause_after)


async def _until_nothing_is_left(dispatcher: Dispatcher, mom: Dsn) -> None:
    stopping = asyncio.Event()
    work = asyncio.create_task(dispatcher.run(stopping))
    while not work.done() and await asyncio.to_thread(left, mom) > 0:
        await asyncio.wait([work], timeout=LOOK_SECONDS)
    stopping.set()
    await work


def left(mom: Dsn) -> int:
    """Return the number of messages that are not received yet."""
    with mom.connect(role="demo", autocommit=True) as connection:
        return sum(row.unread + row.parked for row in inbox_status(connection))


def received(folder: Path) -> Iterator[Received]:
    """Yield all messages that the receiver has accepted, in the order in which they came."""
    with _file(folder).open() as lines:
        for line in lines:
            entry: dict[str, Any] = json.loads(line)
            headers = json.dumps({CONTENT_TYPE: entry["type"]})
            body = entry["body"].encode()
            yield entry["id"], entry["from"], SERVICE, entry["key"], None, headers, body


def _file(folder: Path) -> Path:
    return folder / "received.jsonl"


@contextmanager
def _serve(folder: Path, *, pause_after: int) -> Iterator[str]:
    folder.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "saf_demo.webhooks", _file(folder), str(pause_after)],
        stdin=subprocess.PIPE,  # it ends with this process
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SECRET": SECRET},
        process_group=0,  # Ctrl-C goes to this process, which then stops the receiver
    ) as process:
        try:
            assert process.stdout is not None  # a pipe
            port = process.stdout.readline().strip()
            if not port:
                raise SafError("the receiver of webhooks does not start; its output is above")
            yield f"http://127.0.0.1:{port}/departures"
        finally:
            process.terminate()


class Receiver:
    """Accepts webhooks, and remembers their ids."""

    def __init__(self, file: Path, secret: str, pause_after: int) -> None:
        self._secret = secret
        self._pause_after = pause_after
        self._paused_until: float | None = None
        file.touch()
        whole = file.read_bytes().rpartition(b"\n")
        os.truncate(file, len(whole[0] + whole[1]))  # remove a killed receiver's partial line
        self._seen = {json.loads(line)["id"] for line in file.read_text().splitlines()}
        self._first = len(self._seen)
        self._lines = file.open("a")

    def take(self, headers: dict[str, str], body: bytes) -> int:
        """Process a request; return the status of the answer."""

        if self._pauses():
            return 503
        try:
            number = saf.webhooks.verify(headers, body, self._secret)
        except NotVerified:
            return 401
        if number not in self._seen:
            entry = {
                "id": number,
                "from": unquote(headers["ce-source"].rpartition("/")[2]),
                "key": unquote(headers["ce-subject"]) if "ce-subject" in headers else None,
                "type": headers["content-type"],
                "body": body.decode(),
            }
            self._lines.write(json.dumps(entry) + "\n")
            self._lines.flush()
            self._seen.add(number)
        return 204

    def _pauses(self) -> bool:
        if self._paused_until is None and len(self._seen) - self._first >= self._pause_after:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
        return self._paused_until is not None and time.monotonic() < self._paused_until


def main(file: Path, pause_after: int) -> None:
    """Serve until standard input is closed.

    Raises:
        MissingExtra: aiohttp is not installed.
    """
    try:
        from aiohttp import web
    except ImportError:
        raise MissingExtra("dispatch", "receiving webhooks") from None
    receiver = Receiver(file, os.environ["SECRET"], pause_after)

    async def answer(request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        return web.Response(status=receiver.take(headers, await request.read()))

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/departures", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await runner.cleanup()

    asyncio.run(serve())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
