"""Kinds of destinations that a demo sends to: how each is served, and how it is read back.

`KINDS` has a plug for each: a function that yields the settings of a destination whose data is in a
folder, and a function that reads all messages there. A server is started if it is installed;
tables need none. Reading goes through the usual client where there is one, because the proof should
not depend on saf; the streams of NATS and RabbitMQ are read by saf's own readers.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from saf.destinations.delta import Delta
from saf.destinations.iceberg import Iceberg
from saf.destinations.kafka import Kafka
from saf.destinations.lake import ColumnType
from saf.destinations.nats import Nats
from saf.destinations.rabbitmq import Rabbitmq
from saf.destinations.rabbitmq_stream import RabbitmqStream, amqp
from saf.destinations.rabbitmq_stream.streams import entries
from saf.destinations.redis import Redis
from saf.errors import MissingExtra, Unavailable
from saf_demo import servers
from saf_demo.proof import COLUMNS, Received

if TYPE_CHECKING:
    import pyarrow as pa

QUEUE = "flights"
PROMOTE: dict[str, ColumnType] = {"origin": "string", "distance": "double"}
"""Values of flights that get columns of their own in a table."""
AT_ONCE = 5_000
HEADERS = ("saf-id", "saf-from", "saf-service", "saf-key", "saf-type")
"""Headers that become columns of a message, in the order of `Received`."""


@dataclass(frozen=True, kw_only=True)
class Plug:
    """What differs from kind to kind."""

    title: str
    client: str | None
    """The package of its client, which an extra of the kind's name installs; None: none."""
    start: Callable[[Path], AbstractContextManager[Any]]
    """Yields the settings of a destination; its data is in the folder."""
    received: Callable[[Any], Iterator[Received]]
    """Yields all messages of a destination with these settings, those of each key in order."""


@contextmanager
def serve(kind: str, folder: Path) -> Iterator[Any]:
    """Yield the settings of a destination; its data is in the folder, which is created.

    Raises:
        MissingExtra: the client is not installed.
        UsageError: the server is not installed, or does not start.
    """
    plug = KINDS[kind]
    if plug.client is not None and find_spec(plug.client) is None:
        raise MissingExtra(kind, f"a demo to {plug.title}")
    folder.mkdir(parents=True, exist_ok=True)
    with plug.start(folder.absolute()) as settings:
        yield settings


@contextmanager
def delta(folder: Path) -> Iterator[Delta]:
    """Yield a Delta table, with the flights' origins and distances."""
    yield Delta(table=str(folder), promote=PROMOTE)


def of_delta(settings: Delta) -> Iterator[Received]:
    """Yield all rows of a Delta table."""
    from deltalake import DeltaTable

    return _rows(DeltaTable(settings.table).to_pyarrow_table(columns=["id", *COLUMNS]))


@contextmanager
def iceberg(folder: Path) -> Iterator[Iceberg]:
    """Yield an Iceberg table in a catalog of its own, with the flights' origins and distances."""
    catalog, table = f"sqlite:///{folder}/catalog.db", "flights.messages"
    yield Iceberg(catalog=catalog, table=table, warehouse=str(folder), promote=PROMOTE)


def of_iceberg(settings: Iceberg) -> Iterator[Received]:
    """Yield all rows of an Iceberg table."""
    from pyiceberg.catalog.sql import SqlCatalog

    with closing(SqlCatalog("saf", uri=settings.catalog)) as catalog:
        table = catalog.load_table(settings.table)
        return _rows(table.scan(selected_fields=("id", *COLUMNS)).to_arrow())


def _rows(table: pa.Table) -> Iterator[Received]:
    for batch in table.sort_by("id").to_batches(max_chunksize=10_000):
        yield from zip(*(batch[name].to_pylist() for name in COLUMNS), strict=True)


@contextmanager
def redis(folder: Path) -> Iterator[Redis]:
    """Yield streams of a Redis server."""
    port = servers.free_port()
    settings = Redis(server=f"redis://127.0.0.1:{port}/0")
    with servers.running(servers.redis(folder, port), folder, partial(settings.connected, "demo")):
        yield settings


def of_redis(settings: Redis) -> Iterator[Received]:
    """Yield all entries of all streams, stream by stream."""
    import redis as client

    ((host, port),) = settings.address.hosts
    with client.Redis(host=host, port=port) as connection:
        for stream in connection.scan_iter(match=f"{{{settings.hash_tag}}}:*"):
            first = "-"
            while found := connection.xrange(stream, first, count=AT_ONCE):
                for _, fields in found:
                    body = fields.pop(b"body")
                    headers = {name.decode(): value.decode() for name, value in fields.items()}
                    yield _from_headers(headers, body)
                first = f"({found[-1][0].decode()}"


@contextmanager
def nats(folder: Path) -> Iterator[Nats]:
    """Yield a stream of a NATS server."""
    port = servers.free_port()
    settings = Nats(server=f"nats://127.0.0.1:{port}", stream="FLIGHTS", topic="flights.{service}")
    with servers.running(servers.nats(folder, port), folder, partial(settings.connected, "demo")):
        yield settings


