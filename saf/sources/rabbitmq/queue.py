"""A queue of a RabbitMQ server as a source.

A queue has no places. A position is ``(0, number)``: the number of messages that were ever stored.
Messages stay unacknowledged until `Queue.acknowledge`, which the reader calls after the commit that
stores them. If the connection ends before, the server delivers them again, in their order.

The consumer is exclusive, and stays until the connection ends. So while a process may have messages
that are not stored, no other process gets later ones: their order would be lost. For the same
reason, a queue with another consumer is not read.

The server sends at most two chunks before an acknowledgement, and fewer if messages are large: how
many fit into memory follows from the size of those read before.

A server that gets no heartbeat closes the connection. So the messages of a process that was stopped
come back to the queue.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

from pika.exceptions import ChannelClosedByBroker

from saf.destinations.mapping import CONTENT_TYPE
from saf.destinations.rabbitmq.queues import EVENTS
from saf.destinations.rabbitmq.server import Channel, errors
from saf.errors import Unavailable
from saf.sources import BEGINNING, GONE, MOST_BYTES, Extent, Position, Record, Records
from saf.sources.linked import Linked

if TYPE_CHECKING:
    from saf.destinations.rabbitmq import Rabbitmq as Destination
    from saf.sources.rabbitmq import Rabbitmq

MISSING = 404
FIRST_READ = 100
"""Messages of the first read: only afterwards is known how large they are."""
MOST = 65_535
"""Most messages that a consumer may ask for before an acknowledgement."""
SILENCE_SECONDS = 2.0
"""Time to wait for a message that the queue had a moment ago."""
PROPERTIES = (
    *(CONTENT_TYPE, "content-encoding", "correlation-id", "reply-to", "message-id", "type"),
    *("app-id", "user-id"),
)
"""Properties of other writers' messages that become headers."""

Delivered = tuple[Any, Any, bytes]
"""A message: its delivery, its properties and its body."""


class Consumer(Channel):
    """A channel that takes messages of a queue."""

    heartbeat_seconds: ClassVar[int] = 60

    def __init__(self, what: str, settings: Destination) -> None:
        self._messages: deque[Delivered] = deque()
        self._bytes = 0
        """Bytes of the bodies that wait in ``_messages``."""
        self._enough = (0, 0)
        """Messages, and bytes of bodies, to wait for."""
        self._tag: str | None = None
        self._prefetch = 0
        super().__init__(what, settings)

    def look(self, queue: str) -> tuple[int, int] | None:
        """Return how many messages wait in a queue, and how many other consumers it has.

        Return None if the queue does not exist; then the channel is closed.
        """
        try:
            answer = self._ask(partial(self._channel.queue_declare, queue, passive=True)).method
        except ChannelClosedByBroker as error:
            if error.reply_code == MISSING:
                return None
            raise
        others = int(answer.consumer_count) - (self._tag is not None)
        return int(answer.message_count) + len(self._messages), others

    def consume(self, queue: str, prefetch: int) -> None:
        """Let the server send about ``prefetch`` messages before an acknowledgement."""
        if self._tag is not None:
            if prefetch <= self._prefetch < 2 * prefetch:
                return
            self._ask(partial(self._channel.basic_cancel, self._tag))
            self._tag = None
        self._ask(partial(self._channel.basic_qos, prefetch_count=prefetch))
        begin = partial(self._channel.basic_consume, queue, self._arrived, exclusive=True)
        self._tag, self._prefetch = str(self._ask(begin).method.consumer_tag), prefetch

    def take(self, count: int, size: int) -> list[Delivered]:
        """Return the next messages, which stay unacknowledged.

        Return at most ``count``, and no more once their bodies have ``size`` bytes; fewer if no
        more come for `SILENCE_SECONDS`.
        """
        self._enough = count, size
        while len(self._messages) < count and self._bytes < size:
            try:
                self._wait(SILENCE_SECONDS)
            except TimeoutError:
                if self._error is not None:
                    raise
                break
        taken: list[Delivered] = []
        while self._messages and len(taken) < count and size > 0:
            taken.append(self._messages.popleft())
            size -= len(taken[-1][2])
            self._bytes -= len(taken[-1][2])
        return taken

    def acknowledge(self, tag: int) -> None:
        """Acknowledge all messages up to a delivery."""
        self._channel.basic_ack(tag, multiple=True)

    def _ask(self, send: Callable[..., object]) -> Any:
        """Send a method, and return the server's answer."""
        answers: list[Any] = []

        def answered(frame: Any) -> None:
            answers.append(frame)
            self._connection.ioloop.stop()

        send(callback=answered)
        while not answers:
            self._wait(self._settings.bounds.statement_seconds)
        return answers[0]

    def _arrived(self, _: object, delivery: Any, properties: Any, body: bytes) -> None:
        self._messages.append((delivery, properties, body))
        self._bytes += len(body)
        count, size = self._enough
        if len(self._messages) >= count or self._bytes >= size:
            self._connection.ioloop.stop()

    def _progress(self) -> int:
        return len(self._messages)


