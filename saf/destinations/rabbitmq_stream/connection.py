"""A connection to a RabbitMQ server's streams, limited to what a destination needs.

The usual client builds each message separately, in Python. A destination has the bytes of thousands
of messages at a time, and only counts confirmations. Any node of a cluster accepts messages, and
passes them on.

A frame is a size, a command, a version, and the command's own fields. Numbers are big-endian; a
text is its size and its UTF-8. The codes of answers are the protocol's own.
"""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Protocol

from saf.destinations.addresses import connect, context_of, first_of

if TYPE_CHECKING:
    from saf.destinations.rabbitmq_stream import RabbitmqStream

VERSION = 1
ANSWER = 0x8000
"""Bit that an answer adds to the number of its command."""
OK, NO_STREAM, STREAM_THERE, NO_OFFSET = 1, 2, 5, 19
LOGINS = (8, 9, 11, 12)
DENIED, NOT_MET = 16, 17
CODES = {
    2: "no such stream",
    6: "the stream is not available now",
    7: "this way to log in is not supported",
    8: "the login is refused",
    9: "the login is refused",
    11: "the login is refused: this user may only come from the server's own machine",
    12: "the login is refused: this user has no access to the virtual host",
    14: "a frame is too large",
    15: "the server has an internal error",
    16: "the access is refused",
    17: "a condition is not met",
    18: "no such publisher",
}
"""Meaning of the codes of answers."""

FIRST, LAST = struct.pack(">H", 1), struct.pack(">H", 2)
"""Positions to read from: the beginning of a stream, and its last chunk."""

LARGEST = 256 << 20
"""Largest frame that this side accepts, in bytes; the server's limit is lower."""
DATA = b"\0\x53\x75\xb0"
"""Start of a body in AMQP 1.0; its size follows."""
BATCH = ">BHII"
"""Head of a batch of messages: kind, messages, size without compression, size."""
COMPRESSIONS = {1: "gzip", 3: "lz4", 4: "zstd"}
"""Compressions of batches that can be read, by number."""
CODECS = {2: "snappy"}
"""Other compressions, by number."""
CREDIT = 20
"""Chunks of a stream that the server may send ahead of reading."""


class Command(IntEnum):
    """Command of a frame."""

    DECLARE_PUBLISHER = 1
    PUBLISH = 2
    CONFIRM = 3
    PUBLISH_ERROR = 4
    SEQUENCE = 5
    DELETE_PUBLISHER = 6
    SUBSCRIBE = 7
    DELIVER = 8
    MORE = 9
    STORE_OFFSET = 10
    OFFSET = 11
    UNSUBSCRIBE = 12
    CREATE = 13
    DELETE = 14
    METADATA = 15
    METADATA_UPDATE = 16
    PROPERTIES = 17
    HANDSHAKE = 18
    AUTHENTICATE = 19
    TUNE = 20
    OPEN = 21
    CLOSE = 22
    HEARTBEAT = 23


class StreamError(Exception):
    """The server has answered with an error code."""

    def __init__(self, code: int, about: str) -> None:
        super().__init__(f"{about}: {CODES.get(code, f'error {code}')}")
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Consecutive entries of a stream."""

    first: int
    """Number of the first entry."""
    entries: Sequence[bytes]
    milliseconds: int = 0
    """Time at which the server wrote it, in milliseconds since 1970."""
    problems: Mapping[int, str] = field(default_factory=dict)
    """Why some entries cannot be read, by their places in ``entries``; they are empty there."""


class Answer:
    """Rest of a frame, read from front to back."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def number(self, form: str) -> int:
        """Read a number."""
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def text(self) -> str:
        """Read a text."""
        size = self.number(">h")
        first = self._at
        self._at += max(size, 0)
        return self._data[first : self._at].decode()

    def pairs(self) -> dict[str, str]:
        """Read pairs of texts."""
        return {self.text(): self.text() for _ in range(self.number(">I"))}


class Following(Protocol):
    """Function that returns the next chunk of a stream that is being read."""

    def __call__(self, *, wait: bool = True) -> Chunk | None:
        """Wait for the next chunk; without ``wait``, return None at the end of the stream."""


