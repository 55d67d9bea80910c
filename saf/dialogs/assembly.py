"""Assembly: fragments wait in saf.fragment, and are read from there as one body.

When an end takes fragments, its receiver has the database copy them from the inbox into
saf.fragment, in the transaction in which they count as received. Their bodies never pass through
the receiver, a restart continues after the last copied fragment, and the inbox may be purged in the
meantime. If a fragment has to wait (`saf.dialogs.arrival`), its row waits without the body, which
is in saf.fragment too.

The last fragment brings the message, as an `Assembled`. The transaction that handles it deletes the
copies; if no transaction ever does, `saf purge` deletes them once the end is over.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from saf.database import fetch
from saf.errors import UsageError
from saf.log.read import since_shown
from saf.message import DEFAULT_MAX_BYTES, FRAGMENT, WHOLE
from saf.received import Received
from saf.receiving.hand import Reader
from saf.receiving.reading import IN_HAND

# Fragments that arrived before are already stored
SET_ASIDE = f"""
INSERT INTO saf.fragment (conversation_id, from_initiator, sequence, body)
SELECT conversation_id, from_initiator, sequence, body
FROM {IN_HAND} AS c CROSS JOIN LATERAL ({since_shown()}) AS since
WHERE since.id = ANY (%(ids)s)
ON CONFLICT DO NOTHING
"""

# A fragment that was a dead letter has its body with it
SET_ASIDE_AGAIN = """
INSERT INTO saf.fragment (conversation_id, from_initiator, sequence, body)
SELECT conversation_id, from_initiator, sequence, body
FROM saf.parked WHERE parked_id = ANY (%(parked_ids)s)
ON CONFLICT DO NOTHING
"""
# The hash that a signature covers; a waiting fragment's body is in saf.fragment
HASHES = f"""
SELECT since.id, NULL::bigint, encode(sha256(since.body), 'hex')
FROM {IN_HAND} AS c CROSS JOIN LATERAL ({since_shown()}) AS since WHERE since.id = ANY (%(ids)s)
UNION ALL
SELECT NULL, parked_id, encode(sha256(f.body), 'hex')
FROM saf.parked JOIN saf.fragment f USING (conversation_id, from_initiator, sequence)
WHERE parked_id = ANY (%(parked_ids)s)
"""

OF_ONE = """
FROM saf.fragment
WHERE conversation_id = %(conversation_id)s AND from_initiator = %(from_initiator)s
  AND sequence BETWEEN %(first)s AND %(last)s
