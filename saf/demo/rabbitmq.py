"""The demo's queue on a RabbitMQ server, and its contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from saf.demo import rabbitmq_server
from saf.demo.proof import Received
from saf.demo.received import received_of
from saf.destinations.rabbitmq import Rabbitmq
from saf.errors import MissingExtra

QUEUE = "flights"


@contextmanager
def serve(folder: Path) -> Iterator[Rabbitmq]:
    """Yield a server as a destination; its data is in the folder.

    Raises:
        UsageError: this machine has no rabbitmq-server.
    """
    try:
        import pika
    except ImportError:
        raise MissingExtra("rabbitmq", "a demo to RabbitMQ") from None
    with rabbitmq_server.serve(folder) as ports:
        rabbitmq_server.wait_for(ports.queues)
        here = pika.ConnectionParameters("127.0.0.1", ports.queues)
        with closing(pika.BlockingConnection(here)) as connection:
            connection.channel().queue_declare(QUEUE, durable=True)
        yield Rabbitmq(server=f"amqp://127.0.0.1:{ports.queues}", topic=QUEUE)


def received(settings: Rabbitmq) -> Iterator[Received]:
    """Yield all messages of the queue, in order; they stay, because they are not acknowledged."""
    import pika

    ((host, port),) = settings.address.hosts
    with closing(pika.BlockingConnection(pika.ConnectionParameters(host, port))) as connection:
        channel = connection.channel()
        left = channel.queue_declare(QUEUE, passive=True).method.message_count
        for number, (_, properties, body) in enumerate(channel.consume(QUEUE), start=1):
            yield received_of(number, properties.headers, body)
            if number == left:
                return
