"""A queue of a RabbitMQ server as a source.

A queue has no places. A position is ``(0, number)``: the number of messages that were ever stored.
Messages stay unacknowledged until `Queue.acknowledge`, which the reader calls after the commit that
stores them. If the connection ends before, the server delivers them again, in their order.

Each read has a consumer of its own, which gets as many messages as the queue has, at most: so what
is delivered is known, and nothing waits for more. How many messages fit into memory follows from
the size of those read before. Their consumer is exclusive, and none may exist before it: two
consumers share a queue's messages, and their order is lost.

A server that gets no heartbeat closes the connection. So the messages of a process that was stopped
come back to the queue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

if TYPE_CHECKING:
    from saf.destinations.rabbitmq import Rabbitmq as Destination
    from saf.sources.rabbitmq import Rabbitmq

MISSING = 404
FIRST_READ = 100
"""Messages of the first read: only afterwards is known how large they are."""
MOST = 65_535
"""Most messages without an acknowledgement that a consumer may ask for."""
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
        self._messages: list[Delivered] = []
        self._count = 0
        """Number of messages to wait for."""
        super().__init__(what, settings)

    def look(self, queue: str) -> tuple[int, int] | None:
        """Return how many messages wait in a queue, and how many consumers it has.

        Return None if the queue does not exist; then the channel is closed.
        """
        try:
            answer = self._ask(partial(self._channel.queue_declare, queue, passive=True))
        except ChannelClosedByBroker as error:
            if error.reply_code == MISSING:
                return None
            raise
        return int(answer.method.message_count), int(answer.method.consumer_count)

    def take(self, queue: str, count: int) -> list[Delivered]:
        """Return the next messages of a queue, which stay unacknowledged."""
        channel = self._channel
        self._messages, self._count = [], count
        self._ask(partial(channel.basic_qos, prefetch_count=count))
        tag = channel.basic_consume(queue, self._arrived, exclusive=True)
        while len(self._messages) < count:
            try:
                self._wait(SILENCE_SECONDS)
            except TimeoutError:
                if self._error is not None:
                    raise
                break
        self._ask(partial(channel.basic_cancel, tag))
        messages, self._messages = self._messages, []
        return messages

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
        if len(self._messages) >= self._count:
            self._connection.ioloop.stop()

    def _progress(self) -> int:
        return len(self._messages)


class Queue:
    """A queue as a `saf.sources.Source`."""

    prefix = EVENTS

    def __init__(self, name: str, settings: Rabbitmq) -> None:
        self.what = f"source {name!r}"
        self.settings = settings
        self._destination = settings.as_destination()
        self._consumer: Consumer | None = None
        self._body_bytes: float | None = None
        """Bytes of a body, on average, of the last read."""

    def connect(self) -> None:
        """Connect, if not connected yet."""
        if self._consumer is None:
            with errors(self.what, self._destination):
                self._consumer = Consumer(self.what, self._destination)

    def partitions(self) -> int:
        """Return 1."""
        return 1

    def extent(self, shard: int) -> Extent:  # noqa: ARG002 - there is one
        """Return what the queue has."""
        with self._connected() as consumer:
            extent, _ = self._look(consumer)
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
            extent, consumers = self._look(consumer)
            if consumers:
                raise Unavailable(
                    self.what,
                    f"{self.settings.server}: queue {self.settings.topic!r} has another consumer, "
                    "with which its messages would be shared",
                )
            count = min(limit, extent.waiting or 0, MOST, self._fitting(size))
            if not count:
                return Records(extent=extent)
            messages = consumer.take(self.settings.topic, count)
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

    def close(self) -> None:
        """Close the connection; the server delivers unacknowledged messages again."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _fitting(self, size: int) -> int:
        """Return how many messages have about ``size`` bytes."""
        if self._body_bytes is None:
            return FIRST_READ
        return max(int(size / max(self._body_bytes, 1)), 1)

    def _look(self, consumer: Consumer) -> tuple[Extent, int]:
        """Return what the queue has, and the number of its consumers."""
        found = consumer.look(self.settings.topic)
        if found is None:
            self.close()
            return GONE, 0
        waiting, consumers = found
        return Extent(last=BEGINNING, first=None, added=0, removed=0, waiting=waiting), consumers

    @contextmanager
    def _connected(self) -> Iterator[Consumer]:
        self.connect()
        assert self._consumer is not None  # noqa: S101 - connected
        try:
            with errors(self.what, self._destination):
                yield self._consumer
        except BaseException:
            self.close()
            raise


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
    """Return a writer's time; None for one that is no time.

    >>> _moment(0), _moment(1 << 62)
    (datetime.datetime(1970, 1, 1, 0, 0, tzinfo=datetime.timezone.utc), None)
    """
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None