"""
# The length of a body that is stored out of line is known without reading it
THERE = f"SELECT count(*), coalesce(sum(octet_length(body)), 0) {OF_ONE}"
READ = f"SELECT body {OF_ONE}"
FORGET = f"DELETE {OF_ONE}"


def is_fragment(message: Received) -> bool:
    """Return whether a message is a fragment, but not the last one."""
    spoken = message.from_initiator is not None and message.sequence is not None
    return spoken and FRAGMENT in _headers(message)


def whole(message: Received) -> tuple[int, int] | None:
    """Return the number of fragments and bytes if a message is the last fragment; else None."""
    try:
        extent = _headers(message)[WHOLE]
        fragments, length = int(extent["fragments"]), int(extent["bytes"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return fragments, length


def _headers(message: Received) -> dict[str, Any]:
    headers = message.headers
    return headers if isinstance(headers, dict) else {}


class Assembled(Received):
    """A message whose body came in fragments. Read it in the transaction that receives it."""

    __slots__ = ("_raw", "_size", "fragments")

    def __init__(
        self, message: Received, raw: psycopg.Connection[Any], fragments: int, size: int
    ) -> None:
        super().__init__(message._row, message.parked_id, message.attempt)
        self.is_verified_like(message)
        self._raw = raw
        self.fragments = fragments
        self._size = size

    @property
    def size(self) -> int:
        """Size of the body in bytes."""
        return self._size

    @property
    def first_sequence(self) -> int:
        """Number of the first fragment."""
        return int(self._others["first"])

    @property
    def body(self) -> bytes:
        """The whole body, joined at each access; use `open` for a body too large for memory.

        Raises:
            UsageError: the body has more than `saf.message.DEFAULT_MAX_BYTES`.
        """
        if self.size > DEFAULT_MAX_BYTES:
            raise UsageError(
                f"the body of message {self.message_id} has {self.size:,} bytes, and not more than "
                f"{DEFAULT_MAX_BYTES:,} are put together in memory: read it from message.open()"
            )
        return b"".join(self._pieces())

    def open(self) -> io.BufferedIOBase:
        """Return the body as a file that holds one fragment at a time in memory."""
        return io.BufferedReader(_Pieces(self._pieces()))

    @property
    def sha256(self) -> str:
        """Hash of the whole body, read one fragment at a time."""
        hashed = hashlib.sha256()
        for piece in self._pieces():
            hashed.update(piece)
        return hashed.hexdigest()

    @property
    def fragment_bytes(self) -> int | None:
        """Size of each fragment but the last; None if their sizes differ."""
        size, rest = divmod(self._size - super().size, self.fragments - 1)
        return size if rest == 0 and size >= super().size else None

    def in_memory(self) -> Received:
        """Return the message with its body joined; raise as `body`."""
        return self.with_body(self.body)

    def is_there(self) -> bool:
        """Return whether all fragments have arrived."""
        ((fragments, size),) = fetch(self._raw, THERE, self._others)
        return bool((fragments + 1, size + super().size) == (self.fragments, self.size))

    def forget(self) -> None:
        """Delete the fragments: the message has been handled, and they are no longer needed."""
        self._raw.execute(FORGET, self._others)

    @property
    def _others(self) -> dict[str, Any]:
        """Parameters for all fragments except the last, which is this message's own row."""
        assert self.sequence is not None  # noqa: S101 - messages of dialogs have a number
        return {
            "conversation_id": self.conversation_id,
            "from_initiator": self.from_initiator,
            "first": self.sequence - self.fragments + 1,
            "last": self.sequence - 1,
        }

    def _pieces(self) -> Iterator[bytes]:
        params = self._others
        for sequence in range(params["first"], params["last"] + 1):
            yield self._piece(params | {"first": sequence, "last": sequence})
        yield super().body

    def _piece(self, params: dict[str, Any]) -> bytes:
        found = None
        if not self._raw.closed:
            with psycopg.Cursor(self._raw, row_factory=tuple_row) as cursor:
                found = cursor.execute(READ, params, binary=True).fetchone()
        if found is None:
            raise UsageError(
                f"the body of message {self.message_id} is gone: read it in the block "
                "or the handler that got the message"
            )
        return bytes(found[0])


class _Pieces(io.RawIOBase):
    """Reads an iterator of bytes as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def set_aside(raw: psycopg.Connection[Any], reader: Reader, messages: Iterable[Received]) -> None:
    """Copy the bodies of fragments that were read from the inbox in this transaction."""
    messages = list(messages)
    fresh = [one for one in messages if one.parked_id is None]
    parked_ids = [one.parked_id for one in messages if one.parked_id is not None and one.body]
    if parked_ids:
        raw.execute(SET_ASIDE_AGAIN, {"parked_ids": parked_ids})
    if fresh:
        raw.execute(
            SET_ASIDE,
            {
                "subscription_id": reader.subscription_id,
                "shards": sorted({one.shard for one in fresh}),
                "ids": [one.id for one in fresh],
            },
        )


def hashes(
    raw: psycopg.Connection[Any], reader: Reader, messages: Iterable[Received]
) -> dict[Received, str]:
    """Return the SHA-256 of the bodies of fragments that were read without their bodies."""
    if not reader.converses:
        return {}
    bodiless = [one for one in messages if not one.body and one.may_say(FRAGMENT)]
    bodiless = [one for one in bodiless if is_fragment(one)]
    if not bodiless:
        return {}
    rows = fetch(
        raw,
        HASHES,
        {
            "subscription_id": reader.subscription_id,
            "shards": sorted({one.shard for one in bodiless}),
            "ids": [one.id for one in bodiless if one.parked_id is None],
            "parked_ids": [one.parked_id for one in bodiless if one.parked_id is not None],
        },
    )
    found = {(id_, parked_id): sha256 for id_, parked_id, sha256 in rows}
    places = {
        one: (one.id, None) if one.parked_id is None else (None, one.parked_id) for one in bodiless
    }
    return {one: found[place] for one, place in places.items() if place in found}
