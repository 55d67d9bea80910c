"""A queue of a RabbitMQ server as a source: once within the window, whatever is killed or lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pika
import pytest
from pydantic import SecretStr

from saf.config import load
from saf.database import Dsn, fetch
from saf.destinations.queues import Format
from saf.destinations.rabbitmq import Rabbitmq as Destination
from saf.errors import Refused, Unavailable, UsageError
from saf.failpoints import arm
from saf.operating.sources import resume
from saf.sources import BEGINNING
from saf.sources.rabbitmq import Rabbitmq
from saf.sources.rabbitmq.queue import FIRST_READ
from saf.testing.source_conformance import Written
from tests.pipeline import bodies, connect
from tests.rabbitmq_server import Queues, rabbitmq_server
from tests.receivers import prepare
from tests.source_suite import Add, SourceSuite, numbers
from tests.topics import (
    TOPIC,
    amqp_of,
    arrived,
    queue_source,
    read,
    reading,
    stream_source,
    texts,
    with_ids,
    written_of,
)
from tests.waits import until

pytestmark = pytest.mark.slow


class Interrupted(Exception):
    """A process that ends in the middle."""


def interrupt() -> None:
    raise Interrupted


@pytest.fixture
def disarmed() -> Iterator[None]:
    yield
    arm("")


@pytest.mark.usefixtures("disarmed")
class TestRabbitmq(SourceSuite):
    """What every source has to keep."""

    @pytest.fixture
    def server(self, rabbitmq_queues: Queues) -> Queues:
        rabbitmq_queues.delete(TOPIC)
        return rabbitmq_queues

    @pytest.fixture
    def add(self, server: Queues) -> Add:
        return lambda bodies: server.publish(TOPIC, with_ids(bodies))

    @pytest.fixture
    def delete(self, server: Queues) -> Callable[[], object]:
        return lambda: server.delete(TOPIC)

    def source(self, server: Any, topic: str | None = None, **more: Any) -> Rabbitmq:
        return queue_source(server, **more, **({"topic": topic} if topic else {}))

    def destination(self, server: Any, form: Format) -> Destination:
        return Destination(server=server.address, format=form)

    def interrupted(self, source: Rabbitmq, mom: Dsn, point: str) -> None:
        """A process that ends at a point."""
        arm(point, interrupt)
        with pytest.raises(Interrupted):
            read(source, mom)
        arm("")

    def all_read(self, source: Rabbitmq, mom: Dsn, queue: Queues) -> int:
        """Read until the queue is empty; return the number of messages that came again."""
        dropped = 0

        def done() -> bool:
            nonlocal dropped
            dropped += read(source, mom).dropped
            return not queue.messages(TOPIC)

        until(done)
        return dropped

    @pytest.mark.parametrize("point", ["mom_insert:3", "mom_commit:3", "source_stored:3"])
    def test_what_comes_again_after_its_commit_is_dropped(
        self, server: Queues, billing: Dsn, add: Add, point: str
    ) -> None:
        source = queue_source(server, chunk_rows=10)
        add(numbers(100))
        self.interrupted(source, billing, point)
        dropped = self.all_read(source, billing, server)
        assert dropped == (0 if point == "mom_insert:3" else 10)
        assert bodies(billing) == numbers(100)

    def test_a_window_of_none_stores_at_least_once(
        self, server: Queues, billing: Dsn, add: Add
    ) -> None:
        source = queue_source(server, chunk_rows=10, window_messages=0)
        add(numbers(30))
        self.interrupted(source, billing, "source_stored:1")
        self.all_read(source, billing, server)
        assert bodies(billing) == [*numbers(10), *numbers(30)]
        assert windows(billing) == []

    def test_messages_without_an_id_are_stored_at_least_once(
        self, server: Queues, billing: Dsn
    ) -> None:
        source = queue_source(server, chunk_rows=10)
        server.publish(TOPIC, [Written(body=one.body, key="") for one in texts(numbers(30))])
        self.interrupted(source, billing, "source_stored:1")
        self.all_read(source, billing, server)
        assert bodies(billing) == [*numbers(10), *numbers(30)]
        assert len({row["message_id"] for row in arrived(billing)}) == 40

    def test_the_window_is_bounded_by_messages(
        self, server: Queues, billing: Dsn, add: Add
    ) -> None:
        source = queue_source(server, chunk_rows=5, window_messages=20)
        add(numbers(103))
        self.all_read(source, billing, server)
        assert bodies(billing) == numbers(103)
        kept = windows(billing)
        assert 20 <= sum(count for _, count in kept) < 25 + 5
        assert kept[-1][0] == 103

    def test_the_window_is_bounded_by_age_as_messages_are_stored(
        self, server: Queues, billing: Dsn, add: Add
    ) -> None:
        source = queue_source(server, chunk_rows=5, window_seconds=3600)
        add(numbers(10))
        self.all_read(source, billing, server)
        with connect(billing) as connection:
            connection.execute("UPDATE saf.source_window SET stored_at = now() - interval '2 h'")
        assert len(windows(billing)) == 2
        read(source, billing)
        assert len(windows(billing)) == 2  # nothing was stored
        add(["10"])
        self.all_read(source, billing, server)
        assert [count for _, count in windows(billing)] == [1]

    def test_what_comes_again_outside_of_the_window_is_stored_again(
        self, server: Queues, billing: Dsn
    ) -> None:
        source = queue_source(server, chunk_rows=5, window_messages=10)
        first, *others = with_ids(numbers(30))
        server.publish(TOPIC, [first, *others[:5], first])
        self.all_read(source, billing, server)
        assert bodies(billing) == numbers(6)
        server.publish(TOPIC, [*others[5:], first])
        self.all_read(source, billing, server)
        assert bodies(billing) == [*numbers(30), "0"]
        assert len({row["message_id"] for row in arrived(billing)}) == 30

    def test_a_window_outlives_its_process_and_goes_with_its_source(
        self, server: Queues, billing: Dsn, tmp_path: Path
    ) -> None:
        source = queue_source(server)
        messages = with_ids(numbers(5))
        for _ in range(2):
            server.publish(TOPIC, messages)
            self.all_read(source, billing, server)
        assert bodies(billing) == numbers(5)
        settings = load(written_of(tmp_path / "saf.toml", billing, source))
        with pytest.raises(UsageError, match="is a queue, which has no places to skip to"):
            resume(settings, TOPIC, "latest", "")
        resume(settings, TOPIC, "earliest", "")
        assert windows(billing) == []

    def test_a_chunk_that_was_read_ahead_and_not_stored_comes_again(
        self, server: Queues, billing: Dsn, add: Add
    ) -> None:
        source = queue_source(server, chunk_rows=10)
        add(numbers(60))
        answers = iter([False, False, True])  # a wish to stop after two chunks
        with reading(source, billing) as reader:
            reader.turn(lambda: next(answers))
            assert bodies(billing) == numbers(20)
            until(lambda: reader.turn(lambda: False).messages)
            until(lambda: not reader.turn(lambda: False).messages and not server.messages(TOPIC))
        assert bodies(billing) == numbers(60)

    def test_the_next_owner_knows_what_the_one_before_has_stored(
        self, server: Queues, billing: Dsn, add: Add
    ) -> None:
        source = queue_source(server, chunk_rows=10)
        add(numbers(30))
        with reading(source, billing, lease_seconds=1e6) as frozen:
            arm("source_stored:1", lambda: expire(billing))
            frozen.turn(lambda: False)
            frozen.close()
            add(numbers(10, 30))
            self.all_read(source, billing, server)
        assert bodies(billing) == numbers(40)

    def test_a_process_that_was_stopped_with_messages_in_hand_keeps_their_order(
        self, server: Queues, billing: Dsn, add: Add
    ) -> None:
        source = queue_source(server, chunk_rows=10)
        add(numbers(60))

        def overtaken() -> None:
            expire(billing)
            with pytest.raises(Unavailable, match="has another consumer"):
                read(source, billing)

        with reading(source, billing) as stopped:
            arm("source_stored:1", overtaken)
            stopped.turn(lambda: False)
            self.all_read(source, billing, server)
        assert bodies(billing) == numbers(60)

    def test_a_queue_with_another_consumer_is_not_read(
        self, server: Queues, billing: Dsn, add: Add
    ) -> None:
        source = queue_source(server)
        add(numbers(3))
        with server.channel() as channel:
            channel.basic_qos(prefetch_count=1)
            channel.basic_consume(TOPIC, lambda *_: None)
            with pytest.raises(Unavailable, match="queue 'payments' has another consumer"):
                read(source, billing)
        assert self.all_read(source, billing, server) == 0
        assert sorted(bodies(billing)) == numbers(3)

    def test_large_bodies_bound_what_is_read_at_a_time(self, server: Queues, add: Add) -> None:
        add(["x" * 10_000] * 150)
        with closing(queue_source(server).open("t")) as source:
            source.connect()
            first = source.read(0, BEGINNING, 10_000, 30_000).records
            consumer: Any = source
            until(lambda: source.extent(0).exists and len(consumer._link._messages) > 3)
            second = source.read(0, first[-1].position, 10_000, 30_000).records
            assert (len(first), len(second)) == (3, 3)
            unacknowledged = 6 + len(consumer._link._messages)
            assert unacknowledged <= 2 * FIRST_READ + 6

    def test_a_message_of_another_writer_has_its_headers_and_properties(
        self, server: Queues, billing: Dsn
    ) -> None:
        given = pika.BasicProperties(
            message_id="m-1", correlation_id="c-1", content_type="text/plain", timestamp=1_000,
            headers={"order": "A-1", "n": 7, "yes": True, "list": [1], "none": None},
        )  # fmt: skip
        server.declare(TOPIC)
        with server.channel() as channel:
            channel.queue_bind(TOPIC, "amq.topic", "payments.*")
            channel.basic_publish("amq.topic", "payments.eu", b"hello", given)
        until(lambda: read(queue_source(server, key_header="order"), billing).messages)
        (found,) = arrived(billing)
        assert (found["body"], found["key"], found["created_at"].year) == (b"hello", "A-1", 1970)
        assert found["headers"] == {
            "message-id": "m-1", "correlation-id": "c-1", "content-type": "text/plain",
            "order": "A-1", "n": "7", "yes": "true", "list": "[1]", "routing-key": "payments.eu",
        }  # fmt: skip


def test_a_user_needs_only_the_right_to_read(tmp_path: Path, mom: Dsn) -> None:
    prepare(mom)
    users = [
        {"name": name, "password": password, "tags": ""}
        for name, password in (("guest", "guest"), ("saf", "hunter2"), ("nobody", "hunter2"))
    ]
    nothing = {"vhost": "/", "configure": "", "write": "", "read": ""}
    everything = {"vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
    rights = [
        {**everything, "user": "guest"},
        {**nothing, "user": "saf", "read": "^(payments|stream)$"},
        {**nothing, "user": "nobody"},
    ]
    file = tmp_path / "definitions.json"
    file.write_text(json.dumps({"users": users, "vhosts": [{"name": "/"}], "permissions": rights}))
    with rabbitmq_server(tmp_path / "rabbitmq", load_definitions=str(file)) as server:
        Queues(server=server).publish(TOPIC, with_ids(["1"]))
        server.publish("stream", [amqp_of(one) for one in texts(["2"])])
        for user in ("nobody", "saf"):
            login: dict[str, Any] = {"username": user, "password": SecretStr("hunter2")}
            for source in (
                queue_source(Queues(server=server), **login),
                stream_source(server, topic="stream", **login),
            ):
                if user == "saf":
                    read(source, mom, name=source.topic)
                    continue
                with pytest.raises(Refused, match=r"docs/sources\.md lists"):
                    read(source, mom, name=source.topic)
    assert bodies(mom) == ["1", "2"]


def expire(mom: Dsn) -> None:
    """Let all leases be over."""
    with connect(mom) as connection:
        connection.execute("DELETE FROM saf.source_member")


def windows(mom: Dsn) -> list[tuple[int, int]]:
    """The number, and the count of ids, of each row of the window."""
    with connect(mom) as connection:
        return fetch(
            connection, "SELECT number, cardinality(ids) FROM saf.source_window ORDER BY number"
        )


def test_a_window_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="window_messages = 100 is less than two chunks"):
        Rabbitmq(server="amqp://r", topic="t", service="b", window_messages=100)
