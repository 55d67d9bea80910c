"""Endpoints for tests: an ASGI application under uvicorn, and servers that behave badly."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from saf.database import Dsn, fetch
from saf.receiving.dispatch.dispatcher import Dispatcher, run
from saf.receiving.dispatch.settings import Endpoint
from saf_demo.servers import free_port
from tests.certificates import certificate as make_certificate
from tests.needed import needed
from tests.pipeline import connect
from tests.receivers import SUBSCRIPTION, prepare
from tests.waits import until

Reply = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""


@dataclass(frozen=True, kw_only=True)
class Got:
    """One request, as an endpoint gets it."""

    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str | None:
        return self.headers.get("ce-subject")

    @property
    def id(self) -> str:
        return self.headers.get("idempotency-key", "")


@dataclass(kw_only=True)
class Partner:
    """An endpoint that remembers what it gets, and answers as it is told."""

    url: str = ""
    begun: list[Got] = field(default_factory=list)
    """All requests, in the order in which they came."""
    accepted: list[Got] = field(default_factory=list)
    """Those that were answered with 2xx, in the order of the answers."""
    in_flight: int = 0
    answered: int = 0
    keeps: bool = True
    """Whether it remembers what it has accepted."""
    most_in_flight: int = 0
    overlaps: int = 0
    """How often a key was in flight twice at a time."""
    answer: Callable[[Got], Awaitable[Reply]] | None = None
    """How it answers; by default, with 204."""
    _keys: set[str] = field(default_factory=set)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        body, more = b"", True
        while more:
            event = await receive()
            body += event.get("body", b"")
            more = event.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        got = Got(headers=headers, body=body)
        self.begun.append(got)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        key = got.key or got.id
        self.overlaps += key in self._keys
        self._keys.add(key)
        try:
            status, more_headers, text = await self.answer(got) if self.answer else (204, {}, b"")
        finally:
            self.in_flight -= 1
            self._keys.discard(key)
        self.answered += 1
        if status // 100 == 2 and self.keeps:
            self.accepted.append(got)
        raw = [(name.encode(), value.encode()) for name, value in more_headers.items()]
        if status != 204:
            raw.append((b"content-length", str(len(text)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": text})

    def by_key(self) -> dict[str, list[int]]:
        """The numbers that were accepted, by key, as they came."""
        found: dict[str, list[int]] = {}
        for got in self.accepted:
            found.setdefault(got.key or "", []).append(int(got.body))
        return found

    def always(self, status: int, text: bytes = b"", **headers: str) -> None:
        """Answer each request like this."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}

        async def answer(_: Got) -> Reply:
            return status, named, text

        self.answer = answer

    def after(self, seconds: float) -> None:
        """Accept each request after so long."""

        async def answer(_: Got) -> Reply:
            await asyncio.sleep(seconds)
            return 204, {}, b""

        self.answer = answer


