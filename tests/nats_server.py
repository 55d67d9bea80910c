"""A NATS server for a test: on a port and in a folder of its own, killed for real."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from nats.aio.msg import Msg
from nats.errors import Error

from saf.database.bounds import Bounds
from saf.destinations.nats import Nats
from saf.destinations.nats.connection import Connection, NoResponders, status
from saf.destinations.nats.server import answered
from saf.testing.source_conformance import Written
from saf_demo import servers
from saf_demo.servers import free_port
from tests.killable import Killable
from tests.needed import installed
from tests.waits import until

MAX_PAYLOAD = 32 << 20
BOUNDS = Bounds(statement_seconds=5)


@dataclass(kw_only=True)
class NatsServer(Killable):
    """One server. What it holds is in its folder, so that it can be started again."""

    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    port: int = 0

    @property
    def address(self) -> str:
        """Where it is, as saf.toml says it."""
        return f"nats://127.0.0.1:{self.port}"

    def start(self, *, wait: bool = True) -> None:
        """Start it, and wait until it answers."""
        self.port = self.port or free_port()
        given = {"max_payload": str(MAX_PAYLOAD)} | self.settings
        with installed():
            command = servers.nats(self.folder, self.port, given)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        if wait:
            until(self.answers, seconds=30)

    def answers(self) -> bool:
        """Whether it answers, and has read its data."""
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            self.ask("$JS.API.INFO")
        except (OSError, NoResponders) as error:
            return isinstance(error, ssl.SSLError)
        except Error:
            return True
        return True

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """A connection to it."""
        with closing(Connection("test", Nats(server=self.address).bounded(BOUNDS))) as one:
            yield one

    def ask(self, subject: str, **said: Any) -> dict[str, Any]:
        """The answer of JetStream."""
        with self.connected() as one:
            return answered(one.request(subject, json.dumps(said).encode() if said else b""))

    def publish(self, subject: str, messages: Iterable[Written]) -> None:
        """Publish messages with any bytes in their headers, which the usual client cannot."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as raw:
            raw.sendall(b'CONNECT {"headers": true, "verbose": false}\r\n')
            for one in messages:
                lines = (name.encode() + b": " + value for name, value in one.headers)
                head = b"".join(line + b"\r\n" for line in (b"NATS/1.0", *lines, b""))
                size, whole = len(head), len(head) + len(one.body)
                raw.sendall(b"HPUB %b %d %d\r\n" % (subject.encode(), size, whole))
                raw.sendall(head + one.body + b"\r\n")
            raw.sendall(b"PING\r\n")
            answer = b""
            while b"PONG" not in answer:
                answer += raw.recv(4096)

    def empty(self) -> None:
        """Let it lose everything."""
        for name in self.ask("$JS.API.STREAM.NAMES")["streams"] or ():
            self.ask(f"$JS.API.STREAM.DELETE.{name}")

    def messages(self, stream: str = "SAF") -> list[Msg]:
        """The messages of a stream that are no marks, in their order."""
        if stream not in (self.ask("$JS.API.STREAM.NAMES")["streams"] or ()):
            return []
        found: list[Msg] = []
        with self.connected() as one:
            more, first = True, 1
            while more:
                more = False
                asked = json.dumps({"seq": first, "batch": 1000}).encode()
                for answer in one.answers(f"$JS.API.DIRECT.GET.{stream}", asked):
                    said = answer.headers or {}
                    if status(answer):
                        more = int(said.get("Nats-Num-Pending", 0)) > 0
                        break
                    first = int(said["Nats-Sequence"]) + 1
                    if not said["Nats-Subject"].startswith("saf-marks."):
                        found.append(answer)
        return found

    def entries(self, topic: str = "billing") -> list[Mapping[str, str]]:
        """The headers of a topic's messages, and the ``body``, in their order."""
        return [
            {name: unquote(value) for name, value in said.items()} | {"body": one.data.decode()}
            for one in self.messages()
            if (said := one.headers or {})["Nats-Subject"] == f"saf.{topic}"
        ]


@contextmanager
def nats_server(folder: Path, **settings: str) -> Iterator[NatsServer]:
    """A server with these settings, besides those that every one has."""
    folder.mkdir(parents=True, exist_ok=True)
    server = NatsServer(folder=folder, settings=settings)
    server.start()
    try:
        yield server
    finally:
        server.kill()
