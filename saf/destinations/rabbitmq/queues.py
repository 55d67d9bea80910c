"""Queues of a RabbitMQ server: a destination that stores messages at least once.

Each message is persistent and mandatory. The server confirms a message when all queues that get it
have stored it, and returns it if no queue gets it. Queues keep no marks, so after a lost answer
messages are sent again; a consumer recognises repeats by ``message-id``.

A message that no queue gets, or that is too large, is found only after it was sent. So its
neighbours are stored already when the chunk is rejected, and so are messages that a queue took
before it was full, or before the connection broke. The error names the confirmed messages, which
are not sent again.

A message has these properties of AMQP 0.9.1, written by Arrow, without Python code per header:

    headers          saf's and the sender's, all texts
    message-id       the message's id, by which a consumer recognises repeats
    delivery-mode    2: a durable queue keeps the message over a restart
    content-type     if the sender has set a header with this name
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.mapping import CONTENT_TYPE, Mapped, mapped
from saf.destinations.marks import Mark, Place
from saf.destinations.places import not_for
from saf.destinations.queues import Queue
from saf.destinations.rabbitmq.server import (
    Broken,
    Link,
    NotAll,
    NotTaken,
    translated,
)
from saf.destinations.texts import BYTES, NONE, joined, sizes
from saf.errors import Rejected, Unavailable
from saf.failpoints import fail_point

if TYPE_CHECKING:
    from saf.destinations.rabbitmq import Rabbitmq

EVENTS = "cloudEvents_"
"""Prefix of CloudEvents attributes: AMQP 0.9.1 has no binding of its own, so this is AMQP 1.0's."""
LONGEST = 255
"""Longest name of a header, routing key or content type, in bytes."""
HAS_CONTENT_TYPE, HAS_HEADERS, HAS_MODE, HAS_ID = 1 << 15, 1 << 13, 1 << 12, 1 << 7
"""Flags of properties: each is set if the message has the property."""
PERSISTENT = b"\2"
"""The delivery-mode of each message."""

Row = tuple[UUID, str, int]
"""A row of a chunk: its source, the column that numbers the rows, and its number."""


class Queues(Queue[Link, "Rabbitmq"]):
    """Queues as a `saf.destinations.Destination`."""

    def __init__(self, name: str, settings: Rabbitmq) -> None:
        super().__init__(name, settings)
        self._there: set[Row] = set()
        """Stored rows of a chunk that is not complete, and that may be given again."""

    def identity(self) -> UUID:
        """Return an identity computed from the address."""
        return self.settings.identity(self.name)

    def _prepare(self, link: Link) -> UUID:  # noqa: ARG002 - the address is the identity
        return self.identity()

    def store(
        self,
        chunk: Chunk,
        *,
        exactly_once: bool,  # noqa: ARG002 - unsupported
    ) -> Stored | Refusal:
        """Store a chunk; see `saf.destinations.Destination`."""
        number = "parked_id" if "parked_id" in chunk.rows.column_names else "id"
        keys = [(chunk.source, number, key) for key in chunk.rows[number].to_pylist()]
        try:
            if refusal := self._store(chunk, keys):
                return refusal
        except (Rejected, Unavailable) as error:
            stored = [key in self._there for key in keys]
            # only an interrupted attempt is made again with the same rows
            self._there.intersection_update(keys if isinstance(error, Unavailable) else ())
            if not any(stored):
                raise
            return Refusal(error=error, stored=chunk.rows.filter(pa.array(stored)))
        self._there.clear()
        return Stored(messages=chunk.rows.num_rows)

    def _store(self, chunk: Chunk, keys: list[Row]) -> Refusal | None:
        """Send the messages of a chunk that are not stored yet, unless some are refused."""
        self.connect()
        rows = chunk.rows
        if refusal := not_for(self.what, self.identity(), rows, chunk.behind):
            return refusal
        messages = mapped(self.what, rows, chunk.source, self.settings, prefix=EVENTS)
        check(self.what, messages)
        fail_point("mom_insert")
        if messages.count:
            column = messages.each("message_id")
            assert column is not None  # noqa: S101 - each message has one
            ids: list[str] = column.to_pylist()
            fresh = [place for place, key in enumerate(keys) if key not in self._there]
            topics = [messages.topics[topic] for topic in messages.topic[fresh].tolist()]
            encoded = properties(messages)
            bodies: list[bytes] = messages.body.take(pa.array(fresh, pa.int64())).to_pylist()
            with self._sending([(keys[place], ids[place]) for place in fresh]) as channel:
                channel.publish(topics, [encoded[place] for place in fresh], bodies)
        fail_point("mom_commit")
        return None

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:  # noqa: ARG002 - queues keep no marks
        """Return nothing: queues keep no marks."""
        self.connect()
        return {}

    @contextmanager
    def _sending(self, messages: list[tuple[Row, str]]) -> Iterator[Link]:
        """Yield the link; after an error, note what was stored, translate, and close the link."""
        try:
            with self._connected() as link:
                yield link
        except NotAll as error:
            confirmed = (messages[place] for place in np.flatnonzero(error.there).tolist())
            self._there.update(row for row, id_ in confirmed if id_ not in error.returned)
            self.close()
            if isinstance(error, NotTaken):
                raise Rejected(self.what, str(error)) from None
            if isinstance(error, Broken):
                raise translated(self.what, self.settings, error.cause) from None
            raise Unavailable(self.what, f"{self.settings.server}: {error}") from None


