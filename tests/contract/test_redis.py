"""Streams of a Redis server: exactly once, killed, cut off, set back, repaired, compared."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from saf.database import Dsn, fetch
from saf.database.bounds import Bounds
from saf.destinations.marks import MAIN, ONCE
from saf.destinations.redis import Redis
from saf.destinations.redis.streams import Streams
from saf.errors import Fenced, Unavailable
from saf.repair.reconcile import reconcile
from saf.repair.send_again import send_again
from saf.routing.routes import current_routes
from saf.setaside.lane import Kind
from saf.testing.forwarder import Forwarder
from saf.testing.victim import start
from tests.lossy import Lossy
from tests.pipeline import connect, forward, let_time_pass
from tests.redis_server import RedisServer, redis_server
from tests.redis_streams import entries, errors, ids, send_numbers, texts
from tests.sizes import sized
from tests.waits import until

WEEK = 7 * 86400.0


def test_messages_are_entries_in_their_order_and_each_is_there_once(
    app: Dsn, queue: RedisServer, events: Redis
) -> None:
    send_numbers(app, *range(10))
    forward(app, chunk_rows=3, events=events)
    send_numbers(app, 10, 11)
    forward(app, chunk_rows=3, events=events)
    assert texts(queue) == [str(number) for number in range(12)]
    with connect(app) as connection:
        sent = fetch(connection, "SELECT message_id::text, shard::text FROM saf.outbox ORDER BY id")
        ((source,),) = fetch(connection, "SELECT broker_id::text FROM saf.broker")
    there = entries(queue)
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


def test_a_chunk_whose_answer_was_lost_is_there_once(queue: RedisServer) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(300)
    chunk = forwarder.chunk(rows)
    with Lossy(queue.port) as proxy:
        events = Redis(server=f"redis://127.0.0.1:{proxy.port}", step_rows=100)
        with closing(events.open("events")) as destination:
            destination.connect()
            proxy.lose_answers_to(b"EVALSHA")
            with pytest.raises(Unavailable):
                destination.store(chunk, exactly_once=True)
            assert proxy.lost == 1
            proxy.lose_answers_to(b"")
            until(lambda: len(ids(queue)) in (100, 200, 300))
            done = destination.store(chunk, exactly_once=True)
    assert done.dropped >= 100
    assert ids(queue) == [row["message_id"] for row in rows]


def test_a_process_that_was_stopped_stores_nothing_after_the_new_owner_did(
    queue: RedisServer, events: Redis
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
        done = len(ids(queue))
        with closing(events.open("events")) as destination:
            destination.store(forwarder.chunk(rows), exactly_once=True)
        zombie.send_signal(signal.SIGCONT)
        zombie.stdout.read()
        assert zombie.wait(timeout=60) != 0 or done == 400
    assert ids(queue) == [row["message_id"] for row in rows]


@contextmanager
def interrupted(
    events: Redis, queue: RedisServer, meanwhile: Callable[[], object]
) -> Iterator[Any]:
    """A destination; once 120 messages of its first chunk are there, something else happens."""
    small = events.model_copy(update={"step_rows": 40})
    with closing(Streams("events", small)) as destination:
        steps: Any = destination._steps
        happened: list[object] = []

        def slowly(*given: Any) -> Iterator[Any]:
            for number, one in enumerate(steps(*given)):
                if number == 3 and not happened:
                    until(lambda: len(ids(queue)) == 120)
                    happened.append(meanwhile())
                yield one

        setattr(destination, "_steps", slowly)  # noqa: B010 - a patch of this one
        yield destination
        assert happened


def test_of_steps_in_flight_none_is_stored_after_one_that_was_not(
    queue: RedisServer, events: Redis
) -> None:
    """Another owner moves the marks between two steps."""
    forwarder = Forwarder()
    rows = forwarder.messages(400)
    zombie = forwarder.chunk(rows)

    def take_over() -> None:
        forwarder.epoch += 1
        with closing(events.open("events")) as other:
            other.store(forwarder.chunk(rows), exactly_once=True)

    with interrupted(events, queue, take_over) as destination, pytest.raises(Fenced):
        destination.store(zombie, exactly_once=True)
    assert ids(queue) == [row["message_id"] for row in rows]


@pytest.mark.parametrize("quality", [MAIN, ONCE])
def test_what_is_stored_is_not_stored_again_if_another_lane_is_stored_meanwhile(
    queue: RedisServer, events: Redis, quality: str
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(400)
    late = forwarder.messages(4)
    replayed = Kind.REPLAY if quality == MAIN else None

    def store_others() -> None:
        with closing(events.open("events")) as other:
            other.store(forwarder.chunk(late, lane=replayed), exactly_once=True)

    with interrupted(events, queue, store_others) as destination:
        done = destination.store(
            forwarder.chunk(rows, prefix=quality), exactly_once=quality == MAIN
        )
    assert (done.messages, done.dropped) == (400, 0)
    assert [one for one in ids(queue) if one not in {row["message_id"] for row in late}] == [
        row["message_id"] for row in rows
    ]
    assert len(ids(queue)) == 404


def test_a_script_that_the_server_has_forgotten_is_given_again(
    queue: RedisServer, events: Redis
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(8)
    with closing(events.open("events")) as destination:
        destination.store(forwarder.chunk(rows[:4]), exactly_once=True)
        queue.client().script_flush()
        with pytest.raises(Unavailable):  # then it connects anew
            destination.store(forwarder.chunk(rows), exactly_once=True)
        destination.store(forwarder.chunk(rows), exactly_once=True)
    assert ids(queue) == [row["message_id"] for row in rows]


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
    app: Dsn, queue: RedisServer, events: Redis
) -> None:
    send_numbers(app, 0)
    forward(app, chunk_rows=3, events=events)
    queue.client().flushall()
    send_numbers(app, 1)
    (said,) = errors(app, events=events)
    assert "does not have any more what it has acknowledged" in said
    assert texts(queue) == []


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


def test_it_is_compared_like_an_inbox(app: Dsn, queue: RedisServer, events: Redis) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, events=events)
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert (found.same, found.unread) == (True, {})
    client = queue.client()
    ((_, fields), *_) = client.xrange("{saf}:billing", count=1) or []
    client.xadd("{saf}:billing", fields)
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert found.counts == {"duplicate": 1}


def test_what_was_trimmed_is_not_taken_for_lost(
    app: Dsn, queue: RedisServer, events: Redis
) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, events=events)
    queue.client().xtrim("{saf}:billing", maxlen=3, approximate=False)
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert (found.counts, found.same) == ({"not_compared": 5}, True)
    assert found.unread == {"events": "2 entries of its stream {saf}:billing were removed"}
