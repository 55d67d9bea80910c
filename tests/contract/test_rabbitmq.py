"""Queues of a RabbitMQ server: at least once, killed, cut off, unroutable, full, too large."""

from __future__ import annotations

import json
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pydantic import SecretStr

from saf.database import Dsn, fetch
from saf.database.bounds import Bounds
from saf.destinations import Refusal
from saf.destinations.rabbitmq import Rabbitmq
from saf.errors import Refused, Rejected, Unavailable
from saf.operating.repair.reconcile import reconcile
from saf.testing.forwarder import Forwarder, all_stored
from saf_demo.servers import free_port
from tests.certificates import signed
from tests.destinations import route, send_to
from tests.lossy import Lossy
from tests.pipeline import connect, forward, let_time_pass
from tests.queue_suite import WEEK, AnyQueueSuite, errors, ids, send_numbers, texts
from tests.rabbitmq_server import Queues, rabbitmq_server
from tests.tiers import sized
from tests.waits import until

pytestmark = pytest.mark.slow  # its server takes seconds to start


@pytest.fixture
def queue(rabbitmq_queues: Queues) -> Queues:
    return rabbitmq_queues


@pytest.fixture
def events(queue: Queues) -> Rabbitmq:
    return Rabbitmq(server=queue.address)


@pytest.mark.full
class TestRabbitmq(AnyQueueSuite):
    """What every queue has to keep."""

    @pytest.fixture
    def queue(self, rabbitmq_queues: Queues) -> Queues:
        return rabbitmq_queues

    def at(self, port: int) -> Rabbitmq:
        return Rabbitmq(server=f"amqp://127.0.0.1:{port}", step_rows=100)


def test_what_no_queue_takes_is_a_dead_letter_and_its_neighbours_are_there_once(
    app: Dsn, queue: Queues, events: Rabbitmq
) -> None:
    with connect(app) as connection:
        for service in ("billing", "nobody"):
            route(connection, service, "events")
        for number in range(20):
            service = "nobody" if number in (3, 11) else "billing"
            send_to(connection, service, str(number), key=f"k{number % 3}")
        forward(app, chunk_rows=100, events=events)
        dead = fetch(connection, "SELECT reason, error FROM saf.dead_letter ORDER BY id")
    assert sorted(map(int, texts(queue))) == [n for n in range(20) if n not in (3, 11)]
    assert [reason for reason, _ in dead] == ["rejected"] * 2
    for _, error in dead:
        assert "NO_ROUTE: no queue is bound for routing key 'nobody' at exchange ''" in error


@pytest.mark.full
def test_each_message_is_persistent_and_has_its_id_and_content_type(
    app: Dsn, queue: Queues, events: Rabbitmq
) -> None:
    with connect(app) as connection:
        send_to(connection, "billing", "1", headers={"content-type": "text/plain", "n": 1})
        send_to(connection, "billing", "2")
    forward(app, chunk_rows=100, events=events)
    (first, _), (second, _) = queue.messages("billing")
    assert (first.delivery_mode, first.content_type) == (2, "text/plain")
    assert (second.delivery_mode, second.content_type) == (2, "application/octet-stream")
    assert first.message_id == first.headers["saf-id"] != second.message_id
    assert first.headers["n"] == "1"


@pytest.mark.full
def test_an_exchange_is_another_destination_with_other_routing_keys(
    app: Dsn, queue: Queues, events: Rabbitmq
) -> None:
    audit = events.model_copy(update={"topic": "audit"})
    queue.declare("audit")
    with connect(app) as connection:
        route(connection, "billing", "events")
        route(connection, "shipping", "audit")
        send_to(connection, "billing", "1")
        send_to(connection, "shipping", "2")
    done = forward(app, chunk_rows=100, events=events, audit=audit)
    assert [one.error for one in done if one.error] == []
    assert [body for service in ("billing", "audit") for _, body in queue.messages(service)] == [
        b"1",
        b"2",
    ]


