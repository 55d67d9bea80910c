"""Connection to a NATS server: the client protocol, limited to a destination's needs.

The protocol is lines of text: INFO, CONNECT, PUB, HPUB, SUB, MSG, HMSG, PING, PONG, -ERR. The usual
client builds each message separately, in Python. A destination has the bytes of a thousand messages
at a time, and waits for one answer. All answers arrive at one inbox of this connection.

A server may require a login, which is a part of CONNECT: see `said`. A server that supports nkeys
sends a nonce, which the client signs with Ed25519.

A `Connection` tries the hosts of its address in turn, and does not connect again after an error.
It raises `NatsError` or `NoResponders`, or an OSError such as TimeoutError;
`saf.destinations.nats.server` translates them. A login file that is unusable is `Refused`.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from saf.destinations.addresses import connect, context_of, first_of
from saf.destinations.mapping import texts_of
from saf.destinations.queues import client_needed, unusable

if TYPE_CHECKING:
    from saf.destinations.nats import Nats

# A seed is base 32: two bytes for its type, 32 bytes of the key, and a checksum of two bytes.
SEED = re.compile(r"\bS[A-Z2-7]{57}\b")
JWT = re.compile(r"-----BEGIN NATS USER JWT-----\s*(\S+)\s*-")
USER = 20 << 3
"""First byte of a user's public key, which makes its text begin with U."""
VERSION_LINE = b"NATS/1.0"


class NatsError(Exception):
    """The server has sent -ERR; the text is the protocol's."""


class NoResponders(Exception):
    """A subject has no listener, not even a stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A message from the server."""

    subject: str
    head: bytes
    """Raw headers; empty if the message has none."""
    body: bytes

    @property
    def status(self) -> str:
        """Status code if the server itself has sent the message, such as 503; otherwise empty."""
        return self.head[len(VERSION_LINE) :].split(b"\r\n", 1)[0].strip().decode()[:3]

    def headers(self) -> dict[str, str]:
        """Return the headers that are texts, with one value each."""
        lines = self.head.split(b"\r\n")[1:]
        pairs = (line.partition(b":") for line in lines if line)
        return texts_of((name, value.strip()) for name, _, value in pairs)

    def of(self, subject: str) -> Received:
        """Return the message, as the answer from a subject.

        Raises:
            NoResponders: the server itself has answered, because the subject has no listener.
        """
        if self.status == "503":
            raise NoResponders(subject)
        return self


