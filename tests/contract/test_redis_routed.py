"""Streams of a Redis server: routes, topics, what is parked, what is rejected, what is refused."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary_event
from cloudevents.core.formats.json import JSONFormat

from saf import begin_dialog, begin_monolog
from saf.config import Broker, Settings
from saf.database import Dsn, fetch
from saf.destinations.redis import Redis
from saf.errors import Refused, SafError
from saf.operating.doctor import examine
from saf.testing.forwarder import Forwarder
from tests.destinations import know, route, send_to
from tests.pipeline import bodies, connect, forward, let_time_pass, send, stores
from tests.programs import ROOT
from tests.redis_server import RedisServer, redis_server
from tests.redis_streams import entries, errors, ids, send_numbers, texts


def test_a_template_says_the_stream_of_each_message(app: Dsn, queue: RedisServer, mom: Dsn) -> None:
    events = Redis(server=queue.address, topic="{service}.{message_type}", hash_tag="shop")
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
    assert [one["body"] for one in entries(queue, "billing.paid", "shop")] == ["1", "3"]
    assert [one["body"] for one in entries(queue, "shipping.untyped", "shop")] == ["2"]
    assert [one["body"] for one in entries(queue, "prices.untyped", "shop")] == ["4"]
    assert bodies(mom) == ["4"]


def test_headers_of_the_sender_are_fields_and_what_cannot_be_one_is_a_dead_letter(
    app: Dsn, queue: RedisServer, events: Redis
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
    assert texts(queue) == ["0", "4"]
    (first, _) = entries(queue)
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
    app: Dsn, queue: RedisServer, events: Redis
) -> None:
    send_numbers(app, 0)
    forward(app, chunk_rows=3, events=events)
    queue.client().config_set("maxmemory", "1mb")
    try:
        send_numbers(app, 1)
        (said,) = errors(app, events=events)
        assert "unavailable" in said
        assert texts(queue) == ["0"]
    finally:
        queue.client().config_set("maxmemory", "0")
    let_time_pass(app)
    forward(app, chunk_rows=3, events=events)
    assert texts(queue) == ["0", "1"]


def test_messages_of_a_dialog_wait_for_a_broker_and_those_of_a_monolog_go(
    app: Dsn, mom: Dsn, queue: RedisServer, events: Redis
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
        assert texts(queue, "prices") == ["price"]
        assert entries(queue, "prices")[0]["saf-sequence"] == "1"
        assert texts(queue) == ["plain"]
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
    app: Dsn, queue: RedisServer
) -> None:
    with connect(app) as connection:
        send_to(connection, "billing", '{"n": 1}', message_type="paid",
                headers={"content-type": "application/json"})  # fmt: skip
        ((source, message_id),) = fetch(
            connection, "SELECT b.broker_id, o.message_id FROM saf.broker b, saf.outbox o"
        )
    forward(app, chunk_rows=3, events=Redis(server=queue.address, format="cloudevents"))
    ((_, fields),) = queue.client().xrange("{saf}:billing") or []
    headers = {name.decode(): value for name, value in fields.items()}
    body = headers.pop("body")
    event = from_binary_event(KafkaMessage(headers=headers, key=None, value=body), JSONFormat())
    assert event.get_id() == str(message_id)
    assert event.get_source() == f"urn:uuid:{source}"
    assert event.get_type() == "paid"
    assert event.get_data() == {"n": 1}
    assert event.get_extension("safservice") == "billing"


def test_a_server_that_may_throw_messages_away_is_refused(
    app: Dsn, queue: RedisServer, events: Redis
) -> None:
    queue.client().config_set("maxmemory-policy", "allkeys-lru")
    try:
        send_numbers(app, 0)
        (error,) = errors(app, events=events)
        assert "maxmemory-policy is allkeys-lru" in error
        assert "CONFIG SET maxmemory-policy noeviction" in error
        assert texts(queue) == []
    finally:
        queue.client().config_set("maxmemory-policy", "noeviction")


def test_a_replica_is_refused(tmp_path: Path, queue: RedisServer) -> None:
    with (
        redis_server(tmp_path / "two", replicaof=f"127.0.0.1 {queue.port}") as two,
        pytest.raises(Refused, match="it is a replica"),
    ):
        [*Redis(server=two.address).problems("events")]


def test_a_key_that_is_no_stream_is_named_and_nothing_stored(
    app: Dsn, queue: RedisServer, events: Redis
) -> None:
    queue.client().set("{saf}:billing", "mine")
    send_numbers(app, 0)
    (error,) = errors(app, events=events)
    assert "{saf}:billing is a string" in error
    queue.client().delete("{saf}:billing")
    let_time_pass(app)
    forward(app, chunk_rows=3, events=events)
    assert texts(queue) == ["0"]


RIGHTS = re.findall(r"ACL SETUSER saf .*", (ROOT / "docs" / "destinations.md").read_text())[
    0
].split()


def test_the_rights_that_the_page_lists_are_enough_and_each_is_named_if_it_lacks(
    queue: RedisServer,
) -> None:
    client = queue.client()
    forwarder = Forwarder()
    for lacking in ["", "+xadd", "+hset", "+evalsha", "+sadd"]:
        client.acl_deluser("saf")
        client.execute_command(*(one for one in RIGHTS if one != lacking))
        events = Redis(server=queue.address, username="saf", password="secret")  # type: ignore[arg-type]
        rows = forwarder.messages(4)
        with closing(events.open("events")) as destination:
            if not lacking:
                destination.store(forwarder.chunk(rows), exactly_once=True)
                there = ids(queue)
                assert there == [row["message_id"] for row in rows]
            else:
                with pytest.raises(SafError) as caught:
                    destination.store(forwarder.chunk(rows), exactly_once=True)
                assert lacking.removeprefix("+") in str(caught.value).lower()
                assert ids(queue) == there
    client.acl_deluser("saf")
