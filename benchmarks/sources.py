"""Topics read into an inbox, beside other readers of the same topics, in one run.

The usual client of the queue reads and drops: it decodes nothing and stores nothing. Kafka Connect
writes a topic into a table (`benchmarks.kafka_connect`). The topics have messages of 200 bytes as
saf writes them, with eight headers each, and as another writer does, with a key and no headers.
Inbox, server and reader share the machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from psycopg.conninfo import make_conninfo

from benchmarks import kafka_connect
from benchmarks.drain import machine_cpu
from benchmarks.stage import Stage, execute, per_second
from benchmarks.table import ADDRESS, by_network
from saf.broker.services import create_service
from saf.config import Settings
from saf.database import Dsn
from saf.destinations.settings import DestinationSettings
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from saf.sources.kafka import Kafka
from saf.sources.nats import Nats
from saf.sources.reader import Reader
from saf.sources.redis import Redis
from saf.sources.settings import SourceSettings
from saf_demo.kinds import serve

MESSAGES = 200_000
ROUNDS = 5
WARM_UP = 1
ROUNDS_OF_PEERS = 3
AT_ONCE = 1_000
BYTES = 200
PARTITIONS = 4
SUBJECT = "flights.billing"
FORGET = ("TRUNCATE saf.inbox, saf.watermark, saf.dead_letter", "DELETE FROM saf.source")


@dataclass(frozen=True, kw_only=True)
class Topic:
    """A topic that has all messages."""

    name: str
    settings: SourceSettings
    bare: Callable[[], int]
    """Reads and drops all messages, and returns their number."""
    goal: str
    peers: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    """Other readers, which return the seconds that they take."""


def run(stage: Stage) -> None:
    """Note, for each topic, both rates, their ratio and the processor time of a message."""
    with stage.mom.connect(role="bench", autocommit=True) as connection:
        create_service(connection, "billing")
    stage.fill(MESSAGES, BYTES)
    by_network(stage)
    folder = Path(stage.server.data_dir).parent
    for served in (redis_streams, nats_stream, kafka_topics):
        with served(stage, folder) as topics:
            for topic in topics:
                compare(stage, topic)


@contextmanager
def redis_streams(stage: Stage, folder: Path) -> Iterator[list[Topic]]:
    """Yield two streams of a Redis server."""
    with serve("redis", folder / "redis") as there:
        fill(stage, there)
        ours = f"{{{there.hash_tag}}}:billing"
        with there.connected("redis") as link:
            client = link.client
            for first in range(0, MESSAGES, AT_ONCE):
                with client.pipeline(transaction=False) as pipeline:
                    for number in range(first, first + AT_ONCE):
                        pipeline.xadd(
                            "others", {"body": body(number), "order": f"A-{number % 5000}"}
                        )
                    pipeline.execute()

            def bare(stream: str) -> int:
                count, after = 0, "-"
                while entries := client.xrange(stream, after, "+", count=AT_ONCE):
                    count += len(entries)
                    after = f"({entries[-1][0].decode()}"
                return count

            yield [
                Topic(
                    name=name,
                    settings=Redis(
                        server=there.server, topic=stream, service="billing", key_header="order"
                    ),
                    bare=lambda stream=stream: bare(stream),  # type: ignore[misc]
                    goal=">= 40,000",
                )
                for name, stream in (("redis", ours), ("redis_others", "others"))
            ]


@contextmanager
def nats_stream(stage: Stage, folder: Path) -> Iterator[list[Topic]]:
    """Yield a stream of a NATS server, with the messages of saf."""
    import nats
    from nats.js.api import AckPolicy, ConsumerConfig

    with serve("nats", folder / "nats") as there:
        fill(stage, there)

        async def bare() -> int:
            client = await nats.connect(there.server)
            consumer = ConsumerConfig(ack_policy=AckPolicy.NONE)
            subscription = await client.jetstream().pull_subscribe(
                SUBJECT, stream=there.stream, config=consumer
            )
            count = 0
            while count < MESSAGES:
                count += len(await subscription.fetch(AT_ONCE, timeout=10))
            await client.close()
            return count

        settings = Nats(server=there.server, stream=there.stream, topic=SUBJECT, service="billing")
        yield [
            Topic(
                name="nats",
                settings=settings,
                bare=lambda: asyncio.run(bare()),
                goal=">= 40,000",
            )
        ]


@contextmanager
def kafka_topics(stage: Stage, folder: Path) -> Iterator[list[Topic]]:
    """Yield two topics of a Kafka broker."""
    from confluent_kafka import Consumer, Producer, TopicPartition
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public

    with serve("kafka", folder / "kafka") as there:
        fill(stage, there.model_copy(update={"partitions": PARTITIONS}))
        quiet: dict[str, Any] = {"bootstrap.servers": there.brokers}
        admin = AdminClient(quiet)
        for made in admin.create_topics([NewTopic("others", PARTITIONS)]).values():
            made.result()
        producer = Producer(
            {**quiet, "linger.ms": 20, "queue.buffering.max.messages": 2 * MESSAGES}
        )
        for number in range(MESSAGES):
            producer.produce("others", body(number), f"A-{number % 5000}")
        producer.flush()

        def bare(topic: str) -> int:
            consumer = Consumer({
                **quiet, "group.id": "bare", "enable.auto.commit": False,
                "isolation.level": "read_committed",
            })  # fmt: skip
            with closing(consumer):
                consumer.assign([TopicPartition(topic, one, 0) for one in range(PARTITIONS)])
                count = 0
                while count < MESSAGES:
                    count += len(consumer.consume(AT_ONCE, 1.0))
            return count

        def connect(topic: str) -> float:
            to = Dsn(make_conninfo(stage.mom.conninfo, host=ADDRESS))
            own = folder / "connect"
            return kafka_connect.seconds_to_write(there.brokers, topic, to, own, MESSAGES)

        yield [
            Topic(
                name=name,
                settings=Kafka(brokers=there.brokers, topic=topic, service="billing"),
                bare=lambda topic=topic: bare(topic),  # type: ignore[misc]
                goal=">= 60,000",
                peers={"connect": partial(connect, topic)} if topic == "others" else {},
            )
            for name, topic in (("kafka", SUBJECT), ("kafka_others", "others"))
        ]


def fill(stage: Stage, there: DestinationSettings) -> None:
    """Send all messages to a destination, as a forwarder does."""
    stage.rewind()
    settings = Settings.model_validate({
        "brokers": {"app": {"dsn": stage.app.conninfo}},
        "destinations": {"there": there},
        "forwarder": {"default_destination": "there"},
    })  # fmt: skip
    summary = Forwarder(settings, InProcess()).drain()
    if summary.forwarded != MESSAGES:
        raise RuntimeError(f"expected {MESSAGES} messages: {summary}")


def body(number: int) -> bytes:
    """Return the body of another writer's message."""
    return f'{{"order": {number}'.ljust(BYTES, "x").encode()