@contextmanager
def serving(partner: Partner, application: Any = None, port: int = 0) -> Iterator[Partner]:
    """The partner's server, or one of another application at its URL, until the block ends."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(1000)
        partner.url = f"http://127.0.0.1:{listening.getsockname()[1]}/hook"
        config = uvicorn.Config(
            application or partner,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=60,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        try:
            yield partner
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


def held(partner: Partner, status: int) -> Callable[[], None]:
    """Let a partner answer only once what is returned is called, and then with this status."""
    release = asyncio.Event()

    async def answer(_: Got) -> Reply:
        await asyncio.wait_for(release.wait(), 60)
        return status, {"retry-after": "100"}, b""

    partner.answer = answer
    return lambda: release._loop.call_soon_threadsafe(release.set)  # type: ignore[attr-defined] # set in its loop


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    """The MOM store, with the service that is dispatched."""
    prepare(mom)
    return mom


@pytest.fixture
def partner() -> Iterator[Partner]:
    """An endpoint that is served."""
    with serving(Partner()) as one:
        yield one


NGINX = """
{user}
daemon off;
error_log {folder}/error.log;
pid {folder}/nginx.pid;
worker_processes 1;
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path {folder};
  proxy_temp_path {folder};
  fastcgi_temp_path {folder};
  uwsgi_temp_path {folder};
  scgi_temp_path {folder};
  client_max_body_size 100m;
  keepalive_requests {requests};
  server {{
    listen 127.0.0.1:{port} ssl {offers};
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    location / {{
      proxy_pass {url};
      proxy_buffering off;
      proxy_set_header X-Version $server_protocol;
      proxy_set_header X-Connection $connection;
    }}
  }}
}}
"""


@contextmanager
def behind_nginx(
    partner: Partner, folder: Path, *, http2: bool = True, requests: int = 1000
) -> Iterator[Path]:
    """The partner behind nginx, which offers HTTP/2 by TLS, until the block ends; its certificate.

    ``requests``: after so many, nginx ends a connection. The partner's URL becomes nginx's.
    """
    program = needed("nginx", "nginx-light")
    certificate, key = make_certificate(folder)
    port = free_port()
    text = NGINX.format(
        user="user root;" if os.geteuid() == 0 else "",
        folder=folder,
        requests=requests,
        port=port,
        offers="http2" if http2 else "",
        certificate=certificate,
        key=key,
        url=partner.url.removesuffix("/hook"),
    )
    (folder / "nginx.conf").write_text(text)
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        until(lambda: _accepts(port))
        partner.url = f"https://localhost:{port}/hook"
        try:
            yield certificate
        finally:
            process.terminate()


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def end(application: Any) -> None:
    """What a server says to an application when it stops."""
    said: list[str] = []

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.shutdown"}

    async def send(event: Mapping[str, Any]) -> None:
        said.append(event["type"])

    asyncio.run(application({"type": "lifespan"}, receive, send))
    assert said == ["lifespan.shutdown.complete"]


@contextmanager
def listening(serve: Callable[[socket.socket], None], host: str = "127.0.0.1") -> Iterator[str]:
    """A TCP server that does this to each connection; its URL."""
    with socket.create_server((host, 0)) as server:

        def work() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=one, args=[connection], daemon=True).start()

        def one(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                serve(connection)

        threading.Thread(target=work, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/hook"
        server.shutdown(socket.SHUT_RDWR)


def settings(partner: Partner, **more: Any) -> Endpoint:
    return Endpoint(url=partner.url, subscription=SUBSCRIPTION, **more)


def dispatcher(mom: Dsn, partner: Partner, **more: Any) -> Dispatcher:
    return Dispatcher("partner", settings(partner, **more), mom)


def dispatch(mom: Dsn, partner: Partner, **more: Any) -> Dispatcher:
    """Send what is there and due, and end."""
    one = dispatcher(mom, partner, **more)
    run([one], drain=True)
    return one


@contextmanager
def dispatching(*ones: Dispatcher) -> Iterator[None]:
    """Dispatchers in this process, until the block ends, however it does."""
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()
    failed: list[BaseException] = []

    async def all_of_them() -> None:
        await asyncio.gather(*(one.run(stopping) for one in ones))

    def work() -> None:
        try:
            loop.run_until_complete(all_of_them())
        except BaseException as error:  # raised where the test sees it
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()
    if failed:
        raise failed[0]


# Programs, for tests.processes


def program(mom: Dsn, url: str, more: dict[str, Any]) -> None:
    """A dispatcher that runs until it is told to stop, or killed."""
    endpoint = Endpoint(url=url, subscription=SUBSCRIPTION, **more)
    run([Dispatcher("partner", endpoint, mom)])


def state(inbox: Dsn) -> str:
    with connect(inbox) as connection:
        found = fetch(connection, "SELECT state FROM saf.breaker")
    return str(found[0][0]) if found else "closed"


def let_probes_be_due(inbox: Dsn) -> None:
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.breaker SET next_probe_at = now() WHERE state = 'open'")


def let_lanes_be_due(inbox: Dsn) -> None:
    """But for those that a dispatcher is writing: it locks many, and so does this."""
    with connect(inbox) as connection:
        connection.execute(
            "UPDATE saf.backoff SET next_attempt_at = now() WHERE ctid = ANY (ARRAY("
            "SELECT ctid FROM saf.backoff WHERE NOT awaits_handler FOR UPDATE SKIP LOCKED))"
        )