class Connection:
    """One connection; not thread-safe."""

    def __init__(self, name: str, settings: Nats) -> None:
        hosts = settings.address.hosts
        first_of(hosts, lambda host, port: self._open(host, port, name, settings))

    def _open(self, host: str, port: int, name: str, settings: Nats) -> None:
        self.host = host
        self._socket = connect(host, port, settings.bounds.network_seconds)
        self._file = self._socket.makefile("rb")
        try:
            self._greet(name, settings)
        except BaseException:
            self.close()
            raise

    def _greet(self, name: str, settings: Nats) -> None:
        self.info: dict[str, Any] = json.loads(self._line("INFO"))
        if settings.address.tls or self.info.get("tls_required"):
            self._file.close()
            context = context_of(settings)
            self._socket = context.wrap_socket(self._socket, server_hostname=self.host)
            self._file = self._socket.makefile("rb")
        options = {
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
            "protocol": 1,
            "lang": "python",
            "version": "saf",
            "name": "saf",
            **said(name, settings, self.info.get("nonce", "")),
        }
        self._inbox = f"_INBOX.{uuid4().hex}"
        self._numbers = itertools.count()
        self.write(
            b"CONNECT %b\r\nSUB %b.* 1\r\nPING\r\n"
            % (json.dumps(options).encode(), self._inbox.encode())
        )
        self._line("PONG")
        self._socket.settimeout(settings.bounds.statement_seconds)

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._socket.close()

    def write(self, data: bytes | memoryview) -> None:
        """Send bytes."""
        self._socket.sendall(data)

    def inbox(self) -> str:
        """Return a new subject for one answer."""
        return f"{self._inbox}.{next(self._numbers)}"

    def request(
        self, subject: str, body: bytes = b"", headers: Mapping[str, object] | None = None
    ) -> Received:
        """Send a message, and return the answer."""
        (answer,) = self.requests([(subject, body, headers)])
        return answer

    def requests(
        self, asked: list[tuple[str, bytes, Mapping[str, object] | None]]
    ) -> list[Received]:
        """Send messages, and return their answers."""
        inboxes = [self.inbox() for _ in asked]
        self.write(
            b"".join(
                published(subject, body, headers, inbox)
                for (subject, body, headers), inbox in zip(asked, inboxes, strict=True)
            )
        )
        answers: dict[str, Received] = {}
        while len(answers) < len(asked):
            answer = self.receive()
            if answer.subject in inboxes:
                answers[answer.subject] = answer
        return [
            answers[inbox].of(subject)
            for inbox, (subject, _, _) in zip(inboxes, asked, strict=True)
        ]

    def answers(self, subject: str, body: bytes) -> Iterator[Received]:
        """Send a message, and yield its answers without end."""
        inbox = self.inbox()
        self.write(published(subject, body, None, inbox))
        while True:
            answer = self.receive()
            if answer.subject == inbox:
                yield answer.of(subject)

    def receive(self) -> Received:
        """Wait for the next message."""
        words = self._line("MSG", "HMSG").split()
        size = int(words[-1])
        data = self._file.read(size + 2)
        if len(data) < size + 2:
            raise ConnectionResetError("the server has closed the connection")
        head = int(words[-2]) if self._headed else 0
        return Received(subject=words[0], head=data[:head], body=data[head:size])

    def _line(self, *expected: str) -> str:
        """Return the rest of the next line that begins with a wanted word; answer PINGs.

        Raises:
            TimeoutError: nothing else has arrived within the socket's timeout, or longer.
        """
        until = time.monotonic() + (self._socket.gettimeout() or math.inf)
        while True:
            line = self._file.readline()
            if not line.endswith(b"\n"):
                raise ConnectionResetError("the server has closed the connection")
            word, _, rest = line.decode().strip().partition(" ")
            word = word.upper()
            if word == "-ERR":
                raise NatsError(rest.strip("'"))
            if word == "PING":
                self.write(b"PONG\r\n")
                if time.monotonic() > until:
                    raise TimeoutError("the server accepts connections, and does not answer")
            if word in expected:
                self._headed = word == "HMSG"
                return rest


def published(
    subject: str, body: bytes, headers: Mapping[str, object] | None = None, reply: str = ""
) -> bytes:
    """Return a message in the server's format."""
    target = f"{subject} {reply}" if reply else subject
    if headers is None:
        return b"PUB %b %d\r\n%b\r\n" % (target.encode(), len(body), body)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    head = b"%b\r\n%b\r\n" % (VERSION_LINE, lines)
    size = len(head) + len(body)
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (target.encode(), len(head), size, head, body)


def said(name: str, settings: Nats, nonce: str) -> dict[str, Any]:
    """Return the part of CONNECT that is the login.

    Raises:
        Refused: a file cannot be read, or contains no key.
    """
    if settings.username is not None:
        secret = settings.password.get_secret_value() if settings.password else ""
        return {"user": settings.username, "pass": secret}
    if settings.token is not None:
        return {"auth_token": settings.token.get_secret_value()}
    file = settings.nkey_file or settings.creds_file
    if file is None:
        return {}
    destination = f"destination {name!r}"
    text = _text(destination, file)
    seed = SEED.search(text)
    if seed is None:
        raise unusable(destination, f"{file} has no seed of an nkey", "name a file that has one")
    public, signature = _signed(name, seed[0], nonce)
    if settings.nkey_file is not None:
        return {"nkey": public, "sig": signature}
    jwt = JWT.search(text)
    if jwt is None:
        raise unusable(destination, f"{file} has no JWT of a user", "name a file of credentials")
    return {"jwt": jwt[1], "sig": signature}


def _text(destination: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unusable(
            destination, f"{file} cannot be read ({error})", "make it readable"
        ) from None


def _signed(name: str, seed: str, nonce: str) -> tuple[str, str]:
    """Return the public key, and the signature of a nonce, as texts."""
    with client_needed(name, "nats"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    key = Ed25519PrivateKey.from_private_bytes(base64.b32decode(seed + "======")[2:34])
    public = bytes([USER]) + key.public_key().public_bytes_raw()
    public += binascii.crc_hqx(public, 0).to_bytes(2, "little")
    signature = base64.urlsafe_b64encode(key.sign(nonce.encode())).rstrip(b"=")
    return base64.b32encode(public).rstrip(b"=").decode(), signature.decode()