def compare(stage: Stage, topic: Topic) -> None:
    """Note how both have done, in turns."""
    turns: Mapping[str, Callable[[], int]] = {
        "source": lambda: store(stage, topic),
        "bare": topic.bare,
    }
    seconds: dict[str, list[float]] = {which: [] for which in turns}
    work: list[float] = []
    for number in range(WARM_UP + ROUNDS):
        for which in sorted(turns, reverse=number % 2 == 1):
            execute(stage.mom, *FORGET, "CHECKPOINT")
            before, started = machine_cpu(), time.monotonic()
            count = turns[which]()
            took, cpu = time.monotonic() - started, machine_cpu() - before
            if count != MESSAGES:
                raise RuntimeError(f"{topic.name}: {which} read {count} messages")
            if number < WARM_UP:
                continue
            seconds[which].append(took)
            if which == "source":
                work.append(cpu / MESSAGES * 1e6)
    name = f"source_{topic.name}"
    stage.note(f"{name}_messages_per_second", per_second(MESSAGES, seconds["source"]), "1/s",
               topic.goal)  # fmt: skip
    stage.note(f"{name}_bare_messages_per_second", per_second(MESSAGES, seconds["bare"]), "1/s")
    ratios = [b / s for b, s in zip(seconds["bare"], seconds["source"], strict=True)]
    stage.note(f"{name}_ratio", ratios, "of the bare client")
    stage.note(f"{name}_cpu_us", work, "µs a message, of the whole machine")
    for peer, takes in topic.peers.items():
        rounds = [takes() for _ in range(ROUNDS_OF_PEERS)]
        stage.note(f"{name}_{peer}_messages_per_second", per_second(MESSAGES, rounds), "1/s")


def store(stage: Stage, topic: Topic) -> int:
    """Read a topic into the inbox; return the number of stored messages."""
    reader = Reader(
        "bench", topic.settings, "mom", stage.mom,
        lease_seconds=30.0, max_bytes=1 << 20, chunk_bytes=32 << 20,
    )  # fmt: skip
    try:
        count = reader.turn(lambda: False).messages
    finally:
        reader.end()
    return count