@pytest.mark.full
@pytest.mark.parametrize("stored", [0, 500])
def test_a_server_that_is_killed_while_it_stores_has_all_messages_in_the_end(
    queue: Queues, events: Rabbitmq, stored: int
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(sized(4_000, 40_000))
    chunk = forwarder.chunk(rows)
    killed = threading.Event()

    def kill() -> None:
        until(lambda: waiting(queue) >= stored)
        queue.kill()
        killed.set()

    with closing(events.open("events")) as destination:
        destination.connect()
        threading.Thread(target=kill).start()
        while not killed.is_set():
            try:
                all_stored(destination.store(chunk, exactly_once=False))
            except Unavailable:
                killed.wait(timeout=60)
        queue.start()
        destination.close()
        all_stored(destination.store(chunk, exactly_once=False))
    assert set(ids(queue)) == {row["message_id"] for row in rows}


def waiting(queue: Queues) -> int:
    """How many messages wait."""
    with queue.channel() as channel:
        return int(channel.queue_declare("billing", passive=True).method.message_count)


def test_what_was_confirmed_outlives_the_server(queue: Queues, events: Rabbitmq) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(300)
    with closing(events.open("events")) as destination:
        destination.store(forwarder.chunk(rows), exactly_once=False)
    with queue.down():
        pass
    assert ids(queue) == [row["message_id"] for row in rows]


@pytest.mark.full
def test_after_a_lost_answer_messages_come_again_and_none_is_missing(queue: Queues) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(300)
    with Lossy(queue.port) as proxy:
        at = Rabbitmq(server=f"amqp://127.0.0.1:{proxy.port}", step_rows=100)
        with closing(at.open("events")) as destination:
            destination.connect()
            proxy.lose_answers_to(b"saf-created-at")
            with pytest.raises(Unavailable):
                all_stored(destination.store(forwarder.chunk(rows), exactly_once=False))
            proxy.lose_answers_to(b"")
            destination.store(forwarder.chunk(rows), exactly_once=False)
    there = ids(queue)
    assert len(there) > 300
    assert list(dict.fromkeys(there[-300:])) == [row["message_id"] for row in rows]


def test_what_was_confirmed_before_the_connection_broke_is_not_sent_again(queue: Queues) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(300)
    rows[150]["body"] = b"from here on, nobody hears an answer"
    with Lossy(queue.port) as proxy:
        at = Rabbitmq(server=f"amqp://127.0.0.1:{proxy.port}", step_rows=10)
        with closing(at.open("events")) as destination:
            proxy.lose_answers_to(b"from here on")
            refusal = destination.store(forwarder.chunk(rows), exactly_once=False)
            proxy.lose_answers_to(b"")
            destination.store(forwarder.chunk(rows), exactly_once=False)
    there = ids(queue)
    assert isinstance(refusal, Refusal)
    assert isinstance(refusal.error, Unavailable)
    assert refusal.stored is not None
    assert refusal.stored.num_rows > 100
    assert list(dict.fromkeys(there)) == [row["message_id"] for row in rows]
    assert len(there) <= 320


@pytest.mark.full
def test_a_server_that_hangs_is_unavailable(queue: Queues) -> None:
    events = Rabbitmq(server=queue.address).bounded(Bounds(statement_seconds=0.5))
    forwarder = Forwarder()
    with closing(events.open("events")) as destination:
        destination.connect()
        queue.freeze()
        try:
            with pytest.raises(Unavailable, match=r"no answer for 0\.5 s") as caught:
                destination.store(forwarder.chunk(forwarder.messages(3)), exactly_once=False)
        finally:
            queue.thaw()
        assert caught.value.hangs


def limit(queue: Queues, length: int) -> None:
    """Let a queue refuse messages beyond so many."""
    with queue.channel() as channel:
        channel.queue_delete("billing")
        arguments = {"x-max-length": length, "x-overflow": "reject-publish"}
        channel.queue_declare("billing", durable=True, arguments=arguments)


def test_a_queue_that_is_full_lets_messages_wait_and_loses_none(
    app: Dsn, queue: Queues, events: Rabbitmq
) -> None:
    limit(queue, 2)
    send_numbers(app, 0, 1)
    forward(app, chunk_rows=10, events=events)
    send_numbers(app, 2)
    (said,) = errors(app, events)
    assert "it has refused messages" in said
    assert texts(queue) == ["0", "1"]
    with queue.channel() as channel:
        channel.queue_purge("billing")
    let_time_pass(app)
    forward(app, chunk_rows=10, events=events)
    assert texts(queue) == ["2"]


def test_what_a_queue_takes_of_a_chunk_that_it_refuses_in_part_is_not_sent_again(
    queue: Queues, events: Rabbitmq
) -> None:
    limit(queue, 5)
    forwarder = Forwarder()
    rows = forwarder.messages(20)
    got: list[UUID] = []
    with closing(events.open("events")) as destination, queue.channel() as channel:
        for _ in range(3):
            with pytest.raises(Unavailable, match="it has refused messages"):
                all_stored(destination.store(forwarder.chunk(rows), exactly_once=False))
            got += ids(queue)
            channel.queue_purge("billing")
        done = all_stored(destination.store(forwarder.chunk(rows), exactly_once=False))
        assert done.messages == 20
    assert got + ids(queue) == [row["message_id"] for row in rows]


def test_a_queue_that_takes_less_than_a_chunk_gets_each_message_once_run_by_run(
    app: Dsn, queue: Queues, events: Rabbitmq
) -> None:
    limit(queue, 2)
    send_numbers(app, *range(7))
    got, complaints = list[str](), 0
    for _ in range(4):
        complaints += len(errors(app, events))
        got += texts(queue)
        with queue.channel() as channel:
            channel.queue_purge("billing")
        let_time_pass(app)
    assert (got, complaints) == ([str(number) for number in range(7)], 3)


def test_queues_get_each_message_once_while_another_one_of_their_destination_is_full(
    app: Dsn, queue: Queues, events: Rabbitmq
) -> None:
    limit(queue, 1)
    with connect(app) as connection:
        for number in range(6):
            send_to(connection, ("billing", "shipping")[number % 2], str(number))
    billed = list[str]()
    for _ in range(3):
        forward(app, chunk_rows=10, events=events)
        billed += texts(queue)
        with queue.channel() as channel:
            channel.queue_purge("billing")
        let_time_pass(app)
    assert (billed, texts(queue, "shipping")) == (["0", "2", "4"], ["1", "3", "5"])


def test_two_messages_that_say_the_same_id_both_come_although_the_queue_was_full(
    app: Dsn, queue: Queues, events: Rabbitmq
) -> None:
    limit(queue, 1)
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (message_id, to_service, key, body) "
            "SELECT gen_random_uuid(), 'billing', 'k', 'first'"
        )
        connection.execute(
            "INSERT INTO saf.outbox (message_id, to_service, key, body) "
            "SELECT message_id, 'billing', 'k', 'second' FROM saf.outbox"
        )
    forward(app, chunk_rows=10, events=events)
    got = texts(queue)
    with queue.channel() as channel:
        channel.queue_purge("billing")
    let_time_pass(app)
    forward(app, chunk_rows=10, events=events)
    assert got + texts(queue) == ["first", "second"]


