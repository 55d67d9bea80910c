"""The forwarder to each queue, beside the queue's usual client in a bare loop, in one run.

At Redis, it is also beside faststream-outbox, whose table is in the same database.

The bare loop does no reading, no order, no marks: it has the same messages in memory already, as
the client wants them, and gives them in pipelines of a thousand. The server acknowledges durably
to both.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.drain import forward
from benchmarks.peers import faststream_redis
from benchmarks.peers.environment import python
from benchmarks.peers.relays import Relays
from benchmarks.stage import READ_AGAIN, Stage, execute, per_second
from saf.config import Settings, load
from saf.database import fetch
from saf_demo.kinds import serve

MESSAGES = 200_000
ROUNDS = 5
WARM_UP = 2
AT_ONCE = 1_000
FEW, RELAYS = 20_000, 2
"""What faststream-outbox gets, and its processes; as in `benchmarks.peers`."""
BYTES = 200
SOME = 10_000
"""What the client of NATS gets."""

FORGET = "TRUNCATE saf.acknowledged, saf.backoff, saf.parked"


def run(stage: Stage, spark: SparkSession) -> None:
    """Notes, for each queue, both rates and their ratio."""
    stage.fill(MESSAGES)
    redis_streams(stage, spark)
    nats_stream(stage, spark)
    kafka_topics(stage, spark)
    rabbitmq_queue(stage, spark, "classic")
    rabbitmq_queue(stage, spark, "quorum")
    rabbitmq_stream(stage, spark)


def redis_streams(stage: Stage, spark: SparkSession) -> None:
    """Notes redis_… ."""
    folder = Path(stage.server.data_dir).parent
    with serve("redis", folder / "redis") as there:
        import redis

        ((host, port),) = there.address.hosts
        client = redis.Redis(host=host, port=port, socket_timeout=300)
        settings = _settings(stage, "redis", f'server = "{there.server}"')
        messages = _fields(stage)

        def bare() -> float:
            started = time.monotonic()
            for at in range(0, MESSAGES, AT_ONCE):
                with client.pipeline(transaction=False) as pipeline:
                    for fields in messages[at : at + AT_ONCE]:
                        pipeline.xadd("bare", fields)
                    pipeline.execute()
            return time.monotonic() - started

        with _relayed(stage, there.server, client) as relayed:
            _compare(
                stage, spark, settings,
                name="redis", bare=bare, forget=client.flushall, others={"faststream": relayed},
            )  # fmt: skip


@contextmanager
def _relayed(stage: Stage, server: str, client: Any) -> Iterator[Callable[[], float]]:
    """What moves messages to Redis by faststream-outbox, and gives the seconds for all."""
    peer = faststream_redis
    env = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "APP": stage.app.conninfo,
        "MOM": server,
    }
    relays = Relays(python(peer.REQUIRES), "faststream_redis", RELAYS, env)
    relays.prepare()
    relays.start()

    def relayed() -> float:
        with stage.app.connect(role="bench", autocommit=True) as connection:
            peer.empty(connection)
            peer.add(connection, FEW, BYTES)
            connection.execute("VACUUM ANALYZE peer_outbox")
        started = time.monotonic()
        relays.drain()
        took = time.monotonic() - started
        if (arrived := client.xlen(peer.STREAM)) != FEW:
            raise RuntimeError(f"{arrived} of {FEW} messages have arrived")
        return took * MESSAGES / FEW

    try:
        yield relayed
    finally:
        relays.stop()


def nats_stream(stage: Stage, spark: SparkSession) -> None:
    """Notes nats_… . The bare client has no batches, and the server syncs each of its messages."""
    folder = Path(stage.server.data_dir).parent
    with serve("nats", folder / "nats") as there:
        given = f'server = "{there.server}"\nstream = "FLIGHTS"\ntopic = "flights.{{service}}"'
        settings = _settings(stage, "nats", given)
        messages = [(fields.pop("saf-body"), _texts(fields)) for fields in _fields(stage)[:SOME]]

        async def publish() -> None:
            import nats

            client = await nats.connect(there.server)
            stream = client.jetstream(publish_async_max_pending=AT_ONCE)
            for body, headers in messages:
                await stream.publish_async("flights.bare", body, headers=headers)
            await stream.publish_async_completed()
            await client.close()

        def bare() -> float:
            started = time.monotonic()
            asyncio.run(publish())
            return (time.monotonic() - started) * MESSAGES / SOME

        def forget() -> None:
            with there.connected("nats") as link:
                if link.stream() is not None:
                    link.ask("STREAM.DELETE")
                link.make()

        _compare(stage, spark, settings, name="nats", bare=bare, forget=forget)


def rabbitmq_queue(stage: Stage, spark: SparkSession, kind: str) -> None:
    """Notes rabbitmq_classic_… or rabbitmq_quorum_…, by the kind of the queue, which is durable.

    The bare client confirms asynchronously, as fast as it can.
    """
    folder = Path(stage.server.data_dir).parent
    with serve("rabbitmq", folder / f"rabbitmq_{kind}") as there:
        settings = _settings(stage, "rabbitmq", f'server = "{there.server}"\ntopic = "flights"')
        messages = [(fields.pop("saf-body"), _texts(fields)) for fields in _fields(stage)]
        import pika

        ((host, port),) = there.address.hosts
        where = pika.ConnectionParameters(host, port)

        def bare() -> float:
            given, state = iter(messages), {"sent": 0, "confirmed": 0}
            connection: Any = pika.SelectConnection(
                where, on_open_callback=lambda it: it.channel(on_open_callback=opened)
            )

            def opened(channel: Any) -> None:
                channel.confirm_delivery(confirmed, callback=lambda _: more(channel))

            def more(channel: Any) -> None:
                for body, headers in itertools.islice(given, AT_ONCE):
                    said = pika.BasicProperties(
                        headers=headers, delivery_mode=2, message_id=headers["saf-id"]
                    )
                    channel.basic_publish("", "flights", body, said, mandatory=True)
                    state["sent"] += 1
                if state["sent"] < MESSAGES:
                    ahead = state["sent"] - state["confirmed"] > 10 * AT_ONCE
                    connection.ioloop.call_later(0.001 if ahead else 0, lambda: more(channel))

            def confirmed(frame: Any) -> None:
                tag, several = frame.method.delivery_tag, frame.method.multiple
                state["confirmed"] = tag if several else state["confirmed"] + 1
                if state["confirmed"] >= MESSAGES:
                    connection.ioloop.stop()

            started = time.monotonic()
            connection.ioloop.start()
            took = time.monotonic() - started
            connection.close()
            return took

        def forget() -> None:
            with closing(pika.BlockingConnection(where)) as connection:
                channel = connection.channel()
                channel.queue_delete("flights")
                given = {"x-queue-type": kind}
                channel.queue_declare("flights", durable=True, arguments=given)

        name = f"rabbitmq_{kind}"
        _compare(stage, spark, settings, name=name, bare=bare, forget=forget)


def kafka_topics(stage: Stage, spark: SparkSession) -> None:
    """Notes kafka_… . The bare client gives all messages, and waits for all: no transactions."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public

    from saf.destinations.kafka.client import QUIET

    folder = Path(stage.server.data_dir).parent
    with serve("kafka", folder / "kafka") as there:
        given = f'brokers = "{there.brokers}"\ntopic = "flights.{{service}}"'
        settings = _settings(stage, "kafka", given)
        messages: list[Any] = [
            (fields.pop("saf-body"), fields["saf-key"], [*_texts(fields).items()])
            for fields in _fields(stage)
        ]
        quiet: dict[str, Any] = {"bootstrap.servers": there.brokers, "logger": QUIET}
        admin = AdminClient(quiet)
        producer = Producer({
            **quiet,
            "enable.idempotence": True, "linger.ms": 20,
            "partitioner": "murmur2_random", "queue.buffering.max.messages": 2 * MESSAGES,
        })  # fmt: skip

        def bare() -> float:
            started = time.monotonic()
            for body, key, headers in messages:
                producer.produce("bare", body, key, headers=headers)
            producer.flush()
            return time.monotonic() - started

        def forget() -> None:
            known = admin.list_topics(timeout=60).topics
            ours = [topic for topic in known if topic.startswith(("flights.", "saf.", "bare"))]
            for deleted in admin.delete_topics(ours).values() if ours else ():
                deleted.result()
            while {*admin.list_topics(timeout=60).topics} & {*ours}:
                time.sleep(0.1)
            for made in admin.create_topics([NewTopic("bare", 1)]).values():
                made.result()
            producer.list_topics("bare", timeout=60)
            with closing(there.link("mom")) as link:  # the topics of both are there
                link.make_identity()
                link.limits({f"flights.{dict(headers)['saf-service']}" for *_, headers in messages})

        _compare(stage, spark, settings, name="kafka", bare=bare, forget=forget)


