"""Streams of a Redis server: routes, topics, what is parked, what is rejected, what is refused."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary_event
from cloudevents.core.formats.json import JSONFormat

from saf.database import Dsn, fetch
from saf.destinations.redis import Redis
from saf.errors import Refused, SafError
from saf.testing.forwarder import Forwarder
from tests.destinations import route, send_to
from tests.pipeline import bodies, connect, forward, let_time_pass, send
from tests.programs import ROOT
from tests.queue_suite import errors, ids, send_numbers, texts
from tests.redis_server import RedisServer, redis_server


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
    assert [one["body"] for one in queue.entries("billing.paid", "shop")] == ["1", "3"]
    assert [one["body"] for one in queue.entries("shipping.untyped", "shop")] == ["2"]
    assert [one["body"] for one in queue.entries("prices.untyped", "shop")] == ["4"]
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
    (first, _) = queue.entries()
    assert (first["trace"], first["n"], first["deep"]) == ("ü", "1.5", '{"a":[null]}')
    assert [reason for reason, _ in dead] == ["rejected"] * 3
    for (_, error), named in zip(dead, ("'body'", "'saf-id'", "not a JSON object"), strict=True):
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


def test_a_server_without_memory_gets_no_message_and_loses_none(
    app: Dsn, queue: RedisServer, events: Redis
) -> None:
    send_numbers(app, 0)
    forward(app, chunk_rows=3, events=events)
    queue.client().config_set("maxmemory", "1mb")
    try:
        send_numbers(app, 1)
        (said,) = errors(app, events)
        assert "unavailable" in said
        assert texts(queue) == ["0"]
    finally:
        queue.client().config_set("maxmemory", "0")
    let_time_pass(app)
    forward(app, chunk_rows=3, events=events)
    assert texts(queue) == ["0", "1"]


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
        (error,) = errors(app, events)
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
    (error,) = errors(app, events)
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
