"""A RabbitMQ server for a test: with ports, a folder and a port mapper of its own, killed."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pika
from pydantic import SecretStr

from saf.database.bounds import Bounds
from saf.destinations.rabbitmq_stream import RabbitmqStream, amqp
from saf.destinations.rabbitmq_stream.connection import (
    Command,
    Connection,
    StreamError,
    frame,
    text,
)
from saf.destinations.rabbitmq_stream.streams import entries
from saf.testing.source_conformance import Written
from saf_demo import servers
from saf_demo.servers import free_port
from tests.killable import Restartable
from tests.needed import installed
from tests.waits import until

BOUNDS = Bounds(statement_seconds=30)
TOPICS = ("billing", "shipping", "prices", "all")
SETTINGS = {
    "stream.frame_max": str(128 << 20),
    "disk_free_limit.absolute": "1MB",
    "vm_memory_high_watermark.relative": "0.9",
}
CONTROL = "/usr/lib/rabbitmq/bin/rabbitmqctl"
ERLANG = "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none"


@dataclass(kw_only=True)
class RabbitmqServer(Restartable):
    """One server. What it holds is in its folder, so that it can be started again."""

    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    port: int = 0
    """Where it takes streams."""
    queues: int = 0
    """Where it takes what uses queues."""
    login: tuple[str, str] = ("guest", "guest")
    """Who the test is."""
    further: set[str] = field(default_factory=set)
    """Queues that tests have made, beside those of the topics."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where its streams are, as saf.toml says it."""
        return f"rabbitmq-stream://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.port, self.queues = self.port or free_port(), self.queues or free_port()
        fresh, mapper = not (self.folder / "data").exists(), free_port()
        given = SETTINGS | self.settings
        with installed():
            command = servers.rabbitmq(
                self.folder, self.queues, self.port, mapper=mapper, erlang=ERLANG, settings=given
            )
        with (self.folder / "output").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        until(self.answers, seconds=120)
        if fresh:
            self._settle(mapper)

    def _settle(self, mapper: int) -> None:
        """Let its disk have who looks after its streams, or none is there again after a kill.

        The server makes that one with its first stream, and writes his name within minutes.
        """
        with self.channel() as channel:
            channel.queue_declare("first", durable=True, arguments={"x-queue-type": "stream"})
            channel.queue_delete("first")
        written = "[ok = dets:sync(Table) || Table <- dets:all()], written."
        by = [CONTROL, "-n", servers.NODE, "--erlang-cookie", servers.COOKIE, "eval", written]
        env = {"HOME": str(self.folder), "ERL_EPMD_PORT": str(mapper)}
        done = subprocess.run(
            by, check=False, env=os.environ | env, capture_output=True, text=True, timeout=120
        )
        assert done.stdout.strip() == "written", done.stdout + done.stderr

    def answers(self) -> bool:
        """Whether it answers, and has read its streams."""
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "output").read_text()
        try:
            with self.connected() as one:
                for stream in one.replicas(self.streams()):
                    one.declare({0: ("test", stream)})
                    one.forget([0])
            for name, where in {**self.settings, "listeners": f":{self.queues}"}.items():
                if "listeners" in name:
                    port = int(where.rpartition(":")[2])
                    socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except (StreamError, OSError):  # also if it has not read its users yet
            return False
        return True

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """A connection to its streams."""
        username, password = self.login
        login = {"username": username, "password": SecretStr(password)}
        settings = RabbitmqStream.model_validate({"server": self.address, **login})
        with closing(Connection(settings.bounded(BOUNDS))) as one:
            yield one

    def streams(self) -> list[str]:
        """The names of its streams, by their folders, which say ``_`` for a dot."""
        folders = (self.folder / "data" / servers.NODE / "stream").glob("__*")
        names = [one.name.removeprefix("__").rpartition("_")[0] for one in folders]
        return [name.replace("saf-marks_", "saf-marks.") for name in names]

    @contextmanager
    def channel(self) -> Iterator[Any]:
        """A channel for its queues, by the usual client."""
        login = pika.PlainCredentials(*self.login)
        here = pika.ConnectionParameters("127.0.0.1", self.queues, credentials=login, heartbeat=0)
        with closing(pika.BlockingConnection(here)) as connection:
            yield connection.channel()

    def publish(self, stream: str, messages: Sequence[bytes], **arguments: str) -> None:
        """Add entries to a stream, which is created if it does not exist."""
        with self.connected() as one:
            if stream not in one.replicas([stream]):
                limits = {name.replace("_", "-"): value for name, value in arguments.items()}
                one.create(stream, limits)
            one.declare({0: ("", stream)})
            for first in range(0, len(messages), 1_000):
                part = messages[first : first + 1_000]
                entries = (struct.pack(">QI", 0, len(each)) + each for each in part)
                head = struct.pack(">BI", 0, len(part))
                one.send(frame(Command.PUBLISH, head + b"".join(entries)))
            one.confirm(len(messages))

    def delete(self, stream: str) -> None:
        """Delete a stream."""
        with self.connected() as one:
            one.ask(Command.DELETE, text(stream))

    def empty(self) -> None:
        """Let it lose everything."""
        with self.channel() as channel:
            for name in {*self.streams(), *TOPICS, *self.further}:
                channel.queue_delete(name)

    def messages(self, stream: str) -> list[tuple[dict[str, str], bytes]]:
        """The headers and bodies of a stream's messages, in their order."""
        with self.connected() as one:
            if stream not in one.replicas([stream]):
                return []
            return [amqp.read(message) for _, message in entries(one, stream)]

    def entries(self, topic: str = "billing") -> list[Mapping[str, str]]:
        """The headers of a topic's messages, and the ``body``, in their order."""
        return [headers | {"body": body.decode()} for headers, body in self.messages(topic)]

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill it, and its port mapper."""
        if self.process is not None:
            for one in (signal.SIGCONT, how):
                os.killpg(self.process.pid, one)
            self.process.wait(timeout=60)
            self.process = None

    def freeze(self) -> None:
        """Stop it where it is: it keeps its connections, and does nothing."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGCONT)


