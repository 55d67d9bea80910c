"""The demo's streams on a RabbitMQ server, and their contents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saf.demo import rabbitmq_server
from saf.demo.proof import Received
from saf.demo.received import received_of
from saf.destinations.rabbitmq_stream import RabbitmqStream, amqp
from saf.destinations.rabbitmq_stream.reading import entries
from saf.errors import Unavailable

STREAM = "flights"


@contextmanager
def serve(folder: Path) -> Iterator[RabbitmqStream]:
    """Yield a server as a destination; its data is in the folder.

    Raises:
        UsageError: this machine has no rabbitmq-server.
    """
    with rabbitmq_server.serve(folder) as ports:
        stream = RabbitmqStream(server=f"rabbitmq-stream://127.0.0.1:{ports.streams}", topic=STREAM)
        _wait_for(stream)
        yield stream


def received(settings: RabbitmqStream) -> Iterator[Received]:
    """Yield all messages of the stream, in order."""
    with settings.connected("rabbitmq_stream") as link:
        for number, message in entries(link.connection, STREAM):
            yield received_of(number, *amqp.read(message))


def _wait_for(stream: RabbitmqStream) -> None:
    """Wait until a new server has its streams."""
    deadline = time.monotonic() + rabbitmq_server.START_SECONDS
    while True:
        try:
            with stream.connected("rabbitmq_stream") as link:
                link.connection.replicas([STREAM, stream.marks])
                return
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