def test_what_a_full_queue_has_taken_at_most_once_is_no_dead_letter(
    app: Dsn, queue: Queues, events: Rabbitmq
) -> None:
    limit(queue, 2)
    send_numbers(app, *range(5))
    forward(app, chunk_rows=10, events=Rabbitmq(server=events.server, quality="at_most_once"))
    with connect(app) as connection:
        dead = fetch(connection, "SELECT convert_from(body, 'UTF8') FROM saf.dead_letter")
    assert (texts(queue), sorted(dead)) == (["0", "1"], [("2",), ("3",), ("4",)])


def test_beside_a_message_that_no_queue_takes_a_full_queue_gets_each_one_once(
    app: Dsn, queue: Queues, events: Rabbitmq
) -> None:
    limit(queue, 2)
    with connect(app) as connection:
        for number, service in enumerate(("billing", "nobody", "billing", "billing")):
            send_to(connection, service, str(number))
    forward(app, chunk_rows=10, events=events)
    got = texts(queue)
    with queue.channel() as channel:
        channel.queue_purge("billing")
    let_time_pass(app)
    forward(app, chunk_rows=10, events=events)
    with connect(app) as connection:
        dead = fetch(connection, "SELECT convert_from(body, 'UTF8') FROM saf.dead_letter")
    assert (got, texts(queue), dead) == (["0", "2"], ["3"], [("1",)])