def rabbitmq_stream(stage: Stage, spark: SparkSession) -> None:
    """Notes rabbitmq_stream_… . The bare client numbers its messages, as a careful one would."""
    from saf.destinations.rabbitmq_stream.connection import Command, text

    folder = Path(stage.server.data_dir).parent
    with serve("rabbitmq_stream", folder / "rabbitmq_stream") as there:
        given = f'server = "{there.server}"\ntopic = "flights"'
        settings = _settings(stage, "rabbitmq_stream", given)
        messages = [(fields.pop("saf-body"), _texts(fields)) for fields in _fields(stage)]
        streams = ["flights", there.marks, f"{there.marks}.{messages[0][1]['saf-source']}"]

        async def publish() -> None:
            import rstream

            ((host, port),) = there.address.hosts
            done, confirmed = asyncio.Event(), itertools.count(1)

            async def on_confirm(_: Any) -> None:
                if next(confirmed) == MESSAGES:
                    done.set()

            async with rstream.Producer(host, port, username="guest", password=there.secret) as one:
                for at in range(0, MESSAGES, AT_ONCE):
                    batch = [
                        rstream.AMQPMessage(body=body, application_properties=headers)
                        for body, headers in messages[at : at + AT_ONCE]
                    ]
                    await one.send_batch(
                        "flights", batch, publisher_name="bare", on_publish_confirm=on_confirm
                    )
                await done.wait()

        def bare() -> float:
            started = time.monotonic()
            asyncio.run(publish())
            return time.monotonic() - started

        def forget() -> None:
            with there.connected("rabbitmq_stream") as link:
                for stream in link.connection.replicas(streams):
                    link.connection.ask(Command.DELETE, text(stream))
                link.connection.create("flights", {})

        _compare(stage, spark, settings, name="rabbitmq_stream", bare=bare, forget=forget)