class Connection:
    """One connection; not thread-safe."""

    def __init__(self, settings: RabbitmqStream, leads: str | None = None) -> None:
        """Connect to the first host that answers, and is the leader of the stream ``leads``."""
        self._settings = settings
        self._leads = leads
        first_of(settings.address.hosts, self._open)

    def _open(self, host: str, port: int) -> None:
        settings, self.host = self._settings, host
        self._socket = connect(host, port, settings.bounds.network_seconds)
        self._numbers = itertools.count(1)
        self._read = bytearray()
        self._chunks: dict[int, deque[Chunk]] = defaultdict(deque)
        """Delivered chunks by subscription."""
        self.confirmed = 0
        """Number of messages that the server has confirmed so far."""
        try:
            if settings.address.tls:
                context = context_of(settings)
                self._socket = context.wrap_socket(self._socket, server_hostname=host)
            self._greet(settings)
            if self._leads is not None:
                self._check_leader(self._leads)
        except BaseException:
            self.close()
            raise

    def _greet(self, settings: RabbitmqStream) -> None:
        answer = self.ask(Command.PROPERTIES, pairs({"product": "saf", "platform": "Python"}))
        self.server = answer.pairs()
        self.ask(Command.HANDSHAKE)
        login = f"\0{settings.username}\0{settings.secret}".encode()
        self.ask(Command.AUTHENTICATE, text("PLAIN") + struct.pack(">I", len(login)) + login)
        self._tuned = False
        while not self._tuned:
            self._receive()
        host = settings.address.virtual_host
        self.is_at = self.ask(Command.OPEN, text(host), about=f"virtual host {host!r}").pairs()
        """The server's own address, as ``advertised_host`` and ``advertised_port``."""
        self._socket.settimeout(settings.bounds.statement_seconds)

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self._socket.close()

    # Requests

    def ask(self, command: Command, body: bytes = b"", *, about: str = "the connection") -> Answer:
        """Send a command, and return the answer.

        Raises:
            StreamError: the server did not execute the command.
        """
        ((code, answer),) = self.ask_all(command, [body])
        if code != OK:
            raise StreamError(code, about)
        return answer

    def ask_all(self, command: Command, bodies: Sequence[bytes]) -> list[tuple[int, Answer]]:
        """Send commands, and return the code and the rest of each answer."""
        numbers = [next(self._numbers) for _ in bodies]
        self.send(
            b"".join(
                frame(command, struct.pack(">I", number) + body)
                for number, body in zip(numbers, bodies, strict=True)
            )
        )
        answers: dict[int, Answer] = {}
        while len(answers) < len(bodies):
            got, answer = self._receive()
            if got == command | ANSWER:
                answers[answer.number(">I")] = answer
        coded = command is not Command.METADATA
        return [(answers[key].number(">H") if coded else OK, answers[key]) for key in numbers]

    def create(self, stream: str, arguments: Mapping[str, str]) -> None:
        """Create a stream, unless it exists."""
        try:
            self.ask(Command.CREATE, text(stream) + pairs(arguments), about=f"stream {stream!r}")
        except StreamError as error:
            if error.code != STREAM_THERE:
                raise

    def replicas(self, streams: Sequence[str]) -> dict[str, int]:
        """Return the number of servers that keep each stream, for existing streams."""
        return {name: count for name, (_, count) in self._kept(streams).items()}

    def _kept(self, streams: Sequence[str]) -> dict[str, tuple[tuple[str, str] | None, int]]:
        """Return the leader's address, and the number of servers, of each stream that exists."""
        body = struct.pack(">I", len(streams)) + b"".join(map(text, streams))
        answer = self.ask(Command.METADATA, body)
        servers = {
            answer.number(">H"): (answer.text(), str(answer.number(">I")))
            for _ in range(answer.number(">I"))
        }
        kept = {}
        for _ in range(answer.number(">I")):
            name, code, leader = answer.text(), answer.number(">H"), answer.number(">H")
            count = answer.number(">I")
            for _ in range(count):
                answer.number(">H")
            if code == OK:
                kept[name] = servers.get(leader), 1 + count
            elif code != NO_STREAM:
                raise StreamError(code, f"stream {name!r}")
        return kept

    def _check_leader(self, stream: str) -> None:
        """Raise if this server is not the leader of a stream, and so may lack messages of it."""
        leader, _ = self._kept([stream]).get(stream, (None, 0))
        here = self.is_at.get("advertised_host", ""), self.is_at.get("advertised_port", "")
        if leader is not None and leader != here:
            raise ConnectionRefusedError(
                f"{self.host} is not the leader of stream {stream!r}, {leader[0]} is: name all "
                "servers of the cluster in saf.toml"
            )

    def declare(self, publishers: Mapping[int, tuple[str, str]]) -> dict[int, int]:
        """Declare publishers, a reference and a stream for each number.

        Return the last publishing id that the server knows of each; 0 if none.
        """
        texts = [text(reference) + text(stream) for reference, stream in publishers.values()]
        bodies = [
            struct.pack(">B", one) + name for one, name in zip(publishers, texts, strict=True)
        ]
        for (code, _), (_, stream) in zip(
            self.ask_all(Command.DECLARE_PUBLISHER, bodies), publishers.values(), strict=True
        ):
            if code != OK:
                raise StreamError(code, f"stream {stream!r}")
        names = [one for one in publishers.values() if one[0]]
        last = dict(zip(names, self.sequences(names), strict=True))
        return {number: last.get(one, 0) for number, one in publishers.items()}

    def sequences(self, publishers: Iterable[tuple[str, str]]) -> list[int]:
        """Return the last publishing id of each publisher; 0 if none."""
        texts = [text(reference) + text(stream) for reference, stream in publishers]
        answers = self.ask_all(Command.SEQUENCE, texts)
        return [answer.number(">Q") if code == OK else 0 for code, answer in answers]

    def forget(self, publishers: Sequence[int]) -> None:
        """Free the numbers of publishers."""
        self.ask_all(Command.DELETE_PUBLISHER, [struct.pack(">B", number) for number in publishers])

    def offset(self, reference: str, stream: str) -> int | None:
        """Return the number stored beside a stream; None if there is none."""
        ((code, answer),) = self.ask_all(Command.OFFSET, [text(reference) + text(stream)])
        if code == NO_OFFSET:
            return None
        if code != OK:
            raise StreamError(code, f"stream {stream!r}")
        return answer.number(">Q")

    def keep_offset(self, reference: str, stream: str, number: int) -> None:
        """Store a number beside a stream; the server does not answer."""
        body = text(reference) + text(stream) + struct.pack(">Q", number)
        self.send(frame(Command.STORE_OFFSET, body))

    # Publishing

    def send(self, data: bytes | memoryview) -> None:
        """Send bytes."""
        self._socket.sendall(data)

    def confirm(self, count: int) -> None:
        """Wait until the server has confirmed ``count`` messages over the connection's lifetime.

        Raises:
            StreamError: the server rejects a message.
        """
        while self.confirmed < count:
            self._receive()

    def add(self, publisher: int, text: str, *, number: int = 0) -> None:
        """Add an entry of text, with a publishing id; durable on return."""
        body, before = text.encode(), self.confirmed
        entry = DATA + struct.pack(">I", len(body)) + body
        head = struct.pack(">BIQI", publisher, 1, number, len(entry))
        self.send(frame(Command.PUBLISH, head + entry))
        self.confirm(before + 1)

    # Reading

    @contextmanager
    def chunks(
        self, stream: str, where: bytes = FIRST, *, credit: int = CREDIT
    ) -> Iterator[Following]:
        """Read a stream from a position; yield a function that returns the next chunk."""
        yield self.follow(1, stream, where, credit=credit)
        self.leave(1)

    def follow(self, number: int, stream: str, where: bytes, *, credit: int) -> Following:
        """Begin to read a stream from a position; return a function that returns the next chunk.

        Args:
            number: the number of the subscription, until `leave`.
            stream: the stream.
            where: the position.
            credit: chunks that the server may send ahead of reading.
        """
        head = struct.pack(">B", number)
        body = head + text(stream) + where + struct.pack(">H", credit) + pairs({})
        self._chunks[number].clear()
        self.ask(Command.SUBSCRIBE, body, about=f"stream {stream!r}")
        return partial(self._next_chunk, number)

    def leave(self, number: int) -> None:
        """End a subscription."""
        self.ask(Command.UNSUBSCRIBE, struct.pack(">B", number), about="a subscription")
        self._chunks[number].clear()

    def _next_chunk(self, number: int, *, wait: bool = True) -> Chunk | None:
        chunks = self._chunks[number]
        if not wait and not chunks:
            self.replicas([])  # the server sends all chunks before it answers
            if not chunks:
                return None
        while not chunks:
            self._receive()
        self.send(frame(Command.MORE, struct.pack(">BH", number, 1)))
        return chunks.popleft()

    # Frames

    def _receive(self) -> tuple[int, Answer]:
        """Wait for the next frame, and process it unless it is an answer."""
        size = struct.unpack(">I", self._bytes(4))[0]
        data = self._bytes(size)
        command, _ = struct.unpack_from(">HH", data)
        rest = Answer(data, 4)
        if command == Command.CONFIRM:
            self.confirmed += struct.unpack_from(">I", data, 5)[0]
        elif command == Command.DELIVER:
            self._chunks[data[4]].append(delivered(data))
        elif command == Command.HEARTBEAT:
            self.send(frame(Command.HEARTBEAT))
        elif command == Command.PUBLISH_ERROR:
            (code,) = struct.unpack_from(">H", data, 17)
            raise StreamError(code, "a message")
        elif command == Command.TUNE:
            largest = rest.number(">I") or LARGEST
            self.largest = min(largest, LARGEST)
            self.send(frame(Command.TUNE, struct.pack(">II", self.largest, 0)))
            self._tuned = True
        elif command == Command.METADATA_UPDATE:
            code = rest.number(">H")
            raise StreamError(code, f"stream {rest.text()!r}")
        elif command == Command.CLOSE:
            rest.number(">I")
            code = rest.number(">H")
            raise StreamError(code, f"the server closes the connection ({rest.text()})")
        return command, rest

    def _bytes(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        while len(self._read) < count:
            data = self._socket.recv(max(1 << 16, count - len(self._read)))
            if not data:
                raise ConnectionResetError("the server has closed the connection")
            self._read += data
        found = bytes(self._read[:count])
        del self._read[:count]
        return found


def at(number: int) -> bytes:
    """Return the position of the chunk that contains the entry ``number``."""
    return struct.pack(">HQ", 4, number)


def frame(command: int, body: bytes = b"") -> bytes:
    r"""Return a frame.

    >>> frame(Command.HEARTBEAT)
    b'\x00\x00\x00\x04\x00\x17\x00\x01'
    """
    return struct.pack(">IHH", len(body) + 4, command, VERSION) + body


def text(value: str) -> bytes:
    r"""Return a text as frames contain it.

    >>> text("ü")
    b'\x00\x02\xc3\xbc'
    """
    encoded = value.encode()
    return struct.pack(">H", len(encoded)) + encoded


def pairs(values: Mapping[str, str]) -> bytes:
    """Return pairs of texts as frames contain them."""
    parts = (text(name) + text(value) for name, value in values.items())
    return struct.pack(">I", len(values)) + b"".join(parts)


def delivered(data: bytes) -> Chunk:
    """Parse a delivered chunk; it begins after 4 bytes of the frame and the subscription."""
    head = ">BBHIqQQIIII"
    values = struct.unpack_from(head, data, 5)
    offset, entries = 5 + struct.calcsize(head), list[bytes]()
    problems: dict[int, str] = {}
    for _ in range(values[2]):
        (size,) = struct.unpack_from(">I", data, offset)
        if size >> 31:  # a batch of messages, which saf never writes
            kind, count, plain, size = struct.unpack_from(BATCH, data, offset)
            offset += struct.calcsize(BATCH)
            try:
                batch = batched(data[offset : offset + size], count, plain, kind >> 4 & 7)
            except (ValueError, struct.error, OSError) as error:
                problems |= dict.fromkeys(range(len(entries), len(entries) + count), str(error))
                batch = [b""] * count
            entries += batch
            offset += size
            continue
        entries.append(data[offset + 4 : offset + 4 + size])
        offset += 4 + size
    return Chunk(first=values[6], entries=entries, milliseconds=values[4], problems=problems)


def batched(data: bytes, count: int, plain: int, kind: int) -> list[bytes]:
    r"""Return the messages of a batch.

    >>> batched(b"\0\0\0\1a\0\0\0\0", 2, 9, 0)
    [b'a', b'']

    Args:
        data: the batch.
        count: the number of its messages.
        plain: its size without compression, in bytes.
        kind: the number of the compression.

    Raises:
        ValueError: the compression is not supported, or the batch is damaged.
    """
    if kind and kind not in COMPRESSIONS:
        raise ValueError(f"it is in a batch with compression {CODECS.get(kind, kind)}")
    if plain > LARGEST:
        raise ValueError(f"it is in a batch of {plain:,} bytes, more than {LARGEST:,}")
    if kind:
        import pyarrow as pa  # only sources get here, and some drivers lack it

        data = pa.decompress(data, plain, COMPRESSIONS[kind], asbytes=True)
    messages, offset = [], 0
    for _ in range(count):
        (size,) = struct.unpack_from(">I", data, offset)
        messages.append(data[offset + 4 : offset + 4 + size])
        offset += 4 + size
    if offset != len(data):
        raise ValueError("it is in a damaged batch")
    return messages


def text_of(entry: bytes) -> str:
    """Return the text of an entry that `Connection.add` has added."""
    return entry[len(DATA) + 4 :].decode()
