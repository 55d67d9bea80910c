"""A stream of a RabbitMQ server as a source.

A position is ``(0, offset + 1)``, with the offset of the next message. The server uses some offsets
for its own entries. So `saf.sources.judging` counts offsets instead of messages.

A subscription stays open between reads, and nothing else remembers it: no offset is stored beside
the stream. The server sends a chunk only when an earlier one was taken, so at most `CREDIT` chunks
wait in memory. The oldest and the newest chunk show what the stream has.

The server does not say when a stream was created. The time of the first chunk ever, which is known
while the stream has this chunk, shows a stream that was made again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from saf.destinations.rabbitmq_stream import amqp
from saf.destinations.rabbitmq_stream.connection import (
    FIRST,
    LAST,
    Chunk,
    Connection,
    Following,
    at,
)
from saf.destinations.rabbitmq_stream.server import errors
from saf.sources import GONE, MOST_BYTES, Extent, Position, Record, Records
from saf.sources.linked import Linked

if TYPE_CHECKING:
    from saf.sources.rabbitmq_stream import RabbitmqStream

CREDIT = 2
"""Chunks that the server may send ahead of reading; a chunk may have many large messages."""
READING, LOOKING = 1, 2
"""Numbers of subscriptions."""
JMS_EVENTS = "cloudEvents:"
"""Other prefix of CloudEvents attributes that the binding for AMQP allows."""


class Stream(Linked[Connection]):
    """A stream as a `saf.sources.Source`."""

    prefix = amqp.EVENTS

    def __init__(self, name: str, settings: RabbitmqStream) -> None:
        super().__init__(name)
        self.settings = settings
        self._destination = settings.as_destination()
        self._following: Following | None = None
        self._next: Position | None = None
        """Position at which the subscription continues; None without one."""
        self._left: deque[Record] = deque()
        """Messages that were received and not returned yet."""

    def _open(self) -> Connection:
        return Connection(self._destination, leads=self.settings.topic)

    def _errors(self) -> AbstractContextManager[None]:
        return errors(self.what, self._destination)

    def extent(self, shard: int) -> Extent:  # noqa: ARG002 - there is one
        """Return what the stream has."""
        with self._connected() as connection:
            return self._extent(connection)

    def read(
        self,
        shard: int,  # noqa: ARG002 - there is one
        after: Position,
        limit: int,
        size: int = MOST_BYTES,
    ) -> Records:
        """Return messages after a position."""
        records: list[Record] = []
        with self._connected() as connection:
            if self.settings.topic not in connection.replicas([self.settings.topic]):
                return Records(extent=GONE)
            if self._next != after or self._following is None:
                self._begin(connection, after)
            while len(records) < limit and size > 0 and (record := self._take(after)) is not None:
                records.append(record)
                size -= len(record.body)
            self._next = end = records[-1].position if records else after
            extent = self._extent(connection)  # last, so that it shows removals during the read
        return Records(extent=extent, records=records, added=end[1], end=end)

    def close(self) -> None:
        """Close the connection."""
        self._following, self._next = None, None
        self._left.clear()
        super().close()

    def _begin(self, connection: Connection, after: Position) -> None:
        if self._following is not None:
            connection.leave(READING)
        self._following = connection.follow(
            READING, self.settings.topic, at(after[1]), credit=CREDIT
        )
        self._left.clear()

    def _take(self, after: Position) -> Record | None:
        """Return the next message after a position; None at the end."""
        assert self._following is not None  # noqa: S101 - begun
        while not self._left:
            chunk = self._following(wait=False)
            if chunk is None:
                return None
            # the first chunk of a subscription may begin before the position
            self._left.extend(one for one in _records(chunk) if one.position > after)
        return self._left.popleft()

    def _extent(self, connection: Connection) -> Extent:
        topic = self.settings.topic
        if topic not in connection.replicas([topic]):
            return GONE
        first, last = (self._look(connection, where) for where in (FIRST, LAST))
        if first is None or last is None:
            return Extent(last=(0, 0), first=None, added=0, removed=0)
        end = last.first + len(last.entries)
        return Extent(
            last=(0, end),
            first=(0, first.first + 1),
            added=end,
            removed=first.first,
            topic_id=f"{_moment(first).isoformat()} (its first chunk)" if not first.first else None,
        )

    def _look(self, connection: Connection, where: bytes) -> Chunk | None:
        """Return the chunk at a position; None if the stream is empty."""
        following = connection.follow(LOOKING, self.settings.topic, where, credit=1)
        chunk = following(wait=False)
        connection.leave(LOOKING)
        return chunk


def _records(chunk: Chunk) -> Iterator[Record]:
    """Yield the messages of a chunk."""
    created_at = _moment(chunk)
    for place, entry in enumerate(chunk.entries):
        headers: dict[str, bytes] = {}
        body, problem = entry, chunk.problems.get(place)
        if problem is None:
            try:
                headers, body = amqp.parse(entry)
            except ValueError as error:
                problem = str(error)
        yield Record(
            position=(0, chunk.first + place + 1),
            headers={_name(name): value for name, value in headers.items()},
            body=body,
            created_at=created_at,
            problem=problem,
        )


def _name(name: str) -> str:
    """Return a header's name, with the prefix that saf uses for attributes of events.

    >>> _name("cloudEvents:type"), _name("order")
    ('cloudEvents_type', 'order')
    """
    if not name.startswith(JMS_EVENTS):
        return name
    return amqp.EVENTS + name.removeprefix(JMS_EVENTS)


def _moment(chunk: Chunk) -> datetime:
    return datetime.fromtimestamp(chunk.milliseconds / 1000, UTC)