def of_nats(settings: Nats) -> Iterator[Received]:
    """Yield all messages of a stream."""
    from saf.destinations.nats.batches import Questions  # needs the client

    with settings.connected("nats") as link:
        for message in Questions("nats", link).messages(sys.maxsize):
            headers = {
                name: unquote(value)
                for name, value in (message.headers or {}).items()
                if not name.startswith("Nats-")
            }
            if "saf-id" in headers:  # not a mark
                yield _from_headers(headers, message.data)


@contextmanager
def kafka(folder: Path) -> Iterator[Kafka]:
    """Yield topics of a Kafka broker."""
    port = servers.free_port()
    settings = Kafka(brokers=f"127.0.0.1:{port}", topic="flights.{service}", partitions=4)
    with servers.running(servers.kafka(folder, port), folder, partial(settings.connected, "demo")):
        yield settings


def of_kafka(settings: Kafka) -> Iterator[Received]:
    """Yield all messages of all topics, partition by partition.

    Raises:
        Unavailable: no message has arrived for `servers.START_SECONDS`, before the end.
    """
    from confluent_kafka import Consumer, KafkaError, TopicPartition

    consumer = Consumer({
        "bootstrap.servers": settings.brokers, "group.id": "proof", "enable.auto.commit": False,
        "isolation.level": "read_committed", "enable.partition.eof": True,
    })  # fmt: skip
    with closing(consumer):
        topics = consumer.list_topics(timeout=servers.START_SECONDS).topics
        for topic in sorted(name for name in topics if name.startswith("flights.")):
            for number in topics[topic].partitions:
                consumer.assign([TopicPartition(topic, number, 0)])
                ended, reason, last = False, "no answer", time.monotonic()
                while not ended:
                    for message in consumer.consume(AT_ONCE, 0.2):
                        if error := message.error():
                            ended |= error.code() == KafkaError._PARTITION_EOF
                            reason = error.str()
                            continue
                        pairs = message.headers() or ()
                        headers = {str(pair[0]): _text(pair[1]) for pair in pairs}
                        yield _from_headers(headers, message.value() or b"")
                        last = time.monotonic()
                    if not ended and time.monotonic() - last > servers.START_SECONDS:
                        raise Unavailable(f"topic {topic}", reason)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@contextmanager
def rabbitmq(folder: Path) -> Iterator[Rabbitmq]:
    """Yield a queue of a RabbitMQ server."""
    import pika

    port = servers.free_port()
    command = servers.rabbitmq(folder, port, servers.free_port())
    address = ("127.0.0.1", port)
    with servers.running(command, folder, lambda: socket.create_connection(address)):
        with closing(pika.BlockingConnection(pika.ConnectionParameters(*address))) as connection:
            connection.channel().queue_declare(QUEUE, durable=True)
        yield Rabbitmq(server=f"amqp://127.0.0.1:{port}", topic=QUEUE)


def of_rabbitmq(settings: Rabbitmq) -> Iterator[Received]:
    """Yield all messages of a queue; they stay, because they are not acknowledged."""
    import pika

    ((host, port),) = settings.address.hosts
    with closing(pika.BlockingConnection(pika.ConnectionParameters(host, port))) as connection:
        channel = connection.channel()
        left = channel.queue_declare(QUEUE, passive=True).method.message_count
        for _, properties, body in islice(channel.consume(QUEUE), left):
            yield _from_headers(properties.headers, body)


@contextmanager
def rabbitmq_stream(folder: Path) -> Iterator[RabbitmqStream]:
    """Yield a stream of a RabbitMQ server."""
    port = servers.free_port()
    command = servers.rabbitmq(folder, servers.free_port(), port)
    settings = RabbitmqStream(server=f"rabbitmq-stream://127.0.0.1:{port}", topic=QUEUE)

    @contextmanager
    def answers() -> Iterator[None]:
        with settings.connected("demo") as link:
            link.connection.replicas([QUEUE, settings.marks])  # a new server has read its streams
            yield

    with servers.running(command, folder, answers):
        yield settings


def of_rabbitmq_stream(settings: RabbitmqStream) -> Iterator[Received]:
    """Yield all messages of a stream."""
    with settings.connected("rabbitmq_stream") as link:
        for _, message in entries(link.connection, QUEUE):
            yield _from_headers(*amqp.read(message))


def _from_headers(given: Mapping[str, str], body: bytes) -> Received:
    """Return a message of a queue, from its headers and its body."""
    headers = {name: value for name, value in given.items() if not name.startswith("saf-")}
    message_id, from_service, to_service, key, message_type = map(given.get, HEADERS)
    return message_id, from_service, to_service, key, message_type, json.dumps(headers), body


KINDS: Mapping[str, Plug] = {
    "delta": Plug(title="a Delta table", client="deltalake", start=delta, received=of_delta),
    "iceberg": Plug(
        title="an Iceberg table", client="pyiceberg", start=iceberg, received=of_iceberg
    ),
    "redis": Plug(title="Redis", client="redis", start=redis, received=of_redis),
    "nats": Plug(title="NATS", client="nats", start=nats, received=of_nats),
    "kafka": Plug(title="Kafka", client="confluent_kafka", start=kafka, received=of_kafka),
    "rabbitmq": Plug(title="RabbitMQ", client="pika", start=rabbitmq, received=of_rabbitmq),
    "rabbitmq_stream": Plug(
        title="RabbitMQ", client=None, start=rabbitmq_stream, received=of_rabbitmq_stream
    ),
}