def test_a_queue_that_keeps_taking_some_is_tried_again_soon(
    app: Dsn, queue: Queues, events: Rabbitmq
) -> None:
    limit(queue, 1)
    send_numbers(app, *range(4))
    attempts = list[int]()
    for taken in (True, True, False, False):
        forward(app, chunk_rows=10, events=events)
        with connect(app) as connection:
            attempts += [one for (one,) in fetch(connection, "SELECT attempts FROM saf.backoff")]
        if taken:
            with queue.channel() as channel:
                channel.queue_purge("billing")
        let_time_pass(app)
    assert attempts == [1, 1, 1, 2]


def test_no_message_overtakes_one_that_a_full_queue_refuses_if_one_goes_at_a_time(
    queue: Queues,
) -> None:
    limit(queue, 1)
    settings = Rabbitmq(server=queue.address, step_rows=1)
    forwarder = Forwarder()
    rows = forwarder.messages(100, key="k")
    got: list[str] = []
    full = threading.Event()

    def work() -> None:
        with queue.channel() as channel:
            while len(got) < len(rows) and not full.wait(0.001):
                method, properties, _ = channel.basic_get("billing", auto_ack=True)
                if method is not None:
                    got.append(properties.message_id)

    worker = threading.Thread(target=work)
    with closing(settings.open("events")) as destination:
        worker.start()
        try:
            for _ in range(1000):
                with suppress(Unavailable):
                    all_stored(destination.store(forwarder.chunk(rows), exactly_once=False))
                    break
            until(lambda: len(got) == len(rows), seconds=10)
        finally:
            full.set()
            worker.join()
    assert got == [str(row["message_id"]) for row in rows]


@pytest.mark.full
def test_what_a_full_queue_refused_is_not_there_when_a_later_message_is_too_large(
    tmp_path: Path,
) -> None:
    with rabbitmq_server(tmp_path / "rabbitmq", max_message_size="100000") as server:
        queue = Queues(server=server)
        limit(queue, 1)
        settings = Rabbitmq(server=queue.address)  # so many at once that the last one goes, too
        forwarder = Forwarder()
        filling, *small = forwarder.messages(8)
        (large,) = forwarder.messages(1, body=b"x" * 200_000)
        with closing(settings.open("events")) as destination:
            destination.store(forwarder.chunk([filling]), exactly_once=False)
            with pytest.raises(Rejected, match="larger than"):
                all_stored(destination.store(forwarder.chunk([*small, large]), exactly_once=False))
            with queue.channel() as channel:
                channel.queue_delete("billing")
                channel.queue_declare("billing", durable=True)
            destination.store(forwarder.chunk(small), exactly_once=False)
        assert [one["saf-id"] for one in queue.entries("billing")] == [
            str(row["message_id"]) for row in small
        ]