@dataclass(kw_only=True)
class Queues:
    """A server's queues, of which the topics' are there."""

    server: RabbitmqServer
    topics: tuple[str, ...] = TOPICS

    @property
    def port(self) -> int:
        """Where it takes messages for queues."""
        return self.server.queues

    @property
    def address(self) -> str:
        """Where it is, as saf.toml says it."""
        return f"amqp://127.0.0.1:{self.port}"

    def channel(self) -> AbstractContextManager[Any]:
        """A channel of the usual client."""
        return self.server.channel()

    def empty(self) -> None:
        """Let it have all queues, and nothing in them."""
        self.server.empty()
        with self.channel() as channel:
            for topic in self.topics:
                channel.queue_delete(topic)
                channel.queue_declare(topic, durable=True)

    def declare(self, queue: str) -> None:
        """Create a queue, unless it exists; `empty` deletes it."""
        self.server.further.add(queue)
        with self.channel() as channel:
            channel.queue_declare(queue, durable=True)

    def publish(self, queue: str, messages: Sequence[Written]) -> None:
        """Add persistent messages, with the key as the id; the queue is created if it is gone."""
        self.declare(queue)
        with self.channel() as channel:
            channel.confirm_delivery()
            for one in messages:
                headers = dict(one.headers)
                given = {"delivery_mode": 2, "headers": headers, "message_id": one.key or None}
                channel.basic_publish("", queue, one.body, pika.BasicProperties(**given))

    def delete(self, queue: str) -> None:
        """Delete a queue."""
        with self.channel() as channel:
            channel.queue_delete(queue)

    def waiting(self, queue: str) -> int:
        """How many messages wait in a queue, without those that are not acknowledged yet."""
        with self.channel() as channel:
            return int(channel.queue_declare(queue, passive=True).method.message_count)

    def messages(self, queue: str) -> list[tuple[Any, bytes]]:
        """The properties and bodies of a queue's messages, which stay there."""
        found: list[tuple[Any, bytes]] = []
        with self.channel() as channel:
            while True:
                method, properties, body = channel.basic_get(queue)
                if method is None:
                    return found
                found.append((properties, body))

    def entries(self, topic: str = "billing") -> list[Mapping[str, str]]:
        """The headers of a topic's messages, and the ``body``, in their order."""
        return [
            {**properties.headers, "body": body.decode()}
            for properties, body in self.messages(topic)
        ]

    def start(self) -> None:
        """Start it with its data; the first time, with the queues."""
        new = not (self.server.folder / "data").exists()
        self.server.start()
        if new:
            self.empty()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.server.kill()

    def freeze(self) -> None:
        """Stop it where it is."""
        self.server.freeze()

    def thaw(self) -> None:
        """Let it go on."""
        self.server.thaw()

    def down(self) -> AbstractContextManager[None]:
        """Killed, and started again with its data."""
        return self.server.down()


@contextmanager
def rabbitmq_server(folder: Path, **settings: Any) -> Iterator[RabbitmqServer]:
    """A server with these settings, besides those that every one has."""
    folder.mkdir(parents=True, exist_ok=True)
    server = RabbitmqServer(folder=folder, settings=settings)
    try:
        server.start()
        yield server
    finally:
        server.kill()
