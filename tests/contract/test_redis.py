"""Streams of a Redis server: exactly once, killed, cut off, set back, repaired, compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from saf.database import Dsn, fetch
from saf.database.bounds import Bounds
from saf.destinations.redis import Redis
from saf.errors import Unavailable
from saf.operating.repair.reconcile import reconcile
from saf.operating.repair.send_again import send_again
from saf.routing.routes import current_routes
from saf.testing.forwarder import Forwarder, all_stored
from tests.lossy import Lossy
from tests.pipeline import connect, forward, let_time_pass
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


def test_marks_that_somebody_has_written_make_no_dead_letters(
    app: Dsn, queue: RedisServer, events: Redis
) -> None:
    send_numbers(app, 0, 1)
    forward(app, events=events)
    client = queue.client()
    (marks,) = client.keys("*marks*")
    before = client.hgetall(marks)
    send_numbers(app, 2)
    for text in ("7", "a b c d e", "1 2 3 1 yesterday", b"\xff"):
        client.hset(marks, mapping=dict.fromkeys(before, text))
        (said,) = errors(app, events)
        assert "its marks cannot be read" in said
        let_time_pass(app)
    client.hset(marks, mapping=before)
    forward(app, events=events)
    assert texts(queue) == ["0", "1", "2"]
    with connect(app) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.dead_letter") == [(0,)]


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
            assert "has lost messages that it acknowledged" in said
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


@pytest.mark.parametrize("exactly_once", [True, False])
def test_nothing_is_stored_while_too_few_replicas_follow(
    tmp_path: Path, exactly_once: bool
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(8)
    with (
        redis_server(tmp_path / "one") as one,
        redis_server(tmp_path / "two", replicaof=f"127.0.0.1 {one.port}") as two,
    ):
        until(lambda: follows(one))
        events = Redis(server=one.address, replicas=1).bounded(Bounds(lock_seconds=0.5))
        with closing(events.open("events")) as destination:
            destination.store(forwarder.chunk(rows[:4]), exactly_once=exactly_once)
            assert ids(two) == [row["message_id"] for row in rows[:4]]
            two.freeze()
            for _ in range(3):
                with pytest.raises(Unavailable, match="0 of 1 replicas have"):
                    destination.store(forwarder.chunk(rows[4:]), exactly_once=exactly_once)
            two.thaw()
            until(lambda: follows(one))
            destination.store(forwarder.chunk(rows[4:]), exactly_once=exactly_once)
        assert ids(one) == ids(two) == [row["message_id"] for row in rows]


def test_what_was_stored_before_is_waited_for_by_a_write(tmp_path: Path) -> None:
    """Since Redis 7.2, WAIT counts all replicas if its connection has written nothing."""
    forwarder = Forwarder()
    rows = forwarder.messages(4)
    with (
        redis_server(tmp_path / "one") as one,
        redis_server(tmp_path / "two", replicaof=f"127.0.0.1 {one.port}"),
    ):
        until(lambda: follows(one))
        events = Redis(server=one.address, replicas=1)
        with closing(events.open("events")) as destination, closing(one.client()) as client:
            destination.store(forwarder.chunk(rows), exactly_once=True)
            with client.monitor() as monitor:
                again = all_stored(destination.store(forwarder.chunk(rows), exactly_once=True))
                assert (again.messages, again.dropped) == (0, 4)
                said = [""]
                while not said[-1].startswith("EVALSHA"):
                    said.append(monitor.next_command()["command"])
                since = [""]
                while not since[-1].startswith("WAIT"):
                    since.append(monitor.next_command()["command"])
        assert any(one.startswith(("SET ", "HSET ", "SADD ", "XADD ")) for one in since), since


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


def test_what_others_write_into_its_streams_is_passed_over(
    app: Dsn, queue: RedisServer, events: Redis
) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, events=events)
    queue.client().xadd("{saf}:billing", {b"\xff": b"no text", b"saf-source": b"\xfe"})
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert (found.same, found.unread) == (True, {})


def test_what_was_trimmed_is_not_taken_for_lost(
    app: Dsn, queue: RedisServer, events: Redis
) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, events=events)
    queue.client().xtrim("{saf}:billing", maxlen=3, approximate=False)
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert (found.counts, found.same) == ({"not_compared": 5}, True)
    assert found.unread == {"events": "2 entries of its stream {saf}:billing were removed"}