def check(where: str, what: Mapped) -> None:
    """Raise if AMQP cannot carry one of these messages.

    Raises:
        Rejected: a routing key or the name of a header is too long.
    """
    for topic in what.topics:
        if len(topic.encode()) > LONGEST:
            raise Rejected(where, f"its routing key has more than {LONGEST} bytes")
    for headers in what.own:
        for name in headers:
            if len(name.encode()) > LONGEST:
                raise Rejected(where, f"the name of a header has more than {LONGEST} bytes")


def properties(what: Mapped) -> list[bytes]:
    """Return the properties of each message."""
    constant = b"".join(
        _pair(name, values) for name, values in what.headers.items() if isinstance(values, str)
    )
    parts: list[Any] = [pa.scalar(constant, BYTES)]
    for name, values in what.headers.items():
        if not isinstance(values, str):
            head = pa.scalar(_short(name) + b"S", BYTES)
            encoded = values.cast(BYTES)
            parts.append(pc.binary_join_element_wise(head, sizes(encoded), encoded, NONE))
    own = [b"".join(_pair(name, value) for name, value in headers.items()) for headers in what.own]
    parts.append(pa.array(own, BYTES).take(pa.array(what.which)))
    table = joined(*parts)
    first = [_first(headers.get(CONTENT_TYPE)) for headers in what.own]
    ids = what.each("message_id")
    assert ids is not None  # noqa: S101 - each message has one
    result: list[bytes] = joined(
        pa.array(first, BYTES).take(pa.array(what.which)),
        sizes(table),
        table,
        pa.scalar(PERSISTENT + bytes([36]), BYTES),
        ids.cast(BYTES),
    ).to_pylist()
    return result


def _first(content_type: str | None) -> bytes:
    """Return the bytes before the headers: the property flags, and the content type."""
    flags = HAS_HEADERS | HAS_MODE | HAS_ID
    if content_type is None or len(content_type.encode()) > LONGEST:
        return struct.pack(">H", flags)
    return struct.pack(">H", flags | HAS_CONTENT_TYPE) + _short(content_type)


def _short(text: str) -> bytes:
    encoded = text.encode()
    return bytes([len(encoded)]) + encoded


def _pair(name: str, value: str) -> bytes:
    encoded = value.encode()
    return _short(name) + b"S" + struct.pack(">I", len(encoded)) + encoded
