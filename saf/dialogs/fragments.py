"""Fragments: how a large body travels, cut into consecutive messages of its conversation.

All but the last say that they are fragments. The last one *is* the message: its id, headers and
type are those of the whole, and with it the whole is received. It says in how many fragments and
bytes that is, so nobody has to know the length of a file before it has been read.

Each has its own number, and both ends count them as any other message: what holds for messages
(in order, once; what is ahead waits; a restart loses nothing) holds for fragments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard

from saf.errors import InvalidMessage
from saf.message import FRAGMENT, WHOLE

FRAGMENT_BYTES = 1024 * 1024
"""Longest body that travels in one piece; docs/conversations.md says why."""
LARGEST_BYTES = 2 * 1024 * 1024 * 1024
"""Longest body in fragments, as in Service Broker."""


class Readable(Protocol):
    """A binary file, or what reads like one."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""
        ...


def is_file(body: object) -> TypeGuard[Readable]:
    """Whether a body is to be read."""
    return callable(getattr(body, "read", None))


def split(
    file: Readable, fragment_bytes: int, max_bytes: int = LARGEST_BYTES
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """A body's fragments, and what the headers of each say. Two are in memory at a time.

    Raises:
        InvalidMessage: it has more than ``max_bytes``.

    >>> import io
    >>> list(split(io.BytesIO(b"large"), 4))
    [(b'larg', {'saf-fragment': 1}), (b'e', {'saf-whole': {'fragments': 2, 'bytes': 5}})]
    """
    piece, number = _fill(file, fragment_bytes), 1
    length = len(piece)
    while length <= max_bytes and (following := _fill(file, fragment_bytes)):
        yield piece, {FRAGMENT: number}
        length += len(following)
        piece, number = following, number + 1
    if length > max_bytes:
        raise InvalidMessage("body", f"more bytes than max_bytes ({max_bytes:,})")
    yield piece, {WHOLE: {"fragments": number, "bytes": length}} if number > 1 else {}


def count(length: int, fragment_bytes: int) -> int:
    """How many fragments a body of so many bytes has.

    >>> count(0, 40_960), count(40_960, 40_960), count(40_961, 40_960), count(2**31, 40_960)
    (1, 1, 2, 52429)
    """
    return max(1, -(-length // fragment_bytes))


def _fill(file: Readable, size: int) -> bytes:
    """So many bytes, unless the file ends before: a pipe may give fewer at a time."""
    piece = file.read(size)
    while piece and len(piece) < size and (more := file.read(size - len(piece))):
        piece += more
    return piece