class Queue(Linked[Consumer]):
    """A queue as a `saf.sources.Source`."""

    prefix = EVENTS
    loses: ClassVar[type[BaseException]] = BaseException
    """Messages in hand come again, in their order, if the connection ends."""

    def __init__(self, name: str, settings: Rabbitmq) -> None:
        super().__init__(name)
        self.settings = settings
        self._destination = settings.as_destination()
        self._body_bytes: float | None = None
        """Bytes of a body, on average, of the last read."""
        self._expected = 0
        """Messages that waited when the queue was looked at, and were not read yet."""

    def _open(self) -> Consumer:
        return Consumer(self.what, self._destination)

    def _errors(self) -> AbstractContextManager[None]:
        return errors(self.what, self._destination)

    def extent(self, shard: int) -> Extent:  # noqa: ARG002 - there is one
        """Return what the queue has."""
        with self._connected() as consumer:
            extent, _ = self._look(consumer)
            self._expected = extent.waiting or 0
            return extent

    def read(
        self,
        shard: int,  # noqa: ARG002 - there is one
        after: Position,
        limit: int,
        size: int = MOST_BYTES,
    ) -> Records:
        """Return the next messages, numbered after a position."""
        with self._connected() as consumer:
            extent, others = self._look(consumer)
            if others:
                raise Unavailable(
                    self.what,
                    f"{self.settings.server}: queue {self.settings.topic!r} has another consumer, "
                    "with which its messages would be shared",
                )
            fitting = min(self.settings.chunk_rows, self._fitting(size))
            # neither side counts messages on their way from the server
            count = min(limit, fitting, max(extent.waiting or 0, self._expected))
            if not count:
                return Records(extent=extent)
            consumer.consume(self.settings.topic, min(2 * fitting, MOST))
            messages = consumer.take(count, size)
        self._expected = max(self._expected - len(messages), 0) if len(messages) == count else 0
        if not messages:
            return Records(extent=extent)
        self._body_bytes = sum(len(body) for *_, body in messages) / len(messages)
        return Records(
            extent=extent,
            records=[
                _record((0, number), *one) for number, one in enumerate(messages, after[1] + 1)
            ],
            receipt=int(messages[-1][0].delivery_tag),
        )

    def acknowledge(self, receipt: object) -> None:
        """Acknowledge messages that are stored; return when the server knows it."""
        assert isinstance(receipt, int)  # noqa: S101 - as `read` has returned it
        with self._connected() as consumer:
            consumer.acknowledge(receipt)
            self._look(consumer)

    def _fitting(self, size: int) -> int:
        """Return how many messages have about ``size`` bytes."""
        if self._body_bytes is None:
            return FIRST_READ
        return max(int(size / max(self._body_bytes, 1)), 1)

    def _look(self, consumer: Consumer) -> tuple[Extent, int]:
        """Return what the queue has, and the number of its other consumers."""
        found = consumer.look(self.settings.topic)
        if found is None:
            self.close()
            return GONE, 0
        waiting, others = found
        return Extent(last=BEGINNING, first=None, added=0, removed=0, waiting=waiting), others


def _record(position: Position, delivery: Any, properties: Any, body: bytes) -> Record:
    headers = {
        name: written
        for name, value in (properties.headers or {}).items()
        if (written := _as_bytes(value)) is not None
    }
    given = {name: getattr(properties, name.replace("-", "_")) for name in PROPERTIES}
    if _is_event(headers, given[CONTENT_TYPE]):
        given = {CONTENT_TYPE: given[CONTENT_TYPE]}
    elif delivery.exchange:
        given["routing-key"] = delivery.routing_key
    for name, value in given.items():
        if value is not None:
            headers.setdefault(name, str(value).encode(errors="backslashreplace"))
    stamp = properties.timestamp
    return Record(
        position=position,
        headers=headers,
        body=body,
        created_at=_moment(stamp) if stamp else None,
        id=str(properties.message_id or uuid4()),
    )


def _is_event(headers: Mapping[str, bytes], content_type: str | None) -> bool:
    """Return whether saf, or another writer of CloudEvents, wrote the message."""
    return (
        "saf-source" in headers
        or f"{EVENTS}specversion" in headers
        or (content_type or "").startswith("application/cloudevents")
    )


def _as_bytes(value: Any) -> bytes | None:
    """Return a header's value as bytes; None for no value.

    >>> _as_bytes("a"), _as_bytes(7), _as_bytes(True), _as_bytes([1, None]), _as_bytes(None)
    (b'a', b'7', b'true', b'[1, null]', None)
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode(errors="backslashreplace")
    if isinstance(value, datetime):
        return value.replace(tzinfo=value.tzinfo or UTC).isoformat().encode()
    return json.dumps(value, default=str, ensure_ascii=False).encode(errors="backslashreplace")


def _moment(seconds: int) -> datetime | None:
    """Return a writer's time; None if it is invalid.

    >>> _moment(0), _moment(1 << 62)
    (datetime.datetime(1970, 1, 1, 0, 0, tzinfo=datetime.timezone.utc), None)
    """
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None
