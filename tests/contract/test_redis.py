"""Streams of a Redis server as a destination: forwarded to, killed, set back, repaired, refused."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary_event
from cloudevents.core.formats.json import JSONFormat

from saf import begin_dialog, begin_monolog
from saf.config import Broker, Settings
from saf.database import Dsn, fetch
from saf.database.bounds import Bounds
from saf.destinations.redis import Redis
from saf.errors import Fenced, Refused, SafError, Unavailable
from saf.operating.doctor import examine
from saf.repair.reconcile import reconcile
from saf.repair.send_again import send_again
from saf.routing.routes import current_routes
from saf.testing.forwarder import Forwarder
from saf.testing.victim import start
from tests.destinations import know, route, send_to
from tests.lossy import Lossy
from tests.pipeline import bodies, connect, forward, let_time_pass, send, stores
from tests.redis_server import RedisServer, redis_server
from tests.sizes import sized
from tests.waits import until

WEEK = 7 * 86400.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    running.client().flushall()
    return running


@pytest.fixture
def events(server: RedisServer) -> Redis:
    return Redis(server=server.address)


def entries(server: RedisServer, topic: str = "billing", tag: str = "saf") -> list[dict[str, str]]:
    with closing(server.client(decode_responses=True)) as client:
        return [fields for _, fields in client.xrange(f"{{{tag}}}:{topic}") or []]


def texts(server: RedisServer, topic: str = "billing") -> list[str]:
    return [fields["body"] for fields in entries(server, topic)]


def ids(server: RedisServer) -> list[UUID]:
    return [UUID(fields["saf-id"]) for fields in entries(server)]


def errors(app: Dsn, events: Redis) -> list[str]:
    return [one.error for one in forward(app, chunk_rows=3, events=events) if one.error]


def send_numbers(app: Dsn, *numbers: int) -> None:
    with connect(app) as connection:
        for number in numbers:
            send(connection, str(number), key="k")


# Exactly once


def test_messages_are_entries_in_their_order_and_each_is_there_once(
    app: Dsn, server: RedisServer, events: Redis
) -> None:
    send_numbers(app, *range(10))
    forward(app, chunk_rows=3, events=events)
    send_numbers(app, 10, 11)
    forward(app, chunk_rows=3, events=events)
    assert texts(server) == [str(number) for number in range(12)]
    with connect(app) as connection:
        sent = fetch(connection, "SELECT message_id::text, shard::text FROM saf.outbox ORDER BY id")
        ((source,),) = fetch(connection, "SELECT broker_id::text FROM saf.broker")
    there = entries(server)
    assert [(one["saf-id"], one["saf-shard"]) for one in there] == sent
    assert {one["saf-source"] for one in there} == {source}
    assert {(one["saf-service"], one["saf-key"]) for one in there} == {("billing", "k")}


@pytest.mark.parametrize("after", [0.0, 0.02, 0.1])
def test_a_server_that_is_killed_while_it_stores_has_each_message_once_in_the_end(
    tmp_path: Path, after: float
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(sized(4_000, 40_000))
    chunk = forwarder.chunk(rows)
    with redis_server(tmp_path / "redis") as server:
        events = Redis(server=server.address, step_rows=100)
        with closing(events.open("events")) as destination:
            destination.connect()
            killed = threading.Timer(after, server.kill)
            killed.start()
            attempts = 0
            while not (attempts and server.process):
                attempts += 1
                try:
                    destination.store(chunk, exactly_once=True)
                    killed.join()
                except Unavailable:
                    killed.join()
                if server.process is None:
                    server.start()
            destination.store(chunk, exactly_once=True)
        assert ids(server) == [row["message_id"] for row in rows]


def test_a_chunk_whose_answer_was_lost_is_there_once(server: RedisServer) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(300)
    chunk = forwarder.chunk(rows)
    with Lossy(server.port) as proxy:
        events = Redis(server=f"redis://127.0.0.1:{proxy.port}", step_rows=100)
        with closing(events.open("events")) as destination:
            destination.connect()
            proxy.lose_answers_to(b"EVALSHA")
            with pytest.raises(Unavailable):
                destination.store(chunk, exactly_once=True)
            assert proxy.lost == 1
            proxy.lose_answers_to(b"")
            until(lambda: len(ids(server)) in (100, 200, 300))
            done = destination.store(chunk, exactly_once=True)
    assert done.dropped >= 100
    assert ids(server) == [row["message_id"] for row in rows]


def test_a_process_that_was_stopped_stores_nothing_after_the_new_owner_did(
    server: RedisServer, events: Redis
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(400)
    chunks = [forwarder.chunk(rows[first : first + 4]) for first in range(0, 400, 4)]
    with start(events, chunks) as zombie:
        assert zombie.stdout is not None
        for _ in range(5):
            zombie.stdout.readline()
        zombie.send_signal(signal.SIGSTOP)
        forwarder.epoch += 1
        done = len(ids(server))
        with closing(events.open("events")) as destination:
            destination.store(forwarder.chunk(rows), exactly_once=True)
        zombie.send_signal(signal.SIGCONT)
        zombie.stdout.read()
        assert zombie.wait(timeout=60) != 0 or done == 400
    assert ids(server) == [row["message_id"] for row in rows]


def test_of_steps_in_flight_none_is_stored_after_one_that_was_not(
    server: RedisServer, events: Redis
) -> None:
    """Another owner moves the marks between two steps."""
    forwarder = Forwarder()
    rows = forwarder.messages(400)
    small = events.model_copy(update={"step_rows": 40})
    with closing(small.open("events")) as destination, closing(events.open("events")) as other:
        zombie = forwarder.chunk(rows)
        steps = destination._steps  # type: ignore[attr-defined]

        def interrupted(*given: Any) -> Iterator[Any]:
            for number, one in enumerate(steps(*given)):
                if number == 3:
                    until(lambda: len(ids(server)) == 120)
                    forwarder.epoch += 1
                    other.store(forwarder.chunk(rows), exactly_once=True)
                yield one

        destination._steps = interrupted  # type: ignore[attr-defined]
        with pytest.raises(Fenced):
            destination.store(zombie, exactly_once=True)
    assert ids(server) == [row["message_id"] for row in rows]


def test_a_script_that_the_server_has_forgotten_is_given_again(
    server: RedisServer, events: Redis
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(8)
    with closing(events.open("events")) as destination:
        destination.store(forwarder.chunk(rows[:4]), exactly_once=True)
        server.client().script_flush()
        with pytest.raises(Unavailable):  # then it connects anew
            destination.store(forwarder.chunk(rows), exactly_once=True)
        destination.store(forwarder.chunk(rows), exactly_once=True)
    assert ids(server) == [row["message_id"] for row in rows]


# Set back


def test_a_failover_that_lost_what_was_acknowledged_is_noticed_and_repaired(
    app: Dsn, tmp_path: Path
) -> None:
    with (
        redis_server(tmp_path / "one") as one,
        redis_server(tmp_path / "two", replicaof=f"127.0.0.1 {one.port}") as two,
    ):
        events = Redis(server=one.address)
        send_numbers(app, 0, 1)
        forward(app, chunk_rows=3, events=events)
        until(lambda: texts(two) == ["0", "1"])
        two.client().replicaof("NO", "ONE")  # what follows never gets there
        send_numbers(app, 2, 3)
        forward(app, chunk_rows=3, events=events)
        one.kill()
        with Lossy(two.port) as moved:  # the same name for another server
            after = Redis(server=f"redis://127.0.0.1:{moved.port}/0")
            send_numbers(app, 4)
            (said,) = errors(app, events=after)
            assert "does not have any more what it has acknowledged" in said
            assert texts(two) == ["0", "1"]
            sent = send_again(
                "app", app, {"events": after}, lambda it: current_routes(it, "events"),
                retention_seconds=WEEK,
            )  # fmt: skip
            assert sent is not None
            assert {name: len(ids) for name, ids in sent.by_destination.items()} == {"events": 2}
            for _ in range(2):
                let_time_pass(app)
                forward(app, chunk_rows=3, events=after)
            assert texts(two) == [str(number) for number in range(5)]
            found = reconcile("app", app, {"events": after}, retention_seconds=WEEK)
            assert (found.same, found.unread) == (True, {})


def test_a_server_that_has_lost_everything_is_not_taken_for_a_new_one(
    app: Dsn, server: RedisServer, events: Redis
) -> None:
    send_numbers(app, 0)
    forward(app, chunk_rows=3, events=events)
    server.client().flushall()
    send_numbers(app, 1)
    (said,) = errors(app, events=events)
    assert "does not have any more what it has acknowledged" in said
    assert texts(server) == []


def test_what_is_not_on_enough_replicas_does_not_count_as_stored(tmp_path: Path) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(8)
    with (
        redis_server(tmp_path / "one") as one,
        redis_server(tmp_path / "two", replicaof=f"127.0.0.1 {one.port}") as two,
    ):
        until(lambda: "online" in str(one.client().info().get("slave0")))
        events = Redis(server=one.address, replicas=1).bounded(Bounds(lock_seconds=0.5))
        with closing(events.open("events")) as destination:
            destination.store(forwarder.chunk(rows[:4]), exactly_once=True)
            assert ids(two) == [row["message_id"] for row in rows[:4]]
            two.freeze()
            for _ in range(2):  # also if all of it was stored before
                with pytest.raises(Unavailable, match="0 of 1 replicas have the messages"):
                    destination.store(forwarder.chunk(rows), exactly_once=True)
            two.thaw()
            destination.store(forwarder.chunk(rows), exactly_once=True)
        assert ids(one) == ids(two) == [row["message_id"] for row in rows]


# Routes, topics, what is set aside


def test_a_template_says_the_stream_of_each_message(
    app: Dsn, server: RedisServer, mom: Dsn
) -> None:
    events = Redis(server=server.address, topic="{service}.{message_type}", hash_tag="shop")
    with connect(app) as connection:
        for service in ("billing", "shipping"):
            route(connection, service, "events")
        connection.execute("INSERT INTO saf.topic VALUES ('prices')")
        route(connection, "prices", "events")
        route(connection, "prices", "mom")
        send_to(connection, "billing", "1", message_type="paid")
        send_to(connection, "shipping", "2")
        send_to(connection, "billing", "3", message_type="paid")
        send_to(connection, "prices", "4")
    forward(app, chunk_rows=10, events=events, mom=mom)
    assert [one["body"] for one in entries(server, "billing.paid", "shop")] == ["1", "3"]
    assert [one["body"] for one in entries(server, "shipping.untyped", "shop")] == ["2"]
    assert [one["body"] for one in entries(server, "prices.untyped", "shop")] == ["4"]
    assert bodies(mom) == ["4"]


def test_headers_of_the_sender_are_fields_and_what_cannot_be_one_is_a_dead_letter(
    app: Dsn, server: RedisServer, events: Redis
) -> None:
    with connect(app) as connection:
        for body, headers in [
            ("0", '{"trace": "ü", "n": 1.5, "deep": {"a": [null]}}'),
            ("1", '{"body": "x"}'),
            ("2", '{"saf-id": "x"}'),
            ("3", "[1]"),
            ("4", "{}"),
        ]:
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, body, headers) "
                "VALUES ('billing', 'k', %s, %s::jsonb)",
                [body.encode(), headers],
            )
        forward(app, chunk_rows=10, events=events)
        dead = fetch(connection, "SELECT reason, error FROM saf.dead_letter ORDER BY id")
    assert texts(server) == ["0", "4"]
    (first, _) = entries(server)
    assert (first["trace"], first["n"], first["deep"]) == ("ü", "1.5", '{"a":[null]}')
    assert [reason for reason, _ in dead] == ["rejected"] * 3
    for (_, error), named in zip(dead, ("'body'", "'saf-id'", "no JSON object"), strict=True):
        assert named in error


def test_a_body_that_the_server_does_not_take_is_a_dead_letter(app: Dsn, tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", proto_max_bulk_len="1mb") as server:
        with connect(app) as connection:
            for body in ("0", "x" * (2 << 20), "2"):
                send(connection, body, key="k")
            forward(app, chunk_rows=10, events=Redis(server=server.address))
            ((error,),) = fetch(connection, "SELECT error FROM saf.dead_letter")
        assert "more than proto-max-bulk-len (1,048,576) bytes" in error
        assert texts(server) == ["0", "2"]


def test_while_it_is_down_messages_are_parked_in_order_and_others_go_on(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis") as server, connect(app) as connection:
        events = Redis(server=server.address)
        route(connection, "billing", "events")
        route(connection, "shipping", "mom")
        with server.down():
            for number in range(4):
                send_to(connection, "billing", f"b{number}")
                send_to(connection, "shipping", f"s{number}")
            forward(app, chunk_rows=3, events=events, mom=mom)
            assert bodies(mom) == [f"s{number}" for number in range(4)]
        send_to(connection, "billing", "b4")
        for _ in range(2):
            let_time_pass(app)
            forward(app, chunk_rows=3, events=events, mom=mom)
        assert texts(server) == [f"b{number}" for number in range(5)]
        assert fetch(connection, "SELECT count(*) FROM saf.parked") == [(0,)]


def test_a_server_without_memory_gets_no_message_and_loses_none(
    app: Dsn, server: RedisServer, events: Redis
) -> None:
    send_numbers(app, 0)
    forward(app, chunk_rows=3, events=events)
    server.client().config_set("maxmemory", "1mb")
    try:
        send_numbers(app, 1)
        (said,) = errors(app, events=events)
        assert "unavailable" in said
        assert texts(server) == ["0"]
    finally:
        server.client().config_set("maxmemory", "0")
    let_time_pass(app)
    forward(app, chunk_rows=3, events=events)
    assert texts(server) == ["0", "1"]


def test_messages_of_a_dialog_wait_for_a_broker_and_those_of_a_monolog_go(
    app: Dsn, mom: Dsn, server: RedisServer, events: Redis
) -> None:
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.service VALUES ('shop')")
        connection.execute("INSERT INTO saf.topic VALUES ('prices')")
        route(connection, "billing", "events")
        route(connection, "prices", "events")
        with connection.transaction():
            begin_dialog(connection, from_service="shop", to_service="billing").send(
                connection, "order"
            )
            begin_monolog(connection, from_service="shop", topic="prices").send(connection, "price")
        send_to(connection, "billing", "plain", key="other")
        forward(app, chunk_rows=10, events=events, mom=mom)
        assert texts(server, "prices") == ["price"]
        assert entries(server, "prices")[0]["saf-sequence"] == "1"
        assert texts(server) == ["plain"]
        ((error,),) = fetch(connection, "SELECT error FROM saf.backoff")
        assert "'events' takes no messages of dialogs" in error
        assert "route 'billing' to a broker" in error
        config = Settings(
            brokers={"app": Broker(dsn=app)}, destinations={"events": events, **stores(mom=mom)}
        )
        (found,) = [one for one in examine(config) if one.check == "dialogs" and one.what]
        assert found.severity == "error"
        assert "dialogs with service 'billing' go to destination 'events'" in found.what
        know(mom, "billing")
        connection.execute("UPDATE saf.route SET destination = 'mom' WHERE service = 'billing'")
        let_time_pass(app)
        forward(app, chunk_rows=10, events=events, mom=mom)
        assert bodies(mom) == ["order"]


def test_as_cloud_events_they_are_read_by_the_library_of_cloud_events(
    app: Dsn, server: RedisServer
) -> None:
    with connect(app) as connection:
        send_to(connection, "billing", '{"n": 1}', message_type="paid",
                headers={"content-type": "application/json"})  # fmt: skip
        ((source, message_id),) = fetch(
            connection, "SELECT b.broker_id, o.message_id FROM saf.broker b, saf.outbox o"
        )
    forward(app, chunk_rows=3, events=Redis(server=server.address, format="cloudevents"))
    ((_, fields),) = server.client().xrange("{saf}:billing") or []
    headers = {name.decode(): value for name, value in fields.items()}
    body = headers.pop("body")
    event = from_binary_event(KafkaMessage(headers=headers, key=None, value=body), JSONFormat())
    assert event.get_id() == str(message_id)
    assert event.get_source() == f"urn:uuid:{source}"
    assert event.get_type() == "paid"
    assert event.get_data() == {"n": 1}
    assert event.get_extension("safservice") == "billing"


# Compared


def test_it_is_compared_like_an_inbox(app: Dsn, server: RedisServer, events: Redis) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, events=events)
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert (found.same, found.unread) == (True, {})
    client = server.client()
    ((_, fields), *_) = client.xrange("{saf}:billing", count=1) or []
    client.xadd("{saf}:billing", fields)
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert found.counts == {"duplicate": 1}


def test_what_was_trimmed_is_not_taken_for_lost(
    app: Dsn, server: RedisServer, events: Redis
) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, events=events)
    server.client().xtrim("{saf}:billing", maxlen=3, approximate=False)
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert (found.counts, found.same) == ({"not_compared": 5}, True)
    assert found.unread == {"events": "2 entries of its stream {saf}:billing were removed"}


# Refused


def test_a_server_that_may_throw_messages_away_is_refused(
    app: Dsn, server: RedisServer, events: Redis
) -> None:
    server.client().config_set("maxmemory-policy", "allkeys-lru")
    try:
        send_numbers(app, 0)
        (error,) = errors(app, events=events)
        assert "maxmemory-policy is allkeys-lru" in error
        assert "CONFIG SET maxmemory-policy noeviction" in error
        assert texts(server) == []
    finally:
        server.client().config_set("maxmemory-policy", "noeviction")


def test_a_replica_is_refused(tmp_path: Path, server: RedisServer) -> None:
    with (
        redis_server(tmp_path / "two", replicaof=f"127.0.0.1 {server.port}") as two,
        pytest.raises(Refused, match="it is a replica"),
    ):
        [*Redis(server=two.address).problems("events")]


def test_a_key_that_is_no_stream_is_named_and_nothing_stored(
    app: Dsn, server: RedisServer, events: Redis
) -> None:
    server.client().set("{saf}:billing", "mine")
    send_numbers(app, 0)
    (error,) = errors(app, events=events)
    assert "{saf}:billing is a string" in error
    server.client().delete("{saf}:billing")
    let_time_pass(app)
    forward(app, chunk_rows=3, events=events)
    assert texts(server) == ["0"]


RIGHTS = [
    "+@connection",
    "+@transaction",
    "+info",
    "+get",
    "+set",
    "+hmget",
    "+hgetall",
    "+hget",
    "+hset",
    "+type",
    "+sadd",
    "+xadd",
    "+evalsha",
    "+script|load",
]


def test_the_rights_that_the_page_lists_are_enough_and_each_is_named_if_it_lacks(
    server: RedisServer,
) -> None:
    client = server.client()
    forwarder = Forwarder()
    for lacking in ["", "+xadd", "+hset", "+evalsha", "+sadd"]:
        rights = [one for one in RIGHTS if one != lacking]
        client.execute_command(
            "ACL", "SETUSER", "saf", "RESET", "on", ">secret", "~{saf}*", *rights
        )
        events = Redis(server=server.address, username="saf", password="secret")  # type: ignore[arg-type]
        rows = forwarder.messages(4)
        with closing(events.open("events")) as destination:
            if not lacking:
                destination.store(forwarder.chunk(rows), exactly_once=True)
                there = ids(server)
                assert there == [row["message_id"] for row in rows]
            else:
                with pytest.raises(SafError) as caught:
                    destination.store(forwarder.chunk(rows), exactly_once=True)
                assert lacking.removeprefix("+") in str(caught.value).lower()
                assert ids(server) == there
    client.acl_deluser("saf")
