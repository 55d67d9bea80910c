"""Topics of other brokers, and readers of them, for tests of sources."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from saf.database import Dsn, fetch
from saf.destinations.rabbitmq_stream import amqp
from saf.sources.nats import Nats
from saf.sources.rabbitmq import Rabbitmq
from saf.sources.rabbitmq_stream import RabbitmqStream
from saf.sources.reader import Reader, Turn
from saf.sources.redis import Redis
from saf.sources.settings import SourceSettings
from saf.testing.source_conformance import Written
from tests.nats_server import NatsServer
from tests.pipeline import connect
from tests.rabbitmq_server import Queues, RabbitmqServer
from tests.redis_server import RedisServer
from tests.waits import until

TOPIC, STREAM = "payments", "PAYMENTS"


def redis_source(server: RedisServer, **more: Any) -> Redis:
    """A stream of a server as a source."""
    return Redis(**{"server": server.address, "topic": TOPIC, "service": "billing", **more})


def add(server: RedisServer, *bodies: str | bytes, **fields: str) -> list[str]:
    """Add entries to the stream; return their ids."""
    client = server.client()
    return [client.xadd(TOPIC, {"body": body, **fields}).decode() for body in bodies]


def nats_source(server: NatsServer, **more: Any) -> Nats:
    """A stream of a server as a source."""
    given = {"server": server.address, "stream": "PAYMENTS", "topic": f"{TOPIC}.*"}
    return Nats(**{**given, "service": "billing", **more})


def add_to_nats(
    server: NatsServer, records: Sequence[Written], subject: str = f"{TOPIC}.eu", **more: Any
) -> None:
    """Add messages to the stream, which is created if it does not exist."""
    if STREAM not in (server.ask("$JS.API.STREAM.NAMES")["streams"] or ()):
        given = {"name": STREAM, "subjects": [f"{TOPIC}.>"], "allow_direct": True}
        server.ask(f"$JS.API.STREAM.CREATE.{STREAM}", **(given | more))
    before = server.ask(f"$JS.API.STREAM.INFO.{STREAM}")["state"]["last_seq"]
    server.publish(subject, records)
    until(
        lambda: (
            server.ask(f"$JS.API.STREAM.INFO.{STREAM}")["state"]["last_seq"]
            == before + len(records)
        )
    )


def stream_source(server: RabbitmqServer, **more: Any) -> RabbitmqStream:
    """A stream of a RabbitMQ server as a source."""
    return RabbitmqStream(
        **{"server": server.address, "topic": TOPIC, "service": "billing", **more}
    )


def queue_source(server: Queues, **more: Any) -> Rabbitmq:
    """A queue of a RabbitMQ server as a source."""
    return Rabbitmq(**{"server": server.address, "topic": TOPIC, "service": "billing", **more})


def with_ids(bodies: Sequence[str]) -> list[Written]:
    """Messages with these bodies, each with an id of its own."""
    return [Written(body=body.encode(), key=str(uuid4())) for body in bodies]


def amqp_of(one: Written) -> bytes:
    """Return a message of AMQP 1.0, with its headers as bytes."""
    pairs = b"".join(
        amqp.text(name) + struct.pack(">BI", 0xB0, len(value)) + value
        for name, value in one.headers
    )
    head = struct.pack(">BII", 0xD1, len(pairs) + 4, 2 * len(one.headers))
    body = struct.pack(">BI", 0xB0, len(one.body)) + one.body
    return b"\0\x53\x74" + head + pairs + b"\0\x53\x75" + body


def texts(bodies: Sequence[str]) -> list[Written]:
    """Messages with these bodies, and nothing else."""
    return [Written(body=body.encode()) for body in bodies]


@contextmanager
def reading(
    settings: SourceSettings, mom: Dsn, name: str = TOPIC, **options: Any
) -> Iterator[Reader]:
    """A process that reads a source, as a forwarder's thread does."""
    given = {"lease_seconds": 30.0, "max_bytes": 1 << 20, "chunk_bytes": 32 << 20, **options}
    reader = Reader(name, settings, "mom", mom, **given)
    try:
        yield reader
    finally:
        reader.end()


def read(settings: SourceSettings, mom: Dsn, **options: Any) -> Turn:
    """One turn of a process that then ends."""
    with reading(settings, mom, **options) as reader:
        return reader.turn(lambda: False)


def arrived(mom: Dsn) -> list[dict[str, Any]]:
    """The messages in the inbox, in order of arrival."""
    with connect(mom) as connection:
        rows = fetch(
            connection,
            "SELECT message_id, to_service, from_service, key, message_type, headers, body, source,"
            " created_at, deliver_at, expires_at FROM saf.inbox ORDER BY id",
        )
    names = (
        *("message_id", "to_service", "from_service", "key", "message_type", "headers", "body"),
        *("source", "created_at", "deliver_at", "expires_at"),
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def dead(mom: Dsn) -> list[tuple[str, str, bytes]]:
    """Reason, subscription and body of each dead letter."""
    with connect(mom) as connection:
        return fetch(
            connection,
            "SELECT reason, s.name, body FROM saf.dead_letter JOIN saf.subscription s "
            "USING (subscription_id) ORDER BY dead_letter_id",
        )


def written(
    file: Path, mom: Dsn, source: RedisServer | str, *, app: Dsn | None = None, **more: object
) -> Path:
    """Write a saf.toml with the stream as a source."""
    address = source if isinstance(source, str) else source.address
    settings = {
        "kind": "redis", "server": address, "topic": TOPIC, "service": "billing", **more
    }  # fmt: skip
    return _written(file, mom, settings, app)


def written_of(file: Path, mom: Dsn, source: SourceSettings) -> Path:
    """Write a saf.toml with a source of any kind, without secrets."""
    return _written(file, mom, source.model_dump(exclude_defaults=True) | {"kind": source.kind})


def _written(file: Path, mom: Dsn, settings: dict[str, Any], app: Dsn | None = None) -> Path:
    lines = [
        *([f"[brokers.app]\ndsn = {json.dumps(app.conninfo)}"] if app else []),
        f"[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}",
        f"[sources.{TOPIC}]",
        *(f"{name} = {json.dumps(value)}" for name, value in settings.items()),
        *(["[forwarder]", 'default_destination = "mom"'] if app else []),
    ]
    file.write_text("\n".join(lines) + "\n")
    return file