@pytest.mark.full
def test_it_cannot_be_read_back_and_says_so(app: Dsn, events: Rabbitmq) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, events=events)
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert (found.counts, found.same) == ({"not_compared": 5}, True)
    assert "its kind, 'rabbitmq', cannot be read back" in found.unread["events"]


@pytest.mark.full
def test_an_exchange_is_reached_with_tls_by_who_may_write_there_and_by_nobody_else(
    tmp_path: Path,
) -> None:
    authority, public, key = signed(tmp_path)
    tls = free_port()
    rights = [
        {"user": "saf", "vhost": "/", "configure": "", "write": "^orders$", "read": ""},
        {"user": "other", "vhost": "/", "configure": "", "write": "", "read": ""},
        {"user": "guest", "vhost": "/", "configure": ".*", "write": ".*", "read": ".*"},
    ]
    users = [{"name": n, "password": f"{n}-hunter2", "tags": ""} for n in ("saf", "other")]
    definitions = tmp_path / "definitions.json"
    given = {"vhost": "/", "durable": True, "auto_delete": False, "arguments": {}}
    definitions.write_text(
        json.dumps(
            {
                "users": [*users, {"name": "guest", "password": "guest", "tags": ""}],
                "vhosts": [{"name": "/"}],
                "permissions": rights,
                "exchanges": [{"name": "orders", "type": "topic", "internal": False, **given}],
                "queues": [{"name": "mine", **given}],
                "bindings": [
                    {"source": "orders", "vhost": "/", "destination": "mine", "arguments": {},
                     "destination_type": "queue", "routing_key": "orders.*.paid"},
                ],
            }
        )
    )  # fmt: skip
    settings = {
        "load_definitions": str(definitions),
        "max_message_size": "100000",
        "listeners.ssl.1": f"127.0.0.1:{tls}",
        "ssl_options.cacertfile": str(authority),
        "ssl_options.certfile": str(public),
        "ssl_options.keyfile": str(key),
        "ssl_options.verify": "verify_peer",
        "ssl_options.fail_if_no_peer_cert": "true",
    }
    forwarder = Forwarder()
    rows = forwarder.messages(8, message_type="paid")
    with rabbitmq_server(tmp_path / "rabbitmq", **settings) as server:
        queue = Queues(server=server)
        events = Rabbitmq(
            server=f"amqps://localhost:{tls}",
            username="saf",
            password=SecretStr("saf-hunter2"),
            ca_file=authority,
            certificate_file=public,
            key_file=key,
            exchange="orders",
            topic="orders.{service}.{message_type}",
        )
        with closing(events.open("events")) as destination:
            destination.store(forwarder.chunk(rows), exactly_once=False)
            big = [*forwarder.messages(3, message_type="paid", body=b"x" * 200_000)[:1], *rows]
            with pytest.raises(Rejected, match="larger than"):
                all_stored(destination.store(forwarder.chunk(big), exactly_once=False))
        assert [one["saf-id"] for one in queue.entries("mine")] == [
            str(row["message_id"]) for row in rows
        ]
        with pytest.raises(Unavailable, match="certificate"):
            events.model_copy(update={"ca_file": None}).guarantee("events")
        plain = {"server": queue.address, "exchange": "orders"}
        for login, said in {
            ("stranger", "orders"): "the login is refused",
            ("other", "orders"): "access to exchange 'orders'",
            ("saf", "nowhere"): "no exchange 'nowhere'",
        }.items():
            name, exchange = login
            password = SecretStr(f"{name}-hunter2")
            another: dict[str, Any] = {"username": name, "password": password}
            there = Rabbitmq.model_validate({**plain, **another, "exchange": exchange})
            with (
                pytest.raises(Refused, match=said) as caught,
                closing(there.open("events")) as destination,
            ):
                destination.store(forwarder.chunk(rows), exactly_once=False)
            assert "hunter2" not in str(caught.value)
        with pytest.raises(Refused, match="virtual host 'other'"):
            Rabbitmq(server=f"{queue.address}/other").guarantee("events")
