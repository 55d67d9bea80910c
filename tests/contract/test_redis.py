"""Streams of a Redis server: exactly once, killed, cut off, set back, repaired, compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from saf.database import Dsn
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
from tests.lossy import Lossy
from tests.pipeline import forward, let_time_pass
from tests.queue_suite import QueueSuite, errors, ids, send_numbers, texts
from tests.redis_server import RedisServer, redis_server
from tests.waits import until

WEEK = 7 * 86400.0


class TestRedis(QueueSuite):
    """What every queue has to keep."""

    request = b"EVALSHA"

    @pytest.fixture
    def queue(self, tmp_path: Path) -> Iterator[RedisServer]:
        with redis_server(tmp_path / "redis") as server:
            yield server

    def at(self, port: int) -> Redis:
        return Redis(server=f"redis://127.0.0.1:{port}/0", step_rows=100)


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
            (said,) = errors(app, after)
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


def test_what_is_not_on_enough_replicas_does_not_count_as_stored(tmp_path: Path) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(8)
    with (
        redis_server(tmp_path / "one") as one,
        redis_server(tmp_path / "two", replicaof=f"127.0.0.1 {one.port}") as two,
    ):
        until(lambda: follows(one))
        events = Redis(server=one.address, replicas=1).bounded(Bounds(lock_seconds=0.5))
        with closing(events.open("events")) as destination:
            destination.store(forwarder.chunk(rows[:4]), exactly_once=True)
            assert ids(two) == [row["message_id"] for row in rows[:4]]
            two.freeze()
            for _ in range(2):  # also if all of it was stored before
                with pytest.raises(Unavailable, match="0 of 1 replicas have the messages"):
                    destination.store(forwarder.chunk(rows), exactly_once=True)
            two.thaw()
            until(lambda: follows(one))
            destination.store(forwarder.chunk(rows), exactly_once=True)
        assert ids(one) == ids(two) == [row["message_id"] for row in rows]


def follows(one: RedisServer) -> bool:
    """Whether its replica has what is written now."""
    with closing(one.client()) as client:
        client.set("written", "now")
        return bool(client.wait(1, 100) == 1)


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
