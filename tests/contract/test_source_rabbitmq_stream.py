"""A stream of a RabbitMQ server as a source: killed, made again, compressed, of other writers."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from saf.database import Dsn
from saf.destinations.queues import Format
from saf.destinations.rabbitmq_stream import RabbitmqStream as Destination
from saf.destinations.rabbitmq_stream import amqp
from saf.destinations.rabbitmq_stream.connection import Command, batched, frame
from saf.errors import SourceSetBack, TopicMadeAgain, Unavailable
from saf.sources import BEGINNING
from saf.sources.rabbitmq_stream import RabbitmqStream
from saf.testing.source_conformance import Written
from tests.pipeline import bodies
from tests.rabbitmq_server import RabbitmqServer
from tests.source_suite import Add, SourceSuite, numbers
from tests.topics import TOPIC, amqp_of, arrived, dead, read, reading, stream_source, texts
from tests.waits import until

pytestmark = pytest.mark.slow


class TestRabbitmqStream(SourceSuite):
    """What every source has to keep."""

    @pytest.fixture
    def server(self, rabbitmq: RabbitmqServer) -> RabbitmqServer:
        return rabbitmq

    @pytest.fixture
    def add(self, rabbitmq: RabbitmqServer) -> Add:
        return lambda bodies: rabbitmq.publish(TOPIC, [*map(amqp_of, texts(bodies))])

    @pytest.fixture
    def delete(self, rabbitmq: RabbitmqServer) -> Callable[[], object]:
        return lambda: rabbitmq.delete(TOPIC)

    def source(self, server: Any, topic: str | None = None, **more: Any) -> RabbitmqStream:
        return stream_source(server, **more, **({"topic": topic} if topic else {}))

    def destination(self, server: Any, form: Format) -> Destination:
        return Destination(server=server.address, format=form)

    def test_a_stream_made_again_with_more_messages_is_refused(
        self, server: RabbitmqServer, billing: Dsn, add: Add
    ) -> None:
        add(numbers(10))
        read(stream_source(server), billing)
        server.delete(TOPIC)
        add(["other"] * 20)
        with pytest.raises(TopicMadeAgain, match=r"\(its first chunk\), and is"):
            read(stream_source(server), billing)
        assert bodies(billing) == numbers(10)

    def test_a_stream_made_again_while_it_is_read_is_refused(
        self, server: RabbitmqServer, billing: Dsn, add: Add
    ) -> None:
        add(numbers(10))
        with reading(stream_source(server), billing) as reader:
            reader.turn(lambda: False)
            server.delete(TOPIC)
            add(["other"] * 20)
            with pytest.raises(Unavailable):
                reader.turn(lambda: False)  # the server reports the end of the subscription
            with pytest.raises(TopicMadeAgain):
                reader.turn(lambda: False)
        assert bodies(billing) == numbers(10)

    def test_a_message_of_another_writer_has_all_its_headers(
        self, server: RabbitmqServer, billing: Dsn
    ) -> None:
        values = (
            b"\x41", b"\x40", b"\x56\x00", b"\x54\xff", b"\x43",
            b"\x80" + struct.pack(">Q", 1 << 40),
            b"\x82" + struct.pack(">d", 1.5), b"\x83" + struct.pack(">q", 1000), b"\xa3\x01s",
            b"\xa0\x01\xff",
        )  # fmt: skip
        pairs = b"".join(amqp.text(f"h{place}") + value for place, value in enumerate(values))
        properties = b"\xc0\x07\x02\xa1\x03m-1\x40"
        entry = (
            b"\0\x53\x70\x45\0\x53\x73" + properties
            + b"\0\x53\x74" + struct.pack(">BII", 0xD1, len(pairs) + 4, 2 * len(values)) + pairs
            + b"\0\x53\x77\xa1\x02hi"
        )  # fmt: skip
        server.publish(TOPIC, [entry])
        read(stream_source(server), billing)
        (found,) = arrived(billing)
        assert found["body"] == b"hi"
        assert found["headers"] == {
            "message-id": "m-1", "h0": "true", "h2": "false", "h3": "-1", "h4": "0",
            "h5": str(1 << 40), "h6": "1.5", "h7": "1970-01-01T00:00:01+00:00", "h8": "s",
            "h9": {"base64": "/w=="},
        }  # fmt: skip

    def test_what_a_queues_client_has_added_is_read(
        self, server: RabbitmqServer, billing: Dsn
    ) -> None:
        import pika

        with server.channel() as channel:
            arguments = {"x-queue-type": "stream"}
            channel.queue_declare(TOPIC, durable=True, arguments=arguments)
            given = pika.BasicProperties(headers={"order": "A-1", "n": 7}, content_type="text/x")
            channel.basic_publish("", TOPIC, b"hello", given)
        until(lambda: read(stream_source(server, key_header="order"), billing).messages)
        (found,) = arrived(billing)
        assert (found["body"], found["key"]) == (b"hello", "A-1")
        assert found["headers"]["content-type"] == "text/x"
        assert found["headers"]["n"] == "7"

    def test_what_is_no_message_of_amqp_is_a_dead_letter_between_its_neighbours(
        self, server: RabbitmqServer, billing: Dsn
    ) -> None:
        before, after = map(amqp_of, texts(["before", "after"]))
        bad = [
            b"junk",
            b"\0\x53\x75\xb0\xff\xff\xff\xff",
            b"\0\x53\x76\x45",
            b"\0\x53\x74\xc1\x02\x01",
        ]
        server.publish(TOPIC, [before, *bad, after])
        turn = read(stream_source(server), billing)
        assert (turn.messages, turn.dead) == (2, 4)
        assert bodies(billing) == ["before", "after"]
        assert [(reason, body) for reason, _, body in dead(billing)] == [
            ("undecodable", body) for body in bad
        ]

    @pytest.mark.parametrize(("kind", "codec"), [(0, None), (1, "gzip"), (3, "lz4"), (4, "zstd")])
    def test_batches_of_other_writers_are_read(
        self, server: RabbitmqServer, billing: Dsn, kind: int, codec: str | None
    ) -> None:
        add_batch(server, kind, codec, [*map(amqp_of, texts(numbers(5)))])
        server.publish(TOPIC, [*map(amqp_of, texts(["5"]))])
        read(stream_source(server, chunk_rows=2), billing)
        assert bodies(billing) == numbers(6)

    def test_a_batch_that_cannot_be_read_is_a_dead_letter_for_each_message(
        self, server: RabbitmqServer, billing: Dsn
    ) -> None:
        server.publish(TOPIC, [*map(amqp_of, texts(["before"]))])
        add_batch(server, 2, None, [*map(amqp_of, texts(numbers(3)))])
        server.publish(TOPIC, [*map(amqp_of, texts(["after"]))])
        turn = read(stream_source(server), billing)
        assert (turn.messages, turn.dead) == (2, 3)
        assert bodies(billing) == ["before", "after"]

    def test_large_chunks_wait_at_the_server(self, server: RabbitmqServer) -> None:
        for _ in range(20):
            server.publish(TOPIC, [amqp_of(Written(body=b"x" * 1000))] * 50)
        with closing(stream_source(server).open("t")) as source:
            source.connect()
            found = source.read(0, BEGINNING, 10_000, 30_000).records
            waiting: Any = source
            chunks = waiting._link._chunks[1]
            assert 30 <= len(found) <= 31
            assert len(waiting._left) + sum(len(one.entries) for one in chunks) <= 150
            rest = source.read(0, found[-1].position, 10_000, 1 << 30).records
        assert len(found) + len(rest) == 1000

    def test_only_the_leader_of_a_stream_is_read(
        self, server: RabbitmqServer, add: Add, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add(["1"])
        monkeypatch.setattr(
            "saf.destinations.rabbitmq_stream.connection.Connection._kept",
            lambda *_: {TOPIC: (("rabbit-7", "5552"), 3)},
        )
        refused = pytest.raises(Unavailable, match="the leader of stream 'payments', rabbit-7 is")
        with closing(stream_source(server).open("t")) as source, refused:
            source.connect()

    def test_a_server_that_was_set_back_is_refused(self, tmp_path: Path, billing: Dsn) -> None:
        own = RabbitmqServer(folder=tmp_path)
        own.start()
        try:
            own.publish(TOPIC, [*map(amqp_of, texts(numbers(5)))])
            own.kill()
            shutil.copytree(tmp_path / "data", tmp_path / "kept")
            own.start()
            own.publish(TOPIC, [*map(amqp_of, texts(numbers(5, 5)))])
            read(stream_source(own), billing)
            own.kill()
            shutil.rmtree(tmp_path / "data")
            (tmp_path / "kept").rename(tmp_path / "data")
            own.start()
            with pytest.raises(SourceSetBack, match="was read up to 10, and ends at 5"):
                read(stream_source(own), billing)
        finally:
            own.kill()
        assert bodies(billing) == numbers(10)


def add_batch(server: RabbitmqServer, kind: int, codec: str | None, messages: list[bytes]) -> None:
    """Add a batch of messages, as other clients do."""
    plain = b"".join(struct.pack(">I", len(one)) + one for one in messages)
    data = pa.compress(plain, codec=codec, asbytes=True) if codec else plain
    head = struct.pack(">BHII", 1 << 7 | kind << 4, len(messages), len(plain), len(data))
    with server.connected() as one:
        one.create(TOPIC, {})
        one.declare({0: ("", TOPIC)})
        entry = struct.pack(">BIQ", 0, 1, 0) + head + data
        one.send(frame(Command.PUBLISH, entry))
        one.confirm(1)


def test_a_read_may_begin_within_a_chunk(rabbitmq: RabbitmqServer) -> None:
    rabbitmq.publish(TOPIC, [*map(amqp_of, texts(numbers(10)))])
    with closing(stream_source(rabbitmq).open("t")) as source:
        source.connect()
        assert [one.body for one in source.read(0, (0, 7), 10).records] == [b"7", b"8", b"9"]


@pytest.mark.parametrize(
    ("data", "count", "plain", "kind"),
    [(b"\0\0\0\1a", 2, 5, 0), (b"\0\0\0\1ab", 1, 6, 0), (b"x", 1, 1 << 30, 0), (b"x", 1, 5, 1)],
)
def test_a_damaged_batch_is_an_error(data: bytes, count: int, plain: int, kind: int) -> None:
    with pytest.raises((ValueError, struct.error, OSError)):
        batched(data, count, plain, kind)
