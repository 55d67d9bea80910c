"""Fragments: a large body travels cut into consecutive messages of its conversation.

Every fragment except the last is marked as one. The last fragment *is* the message: its id, headers
and type are those of the whole, and the whole is received with it. It contains the whole's number
of fragments and bytes, so the length of a file need not be known before reading it.

Each fragment has its own number, and both ends count it like any other message. So the guarantees
for messages (in order, once; messages ahead wait; a restart loses nothing) hold for fragments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard

from saf.errors import InvalidMessage
from saf.message import FRAGMENT, WHOLE

FRAGMENT_BYTES = 1024 * 1024
"""Longest body that travels in one piece, in bytes; docs/conversations.md gives the reason."""
LARGEST_BYTES = 2 * 1024 * 1024 * 1024
"""Longest body in fragments, in bytes; the same as in Service Broker."""


class Readable(Protocol):
    """A binary file, or an object that reads like one."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        ...


def is_file(body: object) -> TypeGuard[Readable]:
    """Return whether a body is a file, which must be read."""
    return callable(getattr(body, "read", None))


def split(
    file: Readable, fragment_bytes: int, max_bytes: int = LARGEST_BYTES
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Cut a body into fragments; yield each with its headers. Two at a time are in memory.

    Raises:
        InvalidMessage: the body has more than ``max_bytes``.

    >>> import io
    >>> list(split(io.BytesIO(b"large"), 4))
    [(b'larg', {'saf-fragment': 1}), (b'e', {'saf-whole': {'fragments': 2, 'bytes': 5}})]
    """
    piece, number = fill(file, fragment_bytes), 1
    length = len(piece)
    while length <= max_bytes and (following := fill(file, fragment_bytes)):
        yield piece, {FRAGMENT: number}
        length += len(following)
        piece, number = following, number + 1
    if length > max_bytes:
        raise InvalidMessage("body", f"more bytes than max_bytes ({max_bytes:,})")
    yield piece, {WHOLE: {"fragments": number, "bytes": length}} if number > 1 else {}


def count(length: int, fragment_bytes: int) -> int:
    """Return the number of fragments of a body of ``length`` bytes.

    >>> count(0, 40_960), count(40_960, 40_960), count(40_961, 40_960), count(2**31, 40_960)
    (1, 1, 2, 52429)
    """
    return max(1, -(-length // fragment_bytes))


def fill(file: Readable, size: int) -> bytes:
    """Read ``size`` bytes, or to the end of the file: a pipe may return fewer at a time.

    Raises:
        InvalidMessage: the file returns text.
    """
    pieces = [file.read(size)]
    if isinstance(pieces[0], str):
        raise InvalidMessage("body", "a text file: open it in binary mode")
    missing = size - len(pieces[0])
    while pieces[-1] and missing > 0:
        pieces.append(file.read(missing))
        missing -= len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else pieces[0][:0].join(pieces)
