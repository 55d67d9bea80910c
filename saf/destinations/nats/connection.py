"""Connection to a NATS server: nats-py, driven from synchronous code.

nats-py is a client for asyncio. A `Connection` has an event loop of its own, which runs only while
one of its methods runs, and no longer than `saf.database.bounds.Bounds` allows. All answers arrive
at one inbox of the connection.

A `Connection` tries the hosts of its address in turn, and does not connect again after an error. It
raises nats-py's errors, `NoResponders`, or an OSError such as TimeoutError;
`saf.destinations.nats.server` translates them. A login file that is unusable is `Refused`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nats.aio.client import RawCredentials
from nats.aio.msg import Msg
from nats.errors import Error, StaleConnectionError

from saf.database import pinned
from saf.destinations.addresses import context_of, first_of
from saf.destinations.settings import client_needed, unusable

if TYPE_CHECKING:
    from nats.aio.client import Client

    from saf.destinations.nats import Nats

SEED = re.compile(r"\bS[A-Z2-7]{57}\b")
JWT = re.compile(r"-----BEGIN NATS USER JWT-----\s*(\S+)\s*-")
CLOSE_SECONDS = 1
LOOK_SECONDS = 1.0
"""Pause between checks that a connection whose answer is awaited is open."""
MOST_ASKED = 1_000
"""Most requests without an answer; a server drops all waiting requests if they exceed 10,000."""
PENDING_BYTES = 64 << 20
"""Most bytes that wait until a task of the client sends them."""

STATUS, NUMBER = b"NATS/1.0 ", b"\r\nNats-Sequence: "
"""Start of the headers of an answer of the server itself, and a header of each stored message."""

Answer = TypeVar("Answer")
Raw = tuple[bytes, bytes]
"""The headers and the body of a message, as received."""


class NoResponders(Exception):
    """A subject has no listener, not even a stream."""


class Message(NamedTuple):
    """A message for the server."""

    subject: str
    body: bytes = b""
    headers: dict[str, str] | None = None
    reply: str = ""


class Connection:
    """One connection; not thread-safe."""

    def __init__(self, what: str, settings: Nats) -> None:
        self._numbers = itertools.count()
        self._login = login_of(what, settings)
        first_of(settings.address.hosts, lambda host, port: self._open(host, port, settings))
        self._seconds = settings.bounds.statement_seconds

    def _open(self, host: str, port: int, settings: Nats) -> None:
        self._seconds = settings.bounds.network_seconds
        self._runner = asyncio.Runner()
        self._client: Client = pinned.nats_client(self._take, self._take_all)
        self._asked_for, self._subject, self._batch = "", b"", list[Raw]()
        try:
            self._run(self._connect(host, port, settings))
        except BaseException:
            self.close()
            raise

    async def _connect(self, host: str, port: int, settings: Nats) -> None:
        self._inbox = ""
        self._received = asyncio.Queue[Msg | Exception]()

        async def failed(error: Exception) -> None:
            if not self._inbox:  # the client would try the same host again
                raise error
            lost = ConnectionResetError("the server has closed the connection")
            self._received.put_nowait(lost if isinstance(error, StaleConnectionError) else error)

        async def closed() -> None:
            await failed(self._client.last_error or StaleConnectionError())

        secure = settings.address.tls
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        await self._client.connect(
            f"{'tls' if secure else 'nats'}://{at}",
            name="saf",
            allow_reconnect=False,
            connect_timeout=math.ceil(self._seconds),
            pending_size=PENDING_BYTES,
            tls=context_of(settings) if secure else None,
            error_cb=failed,
            closed_cb=closed,
            **self._login,
        )
        if not self._client.is_connected:  # something came before the PONG: nothing would be sent
            raise ConnectionResetError("the server has not completed its greeting")
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(
            f"{self._inbox}.*", cb=self._receive, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def _receive(self, message: Msg) -> None:
        self._received.put_nowait(message)

    def _run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        async def bounded() -> Answer:
            async with asyncio.timeout(self._seconds):
                return await work

        return self._runner.run(bounded())

    @property
    def version(self) -> str:
        """The server's version."""
        version = self._client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    @property
    def max_payload(self) -> int:
        """Largest message that the server accepts, including headers."""
        return self._client.max_payload

    def close(self) -> None:
        """Close the connection."""
        self._seconds = CLOSE_SECONDS
        if self._client.is_connected or self._client.is_connecting:
            with suppress(OSError, Error):
                self._run(self._client.close())
        pinned.abort_client(self._client)
        self._runner.close()

    def inbox(self) -> str:
        """Return a new subject for one answer."""
        return f"{self._inbox}.{next(self._numbers)}"

    def publish(self, messages: Iterable[Message]) -> None:
        """Send messages."""
        self._run(self._publish(messages))

    async def _publish(self, messages: Iterable[Message]) -> None:
        publish = self._client.publish
        for subject, body, headers, reply in messages:
            await publish(subject, body, reply, headers)
        await asyncio.sleep(0)  # a task of the client sends them

    def request(
        self, subject: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Msg:
        """Send a message, and return the answer."""
        (answer,) = self.requests([Message(subject, body, headers)])
        return answer

    def requests(self, asked: Sequence[Message]) -> list[Msg]:
        """Send messages, and return their answers."""
        parts = [asked[first : first + MOST_ASKED] for first in range(0, len(asked), MOST_ASKED)]
        return [answer for part in parts for answer in self._answered(part)]

    def _answered(self, asked: Sequence[Message]) -> list[Msg]:
        inboxes = [self.inbox() for _ in asked]
        self.publish(
            message._replace(reply=inbox) for message, inbox in zip(asked, inboxes, strict=True)
        )
        missing, answers = set(inboxes), dict[str, Msg]()
        while missing:
            answer = self.receive()
            if answer.subject in missing:
                missing.remove(answer.subject)
                answers[answer.subject] = answer
        return [
            of(message.subject, answers[inbox])
            for message, inbox in zip(asked, inboxes, strict=True)
        ]

    def answers(self, subject: str, body: bytes) -> Iterator[Msg]:
        """Send a message, and yield its answers without end."""
        inbox = self.inbox()
        self.publish([Message(subject, body, reply=inbox)])
        while True:
            answer = self.receive()
            if answer.subject == inbox:
                yield of(subject, answer)

    def ask_for_batch(self, subject: str, body: bytes) -> None:
        """Send a request for messages of a stream, which `batch` returns."""
        self._asked_for = subject
        self._subject, self._batch = self.inbox().encode(), []
        self.publish([Message(subject, body, reply=self._subject.decode())])

    def batch(self) -> tuple[list[Raw], Msg]:
        """Return the messages that were requested, and the answer that ends them.

        The client reads no headers of these messages: that would take most of the time.
        """
        inbox = self._subject.decode()
        while (answer := self.receive()).subject != inbox:
            pass
        self._subject, messages = b"", self._batch
        return messages, of(self._asked_for, answer)

    def _take(self, subject: bytes, head: bytes, body: bytes) -> bool:
        """Keep a message of the batch that is awaited; return False for any other message."""
        if subject != self._subject or not head or (head.startswith(STATUS) and NUMBER not in head):
            return False
        self._batch.append((head, body))
        return True

    def _take_all(self, received: bytearray) -> bool:
        """Keep the messages of the batch that is awaited, and remove them from what was received.

        Return True if the rest is the beginning of another message of the batch. Any other rest is
        the client's, which offers further messages to `_take`.
        """
        if not self._subject:
            return False
        begin, at, waits = b"HMSG " + self._subject + b" ", 0, False
        while received.startswith(begin, at):
            line = received.find(b"\r\n", at)
            if waits := line < 0:
                break
            head = line + 2
            body, end = (head + int(size) for size in received[at:line].split()[-2:])
            if waits := len(received) < end + 2:
                break
            if not self._take(self._subject, bytes(received[head:body]), bytes(received[body:end])):
                break
            at = end + 2
        del received[:at]
        return waits

    def receive(self) -> Msg:
        """Wait for the next message."""
        waiting = self._received
        answer = waiting.get_nowait() if waiting.qsize() else self._run(self._next())
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _next(self) -> Msg | Exception:
        """Return the next message, or the error that has ended the connection.

        The client tells nobody of an end if it meets an error while it closes the connection.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    return await self._received.get()
            if self._client.is_closed:
                return ConnectionResetError("the server has closed the connection")


def status(message: Msg) -> str:
    """Return the status code if the server itself has sent the message; otherwise empty."""
    return (message.headers or {}).get("Status", "")


def of(subject: str, answer: Msg) -> Msg:
    """Return an answer from a subject.

    Raises:
        NoResponders: the server itself has answered, because the subject has no listener.
    """
    if status(answer) == "503":
        raise NoResponders(subject)
    return answer


def login_of(what: str, settings: Nats) -> dict[str, Any]:
    """Return nats-py's options for the login.

    Raises:
        Refused: a file cannot be read, or contains no key.
    """
    if settings.username is not None:
        secret = settings.password.get_secret_value() if settings.password else ""
        return {"user": settings.username, "password": secret}
    if settings.token is not None:
        return {"token": settings.token.get_secret_value()}
    file = settings.nkey_file or settings.creds_file
    if file is None:
        return {}
    text = _text(what, file)
    seed = SEED.search(text)
    if seed is None or not _is_seed(what, seed[0]):
        raise unusable(what, f"{file} has no seed of an nkey", "name a file that has one")
    if settings.nkey_file is not None:
        return {"nkeys_seed_str": seed[0]}
    if JWT.search(text) is None:
        raise unusable(what, f"{file} has no JWT of a user", "name a file of credentials")
    return {"user_credentials": RawCredentials(text)}


def _is_seed(what: str, seed: str) -> bool:
    with client_needed(what, "nats"):
        nkeys = import_module("nkeys")
    try:
        nkeys.from_seed(bytearray(seed.encode())).wipe()
    except (ValueError, nkeys.NkeysError):
        return False
    return True


def _text(what: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unusable(what, f"{file} cannot be read ({error})", "make it readable") from None