def _settings(stage: Stage, kind: str, given: str) -> Settings:
    """The stage's settings, with a queue instead of its MOM store."""
    file = stage.settings_file(Path(stage.server.data_dir).parent / f"{kind}.toml")
    text = file.read_text()
    first, last = text.index("[destinations.mom]"), text.index("[forwarder]")
    file.write_text(f'{text[:first]}[destinations.mom]\nkind = "{kind}"\n{given}\n{text[last:]}')
    return load(file)


def _texts(fields: dict[Any, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in fields.items() if value is not None}


def _fields(stage: Stage) -> list[dict[Any, Any]]:
    """The same messages as entries of a stream."""
    query = """
    SELECT message_id::text, shard, to_service, key, message_type, created_at::text,
           headers ->> 'content-type', body, (SELECT broker_id::text FROM saf.broker)
    FROM saf.outbox ORDER BY id
    """
    with stage.app.connect(role="bench") as connection:
        rows = fetch(connection, query)
    names = (
        "id",
        "shard",
        "service",
        "key",
        "type",
        "created-at",
        "content-type",
        "body",
        "source",
    )
    return [dict(zip((f"saf-{name}" for name in names), row, strict=True)) for row in rows]


def _compare(
    stage: Stage,
    spark: SparkSession,
    settings: Settings,
    *,
    name: str,
    bare: Callable[[], float],
    forget: Callable[[], object],
    others: Mapping[str, Callable[[], float]] | None = None,
) -> None:
    turns = {
        "forwarder": lambda: forward(spark, settings, MESSAGES),
        "bare": bare,
        **(others or {}),
    }
    seconds: dict[str, list[float]] = {which: [] for which in turns}
    for number in range(WARM_UP + ROUNDS):
        # in turns: what goes first finds a quieter server
        for which in sorted(seconds, reverse=number % 2 == 1):
            forget()
            execute(stage.app, READ_AGAIN, FORGET, "VACUUM saf.cursor", "CHECKPOINT")
            took = turns[which]()
            if number >= WARM_UP:
                seconds[which].append(took)
    for which, values in seconds.items():
        stage.note(f"{name}_{which}_messages_per_second", per_second(MESSAGES, values), "1/s")
    for which, reach in {"bare": ">= 0.7", **dict.fromkeys(others or {}, ">= 10")}.items():
        ratios = [b / f for b, f in zip(seconds[which], seconds["forwarder"], strict=True)]
        of, what = ("", "the bare client") if which == "bare" else (f"_to_{which}", which)
        stage.note(f"{name}_ratio{of}", ratios, f"of {what}", reach)
