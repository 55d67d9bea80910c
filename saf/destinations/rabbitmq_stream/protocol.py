"""The protocol of RabbitMQ's streams: frames and their contents.

A frame is a size, a command, a version, and the command's own fields. Numbers are big-endian; a
text is its size and its UTF-8. The codes of answers are the protocol's own.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

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

FIRST = struct.pack(">H", 1)
"""Position to read from: the beginning of a stream."""


def at(number: int) -> bytes:
    """Return the position of the chunk that contains the entry ``number``."""
    return struct.pack(">HQ", 4, number)


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
    offset, entries = 5 + struct.calcsize(head), []
    for _ in range(values[2]):
        (size,) = struct.unpack_from(">I", data, offset)
        if size >> 31:  # a batch of messages, which saf never writes
            (count, size) = struct.unpack_from(">xHxxxxI", data, offset)
            offset += 11 + size
            entries += [b""] * count
            continue
        entries.append(data[offset + 4 : offset + 4 + size])
        offset += 4 + size
    return Chunk(first=values[6], entries=entries)
